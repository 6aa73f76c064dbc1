"""Export of the adapters of a run in the format of PEFT."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megacore.errors import MegacoreError
from megatrain.config import config_from_values
from megatrain.files import describe_os_error, filled_folder
from megatrain.hf import config_to_hf
from megatrain.hf.adapter_plan import AdapterPlan, origin_of
from megatrain.hf.export_checkpoint import check_free, open_stored
from megatrain.hf.kept_files import KeptFiles
from megatrain.hf.merged_weights import open_base
from megatrain.hf.peft_config import WEIGHTS_NAME, vllm_warnings
from megatrain.hf_folder import ADAPTER_NAME, write_file, write_json
from megatrain.models.build import torch_dtype


@dataclass(frozen=True, kw_only=True)
class ExportedAdapter:
    """Result of an export.

    Attributes:
        checkpoint: The checkpoint that was read.
        config: Content of ``adapter_config.json``.
        num_params: Parameters of the adapters, and of modules that are saved whole.
        notes: Differences from the settings of the run, one sentence each.
        warnings: What other programs refuse, one sentence each.
    """

    checkpoint: Path
    config: dict[str, Any]
    num_params: int
    notes: tuple[str, ...]
    warnings: tuple[str, ...]


def export_adapter(
    path: str | Path,
    out: str | Path,
    *,
    base: str | None = None,
    dtype: str | None = None,
    step: int | None = None,
    family: str | None = None,
    averaged: bool = False,
) -> ExportedAdapter:
    """Write the adapters of a checkpoint of any layout in the format of PEFT, in this process.

    Writes ``adapter_model.safetensors`` and ``adapter_config.json``. Memory: the adapters, and the
    modules that are trained whole.

    Args:
        path: A checkpoint folder, the folder of all checkpoints, or a run's folder.
        out: Output folder; must be new or empty.
        base: ``base_model_name_or_path``. Default: the folder that the run started from.
        dtype: Number format. Default: ``"float32"``.
        step: The checkpoint's step. Default: the latest.
        family: ``model_type`` of the base. Default: that of the import, else the first that has
            the model's shape.
        averaged: Write the moving average (``optimizer.ema_decay``).

    Raises:
        CheckpointError: If the checkpoint is missing or damaged, or has no moving average.
        MegacoreError: If the run has no adapters, PEFT has no form for them, or ``out`` is not
            empty or not writable.
    """
    out = check_free(out)
    stored = open_stored(path, step=step, averaged=averaged)
    config = config_from_values(stored.config, source=str(stored.folder))
    if not config.lora.is_on:
        raise MegacoreError(
            f"{stored.folder} is not of a run with adapters (lora.rank is not set); leave "
            "--adapter out"
        )
    kept = KeptFiles.of(config.data.tokenizer, stored.folder)
    original = kept.original or config_to_hf(config.model, config.moe, family=family)
    own = stored.names()
    plan = AdapterPlan(
        config,
        own,
        family or original["model_type"],
        dtype=torch_dtype(dtype or "float32"),
    )
    with stored, torch.no_grad():
        found = plan.tensors(stored, functools.cache(lambda: open_base(stored)))
        values = {spec.name: value for spec, value in found if value is not None}
        stored.verify()
    origin = base or origin_of(stored.state.base["path"], original)
    settings, notes = plan.settings(origin), plan.notes
    if origin is None:
        notes = [
            *notes,
            "base_model_name_or_path is empty, since the recorded base is not a Hugging Face "
            f"folder or not there ({stored.state.base['path']}); name the base with --base",
        ]
    specs = sorted(plan.specs, key=lambda spec: spec.name)
    try:
        with filled_folder(out):
            write_file(out / WEIGHTS_NAME, specs, ([values[spec.name]] for spec in specs))
            write_json(out / ADAPTER_NAME, settings)
    except OSError as error:
        raise MegacoreError(f"cannot write to {out}: {describe_os_error(error)}") from error
    return ExportedAdapter(
        checkpoint=stored.folder,
        config=settings,
        num_params=sum(math.prod(spec.shape) for spec in specs),
        notes=tuple(notes),
        warnings=vllm_warnings(settings),
    )
