"""Differentiable exchange of tensor rows between the members of a group.

==========================  =====================================  ================================
function                    forward                                backward
==========================  =====================================  ================================
``start_exchange``          all-to-all, started                    all-to-all of the gradient, ended
``PendingRows.finish``      all-to-all, ended                      all-to-all of the gradient, begun
``gather_rows``             all-gather                             reduce-scatter
``reduce_scatter_rows``     reduce-scatter                         all-gather
==========================  =====================================  ================================

Groups of one host exchange CPU tensors through shared memory, all others through their backend.
Computation between ``start_exchange`` and ``finish`` overlaps with the exchange; in the backward
pass its gradient overlaps with the exchange of the row gradients. Members must start their
exchanges in the same order. Over a group of one, rows are returned unchanged.

Shapes: N rows sent, M rows received, along dimension 0; further dimensions are arbitrary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megacore.calls.records import ANY
from megacore.parallel.async_collectives import PendingCollective, enqueued
from megacore.parallel.collectives import all_gather, reduce_scatter
from megacore.parallel.interleave import num_turns_given, yield_turn
from megacore.parallel.process_groups import Group


@dataclass(frozen=True)
class RowSplits:
    """Rows sent to and received from each member of a group.

    Attributes:
        sent: Rows to each member, in the order of positions; ``None``: the same number to each.
        received: Rows from each member; ``None`` together with ``sent``.
    """

    sent: tuple[int, ...] | None = None
    received: tuple[int, ...] | None = None

    def reversed(self) -> RowSplits:
        """Return the splits of the reverse exchange."""
        return RowSplits(sent=self.received, received=self.sent)

    def num_received(self, num_sent: int) -> int:
        """Return the number of received rows if ``num_sent`` are sent."""
        return num_sent if self.received is None else sum(self.received)


@torch.no_grad()
def all_to_all_async(
    rows: Tensor, group: Group, splits: RowSplits
) -> tuple[Tensor, PendingCollective]:
    """Start to send rows to every member of a group and to receive their rows.

    Args:
        rows: ``(N, ...)``, contiguous: first the rows for position 0, then those for position 1 ...
        group: The members.
        splits: Rows per member.

    Returns:
        A tensor ``(M, ...)``, the rows of position 0 first, valid after ``wait()`` on the second
        value.

    Raises:
        ValueError: If the splits do not match the group or the rows.

    Sync:
        None on the caller's stream until ``wait()``.
    """
    _check(rows, group, splits)
    if group.handle is None:
        return rows, PendingCollective()
    call = enqueued("all_to_all", (ANY, *rows.shape[1:]), rows, group)
    received = rows.new_empty(splits.num_received(rows.shape[0]), *rows.shape[1:])
    if not rows.is_cuda and group.host is not None and (host := group.host.exchange()) is not None:
        equal = (rows.shape[0] // group.size,) * group.size
        sent, got = splits.sent or equal, splits.received or equal
        started = host.start(rows, sent)
        return received, PendingCollective(
            call=call,
            complete=lambda: host.finish(started, received, got),
            is_ready=lambda: host.is_ready(started),
        )
    work = dist.all_to_all_single(
        received,
        rows,
        output_split_sizes=None if splits.received is None else list(splits.received),
        input_split_sizes=None if splits.sent is None else list(splits.sent),
        group=group.handle,
        async_op=True,
    )
    return received, PendingCollective(work, call=call)


@torch.no_grad()
def all_to_all(rows: Tensor, group: Group, splits: RowSplits) -> Tensor:
    """Send rows to every member of a group and return their rows; see :func:`all_to_all_async`."""
    received, pending = all_to_all_async(rows, group, splits)
    pending.wait()
    return received


class PendingRows:
    """Rows in flight, with their gradients."""

    def __init__(self, rows: Tensor, transfer: _Transfer | None) -> None:
        self._rows = rows
        self._transfer = transfer

    def finish(self) -> Tensor:
        """Wait for the rows and return them; must be called once."""
        if self._transfer is None:
            return self._rows
        self._transfer.let_others_run()
        rows: Tensor = _Finish.apply(self._rows, self._transfer)  # type: ignore[no-untyped-call]
        return rows


def start_exchange(rows: Tensor, group: Group, splits: RowSplits) -> PendingRows:
    """Start :func:`all_to_all` of rows that need gradients.

    Raises:
        ValueError: As in :func:`all_to_all_async`.
    """
    if group.handle is None:
        _check(rows, group, splits)
        return PendingRows(rows, None)
    transfer = _Transfer(group, splits)
    received: Tensor = _Start.apply(rows, transfer)  # type: ignore[no-untyped-call]
    return PendingRows(received, transfer)


def gather_rows(rows: Tensor, group: Group) -> Tensor:
    """Concatenate equally many rows of all members: ``(N, ...)`` to ``(N * size, ...)``."""
    if group.size == 1:
        return rows
    gathered: Tensor = _Gather.apply(rows, group)  # type: ignore[no-untyped-call]
    return gathered


def reduce_scatter_rows(rows: Tensor, group: Group) -> Tensor:
    """Sum over members; return this member's rows: ``(N * size, ...)`` to ``(N, ...)``."""
    if group.size == 1:
        return rows
    reduced: Tensor = _ReduceScatter.apply(rows, group)  # type: ignore[no-untyped-call]
    return reduced


