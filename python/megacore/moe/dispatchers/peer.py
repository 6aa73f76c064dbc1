"""The ``static`` dispatcher over peer memory: one-sided writes and reads of rows.

Shapes: T tokens of this rank, k experts per token, E experts, G members of the group, C rows of a
member's receive buffer, H hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacore.moe.dispatchers.base import (
    Dispatcher,
    DispatchPlan,
    ExpertPlacement,
    ExpertRows,
    PendingDispatch,
    Routing,
)
from megacore.moe.dispatchers.capacity import Capacity
from megacore.moe.dispatchers.peers import CopyMap, Peers, PendingTransfer
from megacore.ops.library import describe
from megacore.parallel.row_exchange import RowSplits
from megacore.parallel.turns import yield_turn


class PeerDispatcher(Dispatcher):
    """Dispatcher that pushes copies into the memory of the experts' ranks and pulls the results.

    There is no host sync. A token travels once to each rank that needs it, and is copied there for
    every further expert. Rows are received in expert order. Each rank has one receive buffer for
    all members, so only the total number of rows can exceed it; then the copies for its last
    experts are not sent, starting with the copies of the last members (``plan.num_over_budget``
    counts this rank's copies). The caller decides how to handle overflow (``moe.over_budget``).
    As for ``StaticDispatcher``, all members must have equally many tokens in a call. If buffer
    sizes differ, ``preprocess`` raises ``ValueError`` on every member on the CPU. On GPUs kernels
    compare the sizes, and the next :meth:`Peers.check` raises ``PeerLostError``; but if only some
    members must first allocate memory, these members block waiting for the others.

    Args:
        placement: Placement of the experts.
        peers: Peer memory of the placement's group.
        receive_rows: Maps (tokens of a member, copies per token) to the rows of a receive buffer
            for all members together.
        capacity: Limit of the copies per expert; ``None`` for no limit.
    """

    captured_fields = (
        "probs",
        "row_map",
        "tokens_per_expert",
        "arriving",
        "num_dropped",
        "num_over_budget",
        "num_arrived",
    )

    def __init__(
        self,
        placement: ExpertPlacement,
        *,
        peers: Peers,
        receive_rows: Callable[[int, int], int],
        capacity: Capacity | None = None,
    ) -> None:
        super().__init__(placement, capacity=capacity)
        self.peers = peers
        self._receive_rows = receive_rows

    def preprocess(self, routing: Routing) -> DispatchPlan:
        """Exchange counts and assign a destination row to each copy. See `Dispatcher`."""
        placement, ids_Tk = self.placement, routing.expert_ids
        num_rows = self._receive_rows(*ids_Tk.shape)
        if self.capacity is not None:
            ids_Tk = self.capacity.limit(ids_Tk, routing.probs, num_experts=placement.num_experts)
        copies = self.peers.plan_copies(ids_Tk, placement, num_rows)
        num_arrived, num_dropped, num_over_budget = copies.totals
        return DispatchPlan(
            probs=routing.probs,
            row_map=copies.rows,
            tokens_per_expert=copies.kept,
            arriving=copies.m_splits[None],
            rows_per_member=None,
            num_dropped=num_dropped,
            num_over_budget=num_over_budget,
            num_arrived=num_arrived,
        )

    def read_splits(self, plan: DispatchPlan) -> RowSplits:  # noqa: ARG002
        """Return fixed splits without reading the device. See `Dispatcher`."""
        return RowSplits()

    def dispatch(self, x_TH: Tensor, plan: DispatchPlan, splits: RowSplits) -> PendingDispatch:  # noqa: ARG002
        """Push tokens and weights. See `Dispatcher`."""
        _check_rows("tokens", x_TH, plan.probs.shape[0], "what was routed")
        assert plan.num_arrived is not None
        m_splits = plan.arriving[0]
        copies = CopyMap(
            rows=plan.row_map.contiguous(),
            num_choices=plan.probs.shape[1],
            capacity=self._receive_rows(*plan.probs.shape),
            num_arrived=plan.num_arrived,
        )
        transfer = _Transfer(self.peers, copies, x_TH)
        rows, probs = _StartDispatch.apply(x_TH, plan.probs.float(), transfer)  # type: ignore[no-untyped-call]
        expected = self.placement.expected_rows(plan.probs.numel())
        return _PendingPush(rows, probs, transfer, m_splits, expected)

    def combine(self, rows: Tensor, arrived: ExpertRows, splits: RowSplits) -> Tensor:  # noqa: ARG002
        """Pull the results and sum them per token. See `Dispatcher`."""
        assert isinstance(arrived, PeerExpertRows)
        _check_rows("results", rows, arrived.copies.capacity, "the rows that arrived")
        transfer = _Transfer(self.peers, arrived.copies, rows)
        pulled = _StartCombine.apply(rows, transfer)  # type: ignore[no-untyped-call]
        yield_turn()
        tokens: Tensor = _FinishCombine.apply(pulled, transfer)  # type: ignore[no-untyped-call]
        return tokens

    def postprocess(self, rows: Tensor, plan: DispatchPlan) -> Tensor:  # noqa: ARG002
        """Return ``rows`` unchanged: the pull has already summed. See `Dispatcher`."""
        return rows


@dataclass(frozen=True, kw_only=True)
class PeerExpertRows(ExpertRows):
    """Expert rows that were pushed by peers.

    Attributes:
        copies: Locations of the results of this rank's own tokens.
    """

    copies: CopyMap


def _check_rows(name: str, rows: Tensor, num_rows: int, whose: str) -> None:
    """Raise an error for a wrong number of rows, which peers would read or write out of bounds."""
    if rows.dim() != 2 or rows.shape[0] != num_rows:
        raise ValueError(
            f"{name} {describe(rows)} must be a matrix of {num_rows} rows, as {whose} has"
        )


class _Transfer:
    """State shared by the start and finish functions of one exchange."""

    def __init__(self, peers: Peers, copies: CopyMap, like: Tensor) -> None:
        self.peers = peers
        self.copies = copies
        self._like = like.detach()[:0]
        self._tickets: dict[str, PendingTransfer] = {}

    def started(self, way: str, ticket: PendingTransfer) -> None:
        """Store the ticket of the ``"forward"`` or ``"backward"`` pass."""
        self._tickets[way] = ticket

    def ticket(self, way: str) -> PendingTransfer:
        """Remove and return the stored ticket."""
        return self._tickets.pop(way)

    def tokens(self) -> Tensor:
        """Allocate an uninitialized tensor for this rank's tokens."""
        return self._like.new_empty(self.copies.rows.shape[0], self._like.shape[1])

    def rows(self) -> Tensor:
        """Allocate an uninitialized tensor for the rows of this rank's experts."""
        return self._like.new_empty(self.copies.capacity, self._like.shape[1])


class _PendingPush(PendingDispatch):
    def __init__(
        self,
        rows: Tensor,
        probs: Tensor,
        transfer: _Transfer,
        m_splits: Tensor,
        expected_rows: int,
    ) -> None:
        self._rows, self._probs = rows, probs
        self._transfer, self._m_splits = transfer, m_splits
        self._expected_rows = expected_rows

    def finish(self) -> ExpertRows:
        yield_turn()
        rows, probs = _FinishDispatch.apply(self._rows, self._probs, self._transfer)  # type: ignore[no-untyped-call]
        return PeerExpertRows(
            rows=rows,
            probs=probs,
            m_splits=self._m_splits,
            row_map=None,
            num_rows=self._transfer.copies.num_arrived,
            expected_rows=self._expected_rows,
            copies=self._transfer.copies,
        )


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, probs_Tk: Tensor, transfer: _Transfer
    ) -> tuple[Tensor, Tensor]:
        ctx.transfer = transfer
        transfer.started("forward", transfer.peers.start_push(x_TH, probs_Tk, transfer.copies))
        return transfer.rows(), probs_Tk.new_empty(transfer.copies.capacity)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:
        transfer = ctx.transfer
        x_TH = transfer.tokens()
        probs_Tk = grads[1].new_empty(x_TH.shape[0], transfer.copies.num_choices)
        yield_turn()
        transfer.peers.finish_pull(transfer.ticket("backward"), x_TH, probs_Tk, transfer.copies)
        return x_TH, probs_Tk, None


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_CH: Tensor, probs_C: Tensor, transfer: _Transfer
    ) -> tuple[Tensor, Tensor]:
        ctx.transfer = transfer
        transfer.peers.finish_push(transfer.ticket("forward"), rows_CH, probs_C, transfer.copies)
        return rows_CH.view_as(rows_CH), probs_C.view_as(probs_C)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_probs: Tensor) -> tuple[Tensor, Tensor, None]:
        transfer = ctx.transfer
        transfer.started(
            "backward", transfer.peers.start_pull(grad_rows, grad_probs, transfer.copies)
        )
        # Placeholders for autograd: _StartDispatch receives the gradients through peer memory.
        return grad_rows, grad_probs, None


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_CH: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.started("forward", transfer.peers.start_pull(rows_CH, None, transfer.copies))
        return transfer.tokens()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # noqa: ARG004
        transfer = ctx.transfer
        rows_CH = transfer.rows()
        yield_turn()
        transfer.peers.finish_push(transfer.ticket("backward"), rows_CH, None, transfer.copies)
        return rows_CH, None


class _FinishCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.peers.finish_pull(transfer.ticket("forward"), x_TH, None, transfer.copies)
        return x_TH.view_as(x_TH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        transfer = ctx.transfer
        transfer.started("backward", transfer.peers.start_push(grad, None, transfer.copies))
        return grad, None
