"""Names, number formats and configuration of the Hugging Face tensors of a run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from megacore.errors import MegacoreError
from megatrain.config import Config, ResolvedConfig
from megatrain.hf.export_hf import HFTensors
from megatrain.hf.kept_files import KeptFiles
from megatrain.models.build import torch_dtype


@dataclass(frozen=True, kw_only=True)
class ExportPlan:
    """What an export of a run is, apart from the values.

    Attributes:
        config: Content of ``config.json``.
        tensors: Names, shapes and number formats of the tensors, and their map to parameters.
        dtype: Number format of most tensors.
        merged_dtype: Number format that merged weights are rounded to; ``None``: that of the base.
        notes: Differences from the imported files, one sentence each.
    """

    config: dict[str, Any]
    tensors: HFTensors
    dtype: str
    merged_dtype: torch.dtype | None
    notes: tuple[str, ...]


def plan_export(
    config: Config | ResolvedConfig,
    kept: KeptFiles,
    *,
    dtype: str | None = None,
    family: str | None = None,
) -> ExportPlan:
    """Decide the tensors of a run, for files and for a stream alike.

    Args:
        config: The configuration of the run.
        kept: The files that are kept with it.
        dtype: As for `export_checkpoint`.
        family: As for `export_checkpoint`.

    Raises:
        MegacoreError: If no family has the model's shape, or the number format is unknown.
    """
    check_dtype(dtype)
    is_kept = dtype is None and kept.dtype is not None
    trained = config.train.dtype or "float32"
    hf_config, notes = kept.config(config.model, config.moe, family)
    tensors = HFTensors(
        hf_config["model_type"],
        config.model,
        config.moe,
        dtype=torch_dtype(dtype or kept.dtype or trained),
        others={} if dtype else kept.dtypes,
    )
    if dtype or not kept.dtype:
        dtype = dtype or trained
        stated = [name for name in ("dtype", "torch_dtype") if name in hf_config]
        hf_config |= dict.fromkeys(stated or ("dtype", "torch_dtype"), dtype)
        notes += kept.rounding(tensors.specs, dtype)
    elif trained == "float32" != kept.dtype:
        notes += (
            f"the weights are {kept.dtype}, as in the imported files, though train.dtype is "
            f"{trained}; --dtype {trained} keeps more digits",
        )
    dtype = dtype or str(kept.dtype)
    return ExportPlan(
        config=hf_config,
        tensors=tensors,
        dtype=dtype,
        merged_dtype=None if is_kept else torch_dtype(dtype),
        notes=notes,
    )


def check_dtype(dtype: str | None) -> None:
    """Check the name of a number format to export in.

    Raises:
        MegacoreError: If it is unknown.
    """
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise MegacoreError(f"dtype must be float32, bfloat16 or float16, got {dtype}")
