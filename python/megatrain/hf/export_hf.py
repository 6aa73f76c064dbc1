"""Export of a model to Hugging Face tensors."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from megacore.parallel.param_info import ParamInfo
from megatrain.config import ModelConfig, MoEConfig
from megatrain.hf.families import FAMILIES
from megatrain.hf.import_hf import copies_of, describe_params
from megatrain.hf.rows import Row, Run, parts_of, rows_of, runs_of
from megatrain.hf_folder import TensorSpec, read_blocks
from megatrain.models.shape import GPTShape


class ParamSource(Protocol):
    """Parameters that are read from a file, such as `StoredWeights`."""

    def dtype(self, name: str, /) -> torch.dtype:
        """Return the number format of a parameter."""

    def has_ranges(self, name: str, /) -> bool:
        """Check whether ranges of a flattened parameter can be read."""

    def read_range(self, name: str, start: int, into: Tensor, /) -> None:
        """Read a range of a flattened parameter into a contiguous tensor."""

    def read_param(self, name: str, /) -> Tensor:
        """Read a whole parameter."""


class HFTensors:
    """Hugging Face tensors of a model whose parameters are read one at a time.

    Args:
        family: The ``model_type`` to export as, from `config_to_hf`.
        model: A resolved ``[model]`` section.
        moe: A resolved ``[moe]`` section.
        dtype: Number format of the tensors; biases of experts stay in float32.
        others: Number formats of tensors, by name, that have another one.
    """

    def __init__(
        self,
        family: str,
        model: ModelConfig,
        moe: MoEConfig,
        *,
        dtype: torch.dtype,
        others: Mapping[str, torch.dtype] = MappingProxyType({}),
    ) -> None:
        self._shape = GPTShape.from_config(model)
        self._table = FAMILIES[family].table
        self._copies = copies_of(FAMILIES[family], model)
        self._num_experts = moe.num_experts
        self._dtype, self._others = dtype, others
        self.infos = describe_params(model, moe)
        named = {info.name: info for info in self.infos}
        self.specs = [spec for info in self.infos for spec in self._specs(info)]
        for copy, name in self._copies:
            self.specs += [
                replace(spec, name=copy, dtype=others.get(copy, spec.dtype))
                for spec in self._specs(named[name])
            ]

    def whole(
        self, read: Callable[[str, int, int, torch.dtype | None], Tensor | None]
    ) -> Iterator[tuple[TensorSpec, Tensor | None]]:
        """Yield each tensor of `specs`, in order, while no more than a part of a parameter is held.

        A part is one expert, or the gate of a gated MLP, where the table has these as tensors of
        their own; else it is the parameter.

        Args:
            read: Returns the elements ``[first, last)`` of the first dimension of a parameter:
                ``read(name, first, last, dtype)``. The values may have the number format
                ``dtype``, that of all tensors of the part, or ``None`` if these have several. A
                reader may return ``None``; then the part's tensors are ``None``.
        """
        specs = iter(self.specs)
        for info in self._params():
            row, _ = next(rows_of(info.name, self._table, self._num_experts))
            for first, last in parts_of(row.transform, info.full_shape):
                on_meta = torch.empty((last - first, *info.full_shape[1:]), device="meta")
                count = len(row.transform.split(on_meta, self._shape))
                theirs = [next(specs) for _ in range(count)]
                dtypes = {spec.dtype for spec in theirs}
                part = read(info.name, first, last, dtypes.pop() if len(dtypes) == 1 else None)
                if part is None:
                    yield from ((spec, None) for spec in theirs)
                    continue
                values = list(row.transform.split(part, self._shape))
                del part
                for spec in theirs:
                    # Not held here while the next one is read.
                    yield spec, values.pop(0).to(spec.dtype)

    def blocks(self, source: ParamSource) -> Iterator[Iterator[Tensor]]:
        """Yield, in the order of `specs`, the consecutive blocks of each tensor.

        Args:
            source: Parameters; most of them are read in small blocks. A block is valid until the
                next one.
        """
        for info in self._params():
            row, _ = next(rows_of(info.name, self._table, self._num_experts))
            runs = None
            if source.has_ranges(info.name):
                runs = runs_of(row.transform, info.full_shape, self._shape)
            if runs is None:
                # The parameter is freed before the next one is read.
                yield from self._transformed(row, source.read_param(info.name))
            else:
                yield from (_blocks(source, info.name, theirs) for theirs in runs)

    def _transformed(self, row: Row, whole: Tensor) -> Iterator[Iterator[Tensor]]:
        yield from (iter([part]) for part in row.transform.split(whole, self._shape))

    def _params(self) -> Iterator[ParamInfo]:
        """Yield the parameter behind each group of `specs`; those that are copied twice."""
        yield from self.infos
        named = {info.name: info for info in self.infos}
        yield from (named[name] for _, name in self._copies)

    def _specs(self, info: ParamInfo) -> Iterator[TensorSpec]:
        (row, names), *aliases = rows_of(info.name, self._table, self._num_experts)
        parts = row.transform.split(torch.empty(info.full_shape, device="meta"), self._shape)
        dtype = torch.float32 if info.name.endswith(".expert_bias") else self._dtype
        # Files may have had the parameter under other names.
        known = (
            self._others[name] for _, named in aliases for name in named if name in self._others
        )
        dtype = next(known, dtype)
        for name, part in zip(names, parts, strict=True):
            own = self._others.get(name, dtype)
            yield TensorSpec(name=name, dtype=own, shape=tuple(part.shape))


def _blocks(source: ParamSource, name: str, runs: list[Run]) -> Iterator[Tensor]:
    """Yield the values of one tensor in blocks; a block is valid until the next one."""
    ranges = [(run.ours, run.ours + run.numel) for run in runs]
    return read_blocks(ranges, source.dtype(name), functools.partial(source.read_range, name))