def _check(rows: Tensor, group: Group, splits: RowSplits) -> None:
    if splits.sent is None or splits.received is None:
        if rows.shape[0] % group.size:
            raise ValueError(
                f"all-to-all over group {group.name}: {rows.shape[0]} rows have no {group.size} "
                "equal shares"
            )
        return
    for name, counts in (("sent", splits.sent), ("received", splits.received)):
        if len(counts) != group.size:
            raise ValueError(
                f"all-to-all over group {group.name}: {name} has {len(counts)} counts for "
                f"{group.size} members"
            )
    if sum(splits.sent) != rows.shape[0]:
        raise ValueError(
            f"all-to-all over group {group.name}: the counts {_shown(splits.sent)} sum to "
            f"{sum(splits.sent)}, but there are {rows.shape[0]} rows"
        )


def _shown(counts: Sequence[int]) -> str:
    return ", ".join(map(str, counts[:8])) + (", ..." if len(counts) > 8 else "")


class _Transfer:
    """Shared state of the two halves of one exchange."""

    def __init__(self, group: Group, splits: RowSplits) -> None:
        self.group = group
        self.splits = splits
        self.forward = PendingCollective()
        self.backward = PendingCollective()
        self.grad: Tensor | None = None
        self._turn = 0

    def started(self) -> None:
        """Record the turn count at the start of an exchange."""
        self._turn = num_turns_given()

    def let_others_run(self) -> None:
        """Give the turn, unless it was given since the start: for exchanges that run together."""
        if self._turn == num_turns_given():
            yield_turn()


class _Start(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        received, transfer.forward = all_to_all_async(
            rows.contiguous(), transfer.group, transfer.splits
        )
        transfer.started()
        return received

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:  # noqa: ARG004
        transfer = ctx.transfer
        transfer.let_others_run()
        transfer.backward.wait()
        received, transfer.grad = transfer.grad, None
        return received, None


class _Finish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.forward.wait()
        return rows.view_as(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        transfer = ctx.transfer
        transfer.grad, transfer.backward = all_to_all_async(
            grad.contiguous(), transfer.group, transfer.splits.reversed()
        )
        transfer.started()
        # A nominal gradient: the exchanged one is passed to _Start.backward by the transfer.
        return grad, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _gathered(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _reduce_scattered(grad, ctx.group), None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _reduce_scattered(rows, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _gathered(grad, ctx.group), None


def _gathered(rows: Tensor, group: Group) -> Tensor:
    result = rows.new_empty(group.size * rows.shape[0], *rows.shape[1:])
    all_gather(result, rows.contiguous(), group)
    return result


def _reduce_scattered(rows: Tensor, group: Group) -> Tensor:
    result = rows.new_empty(rows.shape[0] // group.size, *rows.shape[1:])
    reduce_scatter(result, rows.contiguous(), group)
    return result
