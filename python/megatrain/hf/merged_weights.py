"""Weights of a run with low-rank adapters, merged into those of its base."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megacore.parallel.param_info import ParamInfo
from megatrain.checkpoint import StoredWeights
from megatrain.checkpoint.base_weights import find_base
from megatrain.config import LoraConfig, config_from_values
from megatrain.hf.export_hf import ParamSource
from megatrain.hf.import_hf import HFWeights, describe_params, open_folder
from megatrain.hf.peft_names import Adapter, projection_rows
from megatrain.hf_folder import is_model_folder
from megatrain.models.adapter_infos import projections_of


class AdapterSource(Protocol):
    """Parameters of a run with adapters, such as `StoredWeights` of its checkpoint."""

    def names(self) -> list[str]:
        """Return the names of all parameters."""

    def dtype(self, name: str, /) -> torch.dtype:
        """Return the number format of a parameter."""

    def read_param(self, name: str, /) -> Tensor:
        """Read a whole parameter."""


class MergedWeights:
    """Merged parameters, read on demand; a `ParamSource`.

    The weight of a projection is ``W + scale * B A``, with DoRA scaled to the norms of its rows,
    computed in float32 and rounded once to the number format of W. Parameters that the run trains
    whole are its own.

    Args:
        base: Parameters of the frozen model.
        adapters: Parameters of the run.
        infos: Descriptions of the parameters of the model, without adapters.
        lora: The ``[lora]`` section of the run.
        dtype: Number format of the result; merged weights of another one stay in float32.
            Default: that of W.
    """

    def __init__(
        self,
        base: ParamSource,
        adapters: AdapterSource,
        infos: Iterable[ParamInfo],
        lora: LoraConfig,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._base, self._run, self._lora, self._dtype = base, adapters, lora, dtype
        self._own = set(adapters.names())
        self._infos = {info.name: info for info in infos}
        self._adapted = {
            name
            for name, info in self._infos.items()
            if any(f"{each.name}.lora_a" in self._own for each in projections_of(info))
        }

    def names(self) -> list[str]:
        """Return the names of all parameters and checkpointed buffers."""
        return list(self._infos)

    def dtype(self, name: str) -> torch.dtype:
        """Return the number format of a parameter that is not merged."""
        return self._run.dtype(name) if name in self._own else self._base.dtype(name)

    def has_ranges(self, name: str) -> bool:
        """Check whether ranges of a flattened parameter can be read: it is that of the base."""
        is_base = name not in self._own and name not in self._adapted
        return is_base and self._base.has_ranges(name)

    def read_range(self, name: str, start: int, into: Tensor) -> None:
        """Read a range of a flattened parameter of the base into a contiguous tensor."""
        self._base.read_range(name, start, into)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read whole parameters by name."""
        return {name: self.read_param(name) for name in names}

    @torch.no_grad()
    def read_param(self, name: str) -> Tensor:
        """Read and merge a whole parameter.

        Beside it, memory holds its adapters and one projection in float32, of one expert.
        """
        if name in self._own:
            return self._run.read_param(name)
        weight = self._base.read_param(name)
        if name in self._adapted:
            info = self._infos[name]
            if self._dtype not in (None, weight.dtype):
                weight = weight.float()
            merge(weight, info, read_adapters(self._run, info), self._lora.scale)
        return weight


def open_base(stored: StoredWeights, *, path: str | Path | None = None) -> ParamSource:
    """Open the weights that a run with adapters started from.

    Args:
        stored: A checkpoint of the run.
        path: Their folder. Default: where the run found them.

    Raises:
        MegacoreError: If the base is missing, damaged, or not that of the run.
    """
    found = Path(find_base(path, stored.folder).path)
    if not is_model_folder(found):
        return StoredWeights(found)
    config = config_from_values(stored.config, source=str(stored.folder))
    folder = open_folder(found, seq_length=config.model.seq_length)
    return HFWeights(folder.files, folder.config, config.model, config.moe)


def open_merged(
    stored: StoredWeights,
    *,
    path: str | Path | None = None,
    dtype: torch.dtype | None = None,
) -> MergedWeights:
    """Open the merged weights of a checkpoint of a run with adapters.

    Args:
        stored: A checkpoint of the run.
        path: As for `open_base`.
        dtype: As for `MergedWeights`.

    Raises:
        MegacoreError: As `open_base`.
    """
    config = config_from_values(stored.config, source=str(stored.folder))
    base = open_base(stored, path=path)
    infos = describe_params(config.model, config.moe)
    return MergedWeights(base, stored, infos, config.lora, dtype=dtype)


def read_adapters(source: AdapterSource, info: ParamInfo) -> dict[str, Adapter]:
    """Read the adapters of a parameter by projection; empty if it has none."""
    known = set(source.names())
    found = {}
    for projection in projections_of(info):
        name = projection.name
        if f"{name}.lora_a" in known:
            has_norms = f"{name}.lora_magnitude" in known
            found[name] = Adapter(
                a=source.read_param(f"{name}.lora_a").float(),
                b=source.read_param(f"{name}.lora_b").float(),
                magnitude=source.read_param(f"{name}.lora_magnitude") if has_norms else None,
            )
    return found


def merge(weight: Tensor, info: ParamInfo, adapters: Mapping[str, Adapter], scale: float) -> None:
    """Merge adapters into a whole parameter in place, in float32 with one rounding.

    Args:
        weight: The parameter, contiguous, of any float dtype.
        info: Its description.
        adapters: Adapters by projection.
        scale: Factor on the product of B and A.
    """
    for projection, rows in zip(projections_of(info), projection_rows(weight, info), strict=True):
        adapter = adapters.get(projection.name)
        if adapter is None:
            continue
        experts = [(rows, adapter.a, adapter.b)]
        if info.expert:
            experts = list(zip(rows, adapter.a, adapter.b, strict=True))
        for part, a, b in experts:
            merged = part.float().flatten(0, -2) + (b @ a) * scale
            if adapter.magnitude is not None:
                norms = torch.linalg.norm(merged, dim=1)
                merged = (adapter.magnitude / norms).view(-1, 1) * merged
            part.copy_(merged.view(part.shape))
