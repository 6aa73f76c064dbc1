"""Update of the matrices of one buffer: each is computed whole by one data-parallel rank.

State and parameters stay cut into the flat, equal slices of ZeRO-1. In each of several rounds, all
ranks send the directions of their elements to the owners of the matrices, which send the updates
back. Over d ranks that are 2/d elements per parameter and rank, beside the 2 of the reduction of
gradients and the gather of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.buffers import ParamGradBuffer
from megacore.optim.matrix_plan import MatrixUnit, rounds_by_owner, unit_cost, units_of
from megacore.optim.matrix_rule import MatrixRule
from megacore.optim.newton_schulz import CutMatrix
from megacore.optim.update_piece import UpdatePiece
from megacore.parallel.params import ShardPosition
from megacore.parallel.process_groups import Group, ProcessGroups
from megacore.parallel.row_exchange import RowSplits, all_to_all


@dataclass(frozen=True, kw_only=True)
class _Round:
    """Units that the owners compute at the same time.

    Attributes:
        parts: This rank's elements of all units, by owner.
        splits: Elements to and from each rank.
        units: Units that this rank owns.
        received: Elements from each rank, of each of these units.
    """

    parts: tuple[UpdatePiece, ...]
    splits: RowSplits
    units: tuple[MatrixUnit, ...]
    received: tuple[tuple[int, ...], ...]


class MatrixUpdate:
    """Updates the matrices of a buffer by one rule.

    Args:
        buffer: Parameters and gradients.
        rule: The rule.
        pieces: First element and piece of each parameter of the rule of which this rank has
            elements, by the index of the parameter.
        params: Indices of all parameters of the rule.
        groups: Process groups of this rank.
    """

    def __init__(
        self,
        buffer: ParamGradBuffer,
        rule: MatrixRule,
        *,
        pieces: Mapping[int, tuple[int, UpdatePiece]],
        params: Sequence[int],
        groups: ProcessGroups,
    ) -> None:
        self._rule = rule
        self._buffer = buffer
        self._pieces = pieces
        # Without sharding, each rank has the whole of everything.
        self._group = buffer.dp_group if buffer.distributed else Group.solo(buffer.dp_group.rank)
        self._tp = groups.etp if buffer.params[0][0].expert else groups.tp
        self._bucket_of = {
            param: index
            for index, bucket in enumerate(buffer.plan.buckets)
            for param in bucket.param_indices
        }
        units = []
        for param in params:
            info = buffer.params[param][0]
            where = ShardPosition.of(info, groups)
            units += units_of(param, info, tp_size=where.tp_size, ep_size=where.ep_size)
        costs = [unit_cost(unit, rule.cost, self._tp.size) for unit in units]
        rounds = rounds_by_owner(units, costs, self._group.size)
        self._rounds = [
            self._make_round([mine[number] if number < len(mine) else [] for mine in rounds])
            for number in range(max(map(len, rounds)))
        ]

    @torch.no_grad()
    def step(self, control: Tensor) -> None:
        """Update the elements of this rank. Collective over the data-parallel group.

        Args:
            control: The decision of :func:`megacore.ops.optim.decide_step_`.

        Sync:
            None on CUDA.
        """
        for each in self._rounds:
            self._step_round(each, control)

    def _step_round(self, each: _Round, control: Tensor) -> None:
        updates = self._updates(self._directions(each, control), each)
        for part, update in zip(each.parts, updates, strict=True):
            part.move(update, control)

    def _directions(self, each: _Round, control: Tensor) -> Tensor:
        """Return the directions of this rank's elements, flat."""
        found = self._empty(sum(part.numel for part in each.parts))
        for part, into in zip(each.parts, _split(found, each), strict=True):
            part.direction(self._rule.direction, control, into)
        return found

    def _updates(self, directions: Tensor, each: _Round) -> Sequence[Tensor]:
        """Return the updates of this rank's elements; little memory is held between the steps."""
        if self._group.size == 1:  # the parts are the units
            return self._transform(_split(directions, each), each.units)
        received = all_to_all(directions, self._group, each.splits)
        del directions
        wholes = self._assemble(received, each)
        del received
        updates = self._transform(wholes, each.units)
        del wholes
        sent = self._disassemble(updates, each)
        del updates
        return _split(all_to_all(sent, self._group, each.splits.reversed()), each)

    def _transform(self, wholes: Sequence[Tensor], units: Sequence[MatrixUnit]) -> list[Tensor]:
        """Return the updates of whole units, flat."""
        matrices = [
            CutMatrix(values=values, rows=rows, columns=columns, cut=unit.cut)
            for whole, unit in zip(wholes, units, strict=True)
            for values, (rows, columns) in zip(
                _sections(whole.view(unit.shape), unit), unit.matrices, strict=True
            )
        ]
        found = iter(self._rule.transform(matrices, self._tp))
        updates = []
        for unit in units:
            parts = [next(found) for _ in unit.matrices]
            rows = [
                part.view(-1, rows, unit.shape[-1])
                for part, rows in zip(parts, unit.sections, strict=True)
            ]
            updates.append((rows[0] if len(rows) == 1 else torch.cat(rows, dim=1)).reshape(-1))
        return updates

    def _assemble(self, received: Tensor, each: _Round) -> list[Tensor]:
        """Put the elements of all ranks, in their order, together to units."""
        pieces = iter(torch.split(received, [size for sizes in each.received for size in sizes]))
        by_rank = [[next(pieces) for _ in sizes] for sizes in each.received]
        return [torch.cat(parts) for parts in zip(*by_rank, strict=True)]

    def _disassemble(self, updates: Sequence[Tensor], each: _Round) -> Tensor:
        """Cut units into the elements of each rank, by rank."""
        cut = [
            torch.split(update, [sizes[number] for sizes in each.received])
            for number, update in enumerate(updates)
        ]
        parts = [part for by_unit in zip(*cut, strict=True) for part in by_unit]
        return torch.cat(parts) if parts else self._empty(0)

    def _empty(self, numel: int) -> Tensor:
        device = self._buffer.param_data.device
        return torch.empty(numel, dtype=torch.float32, device=device)

    def _make_round(self, by_owner: Sequence[Sequence[MatrixUnit]]) -> _Round:
        here, ranks = self._group.position, range(self._group.size)
        held = [[self._held(unit, here) for unit in units] for units in by_owner]
        received = tuple(
            tuple(end - start for start, end in (self._held(unit, rank) for unit in by_owner[here]))
            for rank in ranks
        )
        parts = []
        for units, ranges in zip(by_owner, held, strict=True):
            for unit, (start, end) in zip(units, ranges, strict=True):
                if start < end:
                    first, piece = self._pieces[unit.param]
                    parts.append(piece.part(start - first, end - first))
        return _Round(
            parts=tuple(parts),
            splits=RowSplits(
                sent=tuple(sum(end - start for start, end in ranges) for ranges in held),
                received=tuple(map(sum, received)),
            ),
            units=tuple(by_owner[here]),
            received=received,
        )

    def _held(self, unit: MatrixUnit, rank: int) -> tuple[int, int]:
        """Return the elements of a unit that a rank of the group has, in its parameter."""
        if self._group.size == 1:
            return unit.start, unit.end
        plan = self._buffer.plan
        first, _ = plan.param_range(unit.param)
        own_start, own_end = plan.shard_range(self._bucket_of[unit.param], dp_rank=rank)
        start = max(unit.start, own_start - first)
        return start, max(start, min(unit.end, own_end - first))


def _split(values: Tensor, each: _Round) -> Sequence[Tensor]:
    """Return the elements of each part of a round."""
    return torch.split(values, [part.numel for part in each.parts])


def _sections(whole: Tensor, unit: MatrixUnit) -> list[Tensor]:
    """Return the matrices of a unit on this rank, 2-D."""
    rows = whole.view(-1, sum(unit.sections), unit.shape[-1])
    return [
        part.reshape(-1, unit.shape[-1]) for part in torch.split(rows, list(unit.sections), dim=1)
    ]
