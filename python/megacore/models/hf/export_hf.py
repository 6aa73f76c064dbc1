"""Export of a model to Hugging Face tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megacore.config import ModelConfig, MoEConfig
from megacore.models.hf.families import FAMILIES
from megacore.models.hf.files import TensorSpec
from megacore.models.hf.import_hf import copies_of, describe_params
from megacore.models.hf.rows import rows_of
from megacore.models.shape import GPTShape
from megacore.parallel.params import ParamInfo


class HFTensors:
    """Hugging Face tensors of a model whose parameters are read one at a time.

    Args:
        family: The ``model_type`` to export as, from `config_to_hf`.
        model: A resolved ``[model]`` section.
        moe: A resolved ``[moe]`` section.
        dtype: Number format of the tensors; biases of experts stay in float32.
    """

    def __init__(
        self, family: str, model: ModelConfig, moe: MoEConfig, *, dtype: torch.dtype
    ) -> None:
        self._shape = GPTShape.from_config(model)
        self._table = FAMILIES[family].table
        self._copies = copies_of(FAMILIES[family], model)
        self._num_experts = moe.num_experts
        self._dtype = dtype
        self.infos = describe_params(model, moe)
        named = {info.name: info for info in self.infos}
        self.specs = [spec for info in self.infos for spec in self._specs(info)]
        for copy, name in self._copies:
            self.specs += [replace(spec, name=copy) for spec in self._specs(named[name])]

    def values(self, read: Callable[[str], Tensor]) -> Iterator[Tensor]:
        """Yield the tensors in the order of `specs`.

        Args:
            read: Returns a whole parameter by name; called for one parameter after another.
        """
        for name in (*(info.name for info in self.infos), *(name for _, name in self._copies)):
            row, _ = next(rows_of(name, self._table, self._num_experts))
            yield from row.transform.split(read(name), self._shape)

    def _specs(self, info: ParamInfo) -> Iterator[TensorSpec]:
        row, names = next(rows_of(info.name, self._table, self._num_experts))
        parts = row.transform.split(torch.empty(info.full_shape, device="meta"), self._shape)
        dtype = torch.float32 if info.name.endswith(".expert_bias") else self._dtype
        for name, part in zip(names, parts, strict=True):
            yield TensorSpec(name=name, dtype=dtype, shape=tuple(part.shape))
