"""Weights of a run with low-rank adapters, merged into those of its base."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from megacore.ops.low_rank import low_rank_sum
from megacore.parallel.param_info import ParamInfo
from megatrain.checkpoint import StoredWeights
from megatrain.checkpoint.base_weights import find_base
from megatrain.config import LoraConfig, config_from_values
from megatrain.hf.export_hf import ParamSource
from megatrain.hf.import_hf import HFWeights, describe_params, open_folder
from megatrain.hf.peft_names import Adapter, projection_rows
from megatrain.hf_folder import is_model_folder
from megatrain.models.adapter_infos import Projection, projections_of


class PartSource(Protocol):
    """Parameters that are read by parts, from files or from the ranks of a running trainer.

    A source that gathers from ranks returns ``None`` on those that get no values.
    """

    def dtype(self, name: str, /) -> torch.dtype:
        """Return the number format of a parameter."""

    def read_part(self, name: str, first: int, last: int, /) -> Tensor | None:
        """Read the elements ``[first, last)`` of the first dimension of a parameter."""

    def read_param(self, name: str, /) -> Tensor | None:
        """Read a whole parameter."""


class RunSource(PartSource, Protocol):
    """Parameters of a run with adapters, such as `StoredWeights` of its checkpoint."""

    def names(self) -> Collection[str]:
        """Return the names of all parameters."""


class BaseFiles(ParamSource, Protocol):
    """Parameters of a base in files."""

    def read_part(self, name: str, first: int, last: int, /) -> Tensor:
        """Read the elements ``[first, last)`` of the first dimension of a parameter."""


class MergedParts:
    """Merged parameters, read by parts; a `PartSource`.

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
        base: PartSource,
        adapters: RunSource,
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

    def is_merged(self, name: str) -> bool:
        """Check whether a parameter has adapters."""
        return name in self._adapted

    def dtype(self, name: str) -> torch.dtype:
        """Return the number format of a parameter that is not merged."""
        return self._source(name).dtype(name)

    @torch.no_grad()
    def read_part(self, name: str, first: int, last: int) -> Tensor | None:
        """Read and merge the elements ``[first, last)`` of the first dimension of a parameter.

        These are projections, or experts. Beside them, memory holds their adapters and one
        projection in float32, of one expert.
        """
        weight = self._source(name).read_part(name, first, last)
        if name not in self._adapted:
            return weight
        info = self._infos[name]
        adapters = read_adapters(self._run, info, first, last)
        if weight is None or adapters is None:
            return None
        if self._dtype not in (None, weight.dtype):
            weight = weight.float()
        projections = projections_of(info)
        if not info.expert and last - first < info.full_shape[0]:
            projections = projections[first:last]
        merge(weight, info, projections, adapters, self._lora.scale)
        return weight

    def _source(self, name: str) -> PartSource:
        return self._run if name in self._own else self._base


class MergedWeights(MergedParts):
    """Merged parameters of a checkpoint and a base in files; a `ParamSource`."""

    def __init__(
        self,
        base: BaseFiles,
        adapters: StoredWeights,
        infos: Iterable[ParamInfo],
        lora: LoraConfig,
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(base, adapters, infos, lora, dtype=dtype)
        self._files = base

    def has_ranges(self, name: str) -> bool:
        """Check whether ranges of a flattened parameter can be read: it is that of the base."""
        is_base = name not in self._own and name not in self._adapted
        return is_base and self._files.has_ranges(name)

    def read_range(self, name: str, start: int, into: Tensor) -> None:
        """Read a range of a flattened parameter of the base into a contiguous tensor."""
        self._files.read_range(name, start, into)

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Read whole parameters by name."""
        return {name: self.read_param(name) for name in names}

    def read_param(self, name: str) -> Tensor:
        """Read and merge a whole parameter."""
        shape = self._infos[name].full_shape
        whole = self.read_part(name, 0, shape[0])
        assert whole is not None
        return whole


def open_base(stored: StoredWeights, *, path: str | Path | None = None) -> BaseFiles:
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


def read_adapters(
    source: RunSource, info: ParamInfo, first: int = 0, last: int | None = None
) -> dict[str, Adapter] | None:
    """Read the adapters of a parameter by projection.

    Args:
        source: Parameters of the run.
        info: Description of the parameter.
        first: First element of its first dimension.
        last: One past the last element; others have no adapters here. Default: all.

    Returns:
        Empty if it has none; ``None`` if the source returns no values on this rank.
    """
    known, found, is_absent = source.names(), {}, False
    projections = projections_of(info)
    is_part = last is not None and last - first < info.full_shape[0]
    if is_part and not info.expert:
        projections = projections[first:last]

    def read(name: str) -> Tensor | None:
        if is_part and info.expert:
            assert last is not None
            return source.read_part(name, first, last)
        return source.read_param(name)

    for projection in projections:
        if f"{projection.name}.lora_a" in known:
            a, b = (read(f"{projection.name}.lora_{factor}") for factor in "ab")
            has_norms = f"{projection.name}.lora_magnitude" in known
            norms = read(f"{projection.name}.lora_magnitude") if has_norms else None
            # Without values the others are read, too, because all ranks take part in a read.
            if a is not None and b is not None:
                found[projection.name] = Adapter(a=a.float(), b=b.float(), magnitude=norms)
            is_absent |= a is None
    return None if is_absent else found


def merge(
    weight: Tensor,
    info: ParamInfo,
    projections: Sequence[Projection],
    adapters: Mapping[str, Adapter],
    scale: float,
) -> None:
    """Merge adapters into a parameter in place, in float32 with one rounding.

    Args:
        weight: The rows of some projections of the parameter, of all or of some experts;
            contiguous, of any float dtype.
        info: Description of the parameter.
        projections: The projections.
        adapters: Adapters by projection, of the same experts.
        scale: Factor on the product of B and A.
    """
    for projection, rows in zip(
        projections, projection_rows(weight, info, projections), strict=True
    ):
        adapter = adapters.get(projection.name)
        if adapter is None:
            continue
        experts = [(rows, adapter.a, adapter.b)]
        if info.expert:
            experts = list(zip(rows, adapter.a, adapter.b, strict=True))
        for part, a, b in experts:
            merged = low_rank_sum(part.flatten(0, -2), a, b, scale=scale)
            if adapter.magnitude is not None:
                norms = torch.linalg.norm(merged, dim=1)
                merged *= (adapter.magnitude / norms).view(-1, 1)
            part.copy_(merged.view(part.shape))
