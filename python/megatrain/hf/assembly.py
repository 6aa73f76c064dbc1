"""Parameters from Hugging Face tensors that arrive one after the other, in any order."""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megatrain.config import ModelConfig, MoEConfig
from megatrain.hf.families import FAMILIES
from megatrain.hf.import_hf import DERIVED, HEAD, copies_of, describe_params
from megatrain.hf.rows import VOCABULARY, Transform, parts_of, rows_of
from megatrain.models.shape import GPTShape


@dataclass(frozen=True, kw_only=True)
class Part:
    """Elements ``[first, last)`` of the first dimension of a parameter.

    Attributes:
        name: The parameter.
        first: First element.
        last: One past the last element.
    """

    name: str
    first: int
    last: int


@dataclass(frozen=True, kw_only=True)
class _Place:
    """Place of a tensor: one of those of a part."""

    part: Part
    transform: Transform
    names: tuple[str, ...]
    shape: tuple[int, ...]


class TensorAssembly:
    """Checks Hugging Face tensors by name and shape, and joins them to parts of parameters.

    Only tensors of incomplete parts are held, such as queries until keys and values are there.

    Args:
        family: The ``model_type`` whose names the tensors have; further names that an import
            accepts are accepted too.
        model: A resolved ``[model]`` section.
        moe: A resolved ``[moe]`` section.
        only: Names of the parameters that have tensors. Default: all.
    """

    def __init__(
        self,
        family: str,
        model: ModelConfig,
        moe: MoEConfig,
        *,
        only: Collection[str] | None = None,
    ) -> None:
        self._family = family
        self._shape = GPTShape.from_config(model)
        self._places: dict[str, _Place] = {}
        # Parts by parameter, with the names of their tensors.
        self._missing: dict[str, dict[Part, tuple[str, ...]]] = {}
        self._held: dict[Part, dict[str, Tensor]] = {}
        self._seen: set[str] = set()
        self._sums: dict[str, tuple[torch.dtype, int]] = {}
        table = FAMILIES[family].table
        originals: dict[str, str] = {}
        for info in describe_params(model, moe):
            if only is not None and info.name not in only:
                continue
            rows = list(rows_of(info.name, table, moe.num_experts))
            originals[info.name] = rows[0][1][0]
            for row, names in rows:
                self._add_places(info.name, info.full_shape, row.transform, names)
        self._copies = {
            copy: originals[name]
            for copy, name in copies_of(FAMILIES[family], model)
            if name in originals
        }
        if model.tie_embeddings and "embedding" in originals:
            self._copies[HEAD] = originals["embedding"]

    def check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        """Check a tensor before its values are there.

        Raises:
            MegacoreError: If it has no place, came before, or has another shape or no float type.
        """
        if name.endswith(DERIVED):
            return
        place = self._places.get(self._copies.get(name, name))
        if place is None:
            raise MegacoreError(f"tensor {name} has no place in a {self._family} model of megacore")
        if name in self._seen:
            raise MegacoreError(f"tensor {name} must come once, but it came a second time")
        if shape != place.shape:
            raise MegacoreError(f"tensor {name} must have shape {place.shape}, got {shape}")
        check_float(name, dtype)
        self._seen.add(name)

    def take(self, name: str, tensor: Tensor) -> Iterator[tuple[Part, Tensor]]:
        """Take the values of a tensor that :meth:`check` accepted; yield the part it completes.

        Sync:
            Waits for the device if the model has copies of this tensor.
        """
        if name in self._copies or name in self._copies.values():
            content = tensor.detach().cpu().contiguous().view(torch.uint8)
            self._sums[name] = tensor.dtype, zlib.crc32(content.numpy().data)
        if name in self._copies or name not in self._places:
            return
        place = self._places[name]
        held = self._held.setdefault(place.part, {})
        held[name] = tensor
        if not all(theirs in held for theirs in place.names):
            return
        del self._held[place.part]
        missing = self._missing[place.part.name]
        for part in [part for part in missing if _is_inside(part, place.part)]:
            del missing[part]
        rows = self._shape.vocab
        if place.transform is VOCABULARY and rows < place.part.last:
            # The largest tensors of a model, which are not copied to append the padding.
            yield replace(place.part, last=rows), tensor
            padding = tensor.new_zeros(place.part.last - rows, *tensor.shape[1:])
            yield replace(place.part, first=rows), padding
            return
        yield (
            place.part,
            place.transform.join([held[theirs] for theirs in place.names], self._shape),
        )

    def check_complete(self) -> None:
        """Check that every parameter has come, and that copies equal their originals.

        Raises:
            MegacoreError: With the name of a missing tensor, or of one that differs.
        """
        parts = (names for missing in self._missing.values() for names in missing.values())
        absent = [name for names in parts for name in names if name not in self._seen]
        if absent:
            more = f" (nor {len(absent) - 1} others)" if len(absent) > 1 else ""
            raise MegacoreError(f"there is no tensor {absent[0]}{more}, which the model needs")
        for copy, original in self._copies.items():
            if copy in self._sums and self._sums[copy] != self._sums[original]:
                raise MegacoreError(
                    f"tensor {copy} must equal {original}, which it shares in the model, but "
                    "they differ; leave it out"
                )

    def _add_places(
        self, param: str, full_shape: tuple[int, ...], transform: Transform, names: list[str]
    ) -> None:
        """Add the places of the tensors of one row; those of an alias may be known already."""
        is_alias, left = param in self._missing, iter(names)
        missing = self._missing.setdefault(param, {})
        for first, last in parts_of(transform, full_shape):
            part = Part(name=param, first=first, last=last)
            on_meta = torch.empty((last - first, *full_shape[1:]), device="meta")
            shapes = [tuple(one.shape) for one in transform.split(on_meta, self._shape)]
            theirs = tuple(next(left) for _ in shapes)
            for name, shape in zip(theirs, shapes, strict=True):
                place = _Place(part=part, transform=transform, names=theirs, shape=shape)
                self._places.setdefault(name, place)
            if not is_alias:
                missing[part] = theirs


def check_float(name: str, dtype: torch.dtype) -> None:
    """Check that a tensor has values of a number format that a stream may have.

    Raises:
        MegacoreError: If it has not.
    """
    if not dtype.is_floating_point or dtype.itemsize < 2:
        raise MegacoreError(
            f"tensor {name} must be of float32, bfloat16 or float16, got "
            f"{str(dtype).removeprefix('torch.')}; dequantize it first"
        )


def _is_inside(part: Part, whole: Part) -> bool:
    return part.name == whole.name and whole.first <= part.first and part.last <= whole.last
