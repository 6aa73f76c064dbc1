"""Parameters of a running trainer that are gathered by parts, and the boxes that ranks hold."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megacore import host_values
from megacore.errors import MegacoreError
from megacore.optim import ParamPiece
from megacore.optim.weight_average import AVERAGE
from megacore.parallel.collectives import (
    all_gather_objects,
    all_reduce_,
    broadcast_,
    irecv,
    isend,
)
from megacore.parallel.process_groups import Group
from megatrain.checkpoint.chunks import MAIN_PARAM, Chunk, chunks_of
from megatrain.hf.assembly import Part
from megatrain.train.trainer import Trainer

# Of messages with parts of weights.
_TAG = 0


class GatheredParts:
    """Parameters that are gathered by parts from the ranks that hold them. Collective.

    Args:
        trainer: A trainer of any layout.
        pieces: Pieces of this rank.
        to_all: Whether all ranks get values, not rank 0 alone.
        averaged: Read the moving average of parameters that have one.
    """

    def __init__(
        self,
        trainer: Trainer,
        pieces: Sequence[ParamPiece],
        *,
        to_all: bool = False,
        averaged: bool = False,
    ) -> None:
        groups = trainer.groups
        self._world, self._device, self._to_all = groups.world, trainer.device, to_all
        pieces = weight_pieces(pieces, averaged=averaged)
        own = [piece for piece in pieces if not piece.info.is_shared_copy]
        self._own = {(param_of(chunk), chunk.offsets): chunk for chunk in chunks_of(own, groups)}
        self._full_shapes: dict[str, tuple[int, ...]] = {}
        # The rank, number format and size of each box, by parameter and place.
        self._boxes: dict[str, dict[tuple[int, ...], tuple[int, torch.dtype, torch.Size]]] = {}
        mine = [
            (name, at, chunk.full_shape, chunk.tensor.dtype, chunk.tensor.shape)
            for (name, at), chunk in self._own.items()
        ]
        for rank, boxes in enumerate(all_gather_objects(mine, self._world)):
            for name, at, full_shape, dtype, sizes in boxes:
                self._full_shapes[name] = full_shape
                self._boxes.setdefault(name, {}).setdefault(at, (rank, dtype, sizes))

    def names(self) -> Collection[str]:
        """Return the names of all parameters."""
        return self._boxes.keys()

    def dtype(self, name: str) -> torch.dtype:
        """Return the number format of a parameter."""
        return next(iter(self._boxes[name].values()))[1]

    def read_param(self, name: str) -> Tensor | None:
        """Gather a whole parameter; see `read`."""
        return self.read_part(name, 0, self._full_shapes[name][0])

    def read_part(self, name: str, first: int, last: int) -> Tensor | None:
        """Gather the elements ``[first, last)`` of the first dimension; see `read`."""
        return self.read(Part(name=name, first=first, last=last), None)

    def read(self, part: Part, wire: torch.dtype | None) -> Tensor | None:
        """Gather a part on rank 0, or on all ranks; returns ``None`` on others.

        Args:
            part: The part.
            wire: Number format of the messages and the result. Default: that of the parameter.

        Raises:
            MegacoreError: If another rank has stopped to read.
        """
        check_all_go_on(self._world, self._device)
        boxes = self._boxes[part.name]
        wire = self.dtype(part.name) if wire is None else wire
        gets = self._to_all or self._world.position == 0
        shape = (part.last - part.first, *self._full_shapes[part.name][1:])
        whole = torch.empty(shape, dtype=wire, device=self._device) if gets else None
        for at, (owner, _, sizes) in boxes.items():
            first, last = max(at[0], part.first), min(at[0] + sizes[0], part.last)
            if first < last:
                target = None
                if whole is not None:
                    target = box_of(
                        whole, (first - part.first, *at[1:]), (last - first, *sizes[1:])
                    )
                own = self._own.get((part.name, at))
                source = None
                if owner == self._world.position and own is not None:
                    source = own.tensor[first - at[0] : last - at[0]]
                self._move(source, target, owner, (last - first, *sizes[1:]), wire)
        if self._to_all and whole is not None:
            broadcast_(whole, self._world)
        return whole

    def own_values(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the values that this rank gives, by box: parameter, values, and their positions.

        Over all ranks, each value comes once. A position is that in the flattened parameter.
        """
        for (name, at), chunk in self._own.items():
            if self._boxes[name][at][0] == self._world.position:
                flat = torch.zeros((), dtype=torch.int64, device=self._device)
                for size, first, count in zip(
                    chunk.full_shape, at, chunk.tensor.shape, strict=True
                ):
                    index = torch.arange(first, first + count, device=self._device)
                    flat = flat[..., None] * size + index
                yield name, chunk.tensor.detach(), flat

    def _move(
        self,
        source: Tensor | None,
        target: Tensor | None,
        owner: int,
        sizes: tuple[int, ...],
        wire: torch.dtype,
    ) -> None:
        """Copy values of the owner into the target of rank 0."""
        if owner == 0:
            if source is not None and target is not None:
                target.copy_(source)
        elif source is not None:
            message = source.detach().to(wire).contiguous()
            isend(message, self._world, to_position=0, tag=_TAG).wait()
        elif self._world.position == 0:
            assert target is not None
            into = target
            if not target.is_contiguous():
                into = torch.empty(sizes, dtype=wire, device=self._device)
            irecv(into, self._world, from_position=owner, tag=_TAG).wait()
            if into is not target:
                target.copy_(into)


def boxes_by_param(trainer: Trainer, pieces: Sequence[ParamPiece]) -> dict[str, list[Chunk]]:
    """Return the boxes of the weights of this rank by parameter."""
    found: dict[str, list[Chunk]] = {}
    for chunk in chunks_of(weight_pieces(pieces), trainer.groups):
        found.setdefault(param_of(chunk), []).append(chunk)
    return found


def weight_pieces(pieces: Sequence[ParamPiece], *, averaged: bool = False) -> list[ParamPiece]:
    """Return the pieces of weights, each with one tensor: the weights, or their average."""
    averages = {
        (piece.info.name, piece.start): piece.tensors[AVERAGE]
        for piece in pieces
        if averaged and AVERAGE in piece.tensors
    }
    return [
        replace(
            piece,
            tensors={
                MAIN_PARAM: averages.get((piece.info.name, piece.start), piece.tensors[MAIN_PARAM])
            },
        )
        for piece in pieces
        if MAIN_PARAM in piece.tensors
    ]


def param_of(chunk: Chunk) -> str:
    """Return the parameter of a box."""
    return chunk.key.removeprefix(f"{MAIN_PARAM}.")


def box_of(whole: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Return a view of a box."""
    return whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


def check_all_go_on(world: Group, device: torch.device) -> None:
    """Check that no rank has stopped to read.

    Raises:
        MegacoreError: On every rank that goes on.
    """
    if count := count_stopped(world, device, stops=False):
        raise MegacoreError(
            f"{count} of {world.size} ranks stopped before the last tensor of the stream; iterate "
            "to the end on every rank, or stop on all after the same tensor"
        )


def count_stopped(world: Group, device: torch.device, *, stops: bool) -> int:
    """Count the ranks that stop to read. Collective."""
    flag = torch.full((), int(stops), dtype=torch.int32, device=device)
    all_reduce_(flag, world)
    return int(host_values.read(flag, "ranks that have stopped"))
