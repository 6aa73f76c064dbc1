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
    PendingCombine,
    PendingDispatch,
    Routing,
    SentNext,
)
from megacore.moe.dispatchers.capacity import Capacity
from megacore.moe.dispatchers.peer_memory import CopyMap, Peers, PendingPull, PendingTransfer
from megacore.ops.register import describe
from megacore.parallel.interleave import yield_turn
from megacore.parallel.row_exchange import RowSplits


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
        ids_Tk = self._within_capacity(routing)
        copies = self.peers.plan_copies(ids_Tk, self.placement, self._receive_rows(*ids_Tk.shape))
        num_arrived, num_dropped, num_over_budget = copies.totals
        if routing.num_copies is not None:  # padding is not sent, and was not dropped
            num_dropped = num_dropped - (ids_Tk.numel() - routing.num_copies)
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
        return PendingDispatch(lambda: _finish_dispatch(rows, probs, transfer, m_splits, expected))

    def start_combine(
        self,
        rows: Tensor,
        arrived: ExpertRows,
        splits: RowSplits,  # noqa: ARG002
    ) -> PendingCombine:
        """Start to pull the results and to sum them per token. See `Dispatcher`."""
        assert isinstance(arrived, PeerExpertRows)
        transfer = arrived.results
        _check_rows("results", rows, transfer.copies.capacity, "the rows that arrived")
        sums = _StartCombine.apply(rows, transfer)  # type: ignore[no-untyped-call]
        return PendingCombine(lambda: _finish_combine(sums, transfer))

    def postprocess(self, rows: Tensor, plan: DispatchPlan) -> Tensor:  # noqa: ARG002
        """Return ``rows`` unchanged: the pull has already summed. See `Dispatcher`."""
        return rows


@dataclass(frozen=True, kw_only=True)
class PeerExpertRows(ExpertRows):
    """Expert rows that were pushed by peers.

    Attributes:
        results: Exchange of their results.
    """

    results: _Transfer


def _check_rows(name: str, rows: Tensor, num_rows: int, whose: str) -> None:
    """Raise an error for a wrong number of rows, which peers would read or write out of bounds."""
    if rows.dim() != 2 or rows.shape[0] != num_rows:
        raise ValueError(
            f"{name} {describe(rows)} must be a matrix of {num_rows} rows, as {whose} has"
        )


class _Transfer:
    """A push and a pull, each other's gradient: state of the functions that start and finish them.

    Args:
        peers: Peer memory.
        copies: Locations of the copies of this rank's tokens.
        like: A tensor with the width and dtype of the rows.
    """

    def __init__(self, peers: Peers, copies: CopyMap, like: Tensor) -> None:
        self.peers = peers
        self.copies = copies
        self._like = like.detach()[:0]
        self._push: PendingTransfer | None = None
        self._pull: PendingPull | None = None
        self._sums: tuple[Tensor, Tensor | None] | None = None

    def reserve_rows(self) -> Tensor:
        """Reserve the slot of the pull; return its memory for the rows, which may be written.

        To be called right before the rows are computed. Without a call, or if the pull gets other
        rows, they are copied to the slot.
        """
        self._pull = self.peers.reserve_pull(self.copies, self._like)
        return self._pull.rows

    def start_push(self, x_TH: Tensor, probs_Tk: Tensor | None) -> None:
        """Start the push."""
        self._push = self.peers.start_push(x_TH, probs_Tk, self.copies)

    def finish_push(self, rows_CH: Tensor, probs_C: Tensor | None) -> None:
        """Wait for the rows, and write them."""
        push, self._push = self._push, None
        assert push is not None
        self.peers.finish_push(push, rows_CH, probs_C, self.copies)

    def start_pull(self, rows_CH: Tensor, probs_C: Tensor | None) -> Tensor:
        """Start the pull; return the sums of rows, not yet written."""
        if self._pull is None:
            self._pull = self.peers.reserve_pull(self.copies, rows_CH)
        num_tokens = self.copies.rows.shape[0]
        x_TH, probs_Tk = rows_CH.new_empty(num_tokens, rows_CH.shape[1]), None
        if probs_C is not None:
            probs_Tk = probs_C.new_empty(num_tokens, self.copies.num_choices)
        self.peers.start_pull(self._pull, rows_CH, probs_C, x_TH, probs_Tk)
        self._sums = x_TH, probs_Tk
        return x_TH

    def finish_pull(self) -> tuple[Tensor, Tensor | None]:
        """Wait for the sums of rows and of their numbers, and return them."""
        pull, sums = self._pull, self._sums
        self._pull = self._sums = None
        assert pull is not None
        assert sums is not None
        self.peers.finish_pull(pull)
        return sums


def _finish_dispatch(
    rows: Tensor, probs: Tensor, transfer: _Transfer, m_splits: Tensor, expected_rows: int
) -> ExpertRows:
    yield_turn()
    rows, probs = _FinishDispatch.apply(rows, probs, transfer)  # type: ignore[no-untyped-call]
    results = _Transfer(transfer.peers, transfer.copies, rows)
    return PeerExpertRows(
        rows=rows,
        probs=probs,
        m_splits=m_splits,
        row_map=None,
        num_rows=transfer.copies.num_arrived,
        expected_rows=expected_rows,
        results=results,
        sent_next=SentNext(results=results.reserve_rows, input_grads=transfer.reserve_rows),
    )


def _finish_combine(sums: Tensor, transfer: _Transfer) -> Tensor:
    yield_turn()
    tokens: Tensor = _FinishCombine.apply(sums, transfer)  # type: ignore[no-untyped-call]
    return tokens


class _StartDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TH: Tensor, probs_Tk: Tensor, transfer: _Transfer
    ) -> tuple[Tensor, Tensor]:
        ctx.transfer = transfer
        transfer.start_push(x_TH, probs_Tk)
        capacity = transfer.copies.capacity
        return x_TH.new_empty(capacity, x_TH.shape[1]), probs_Tk.new_empty(capacity)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None]:  # noqa: ARG004
        yield_turn()
        x_TH, probs_Tk = ctx.transfer.finish_pull()
        return x_TH, probs_Tk, None


class _FinishDispatch(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, rows_CH: Tensor, probs_C: Tensor, transfer: _Transfer
    ) -> tuple[Tensor, Tensor]:
        ctx.transfer = transfer
        transfer.finish_push(rows_CH, probs_C)
        return rows_CH.view_as(rows_CH), probs_C.view_as(probs_C)

    @staticmethod
    def backward(ctx: Any, grad_rows: Tensor, grad_probs: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.transfer.start_pull(grad_rows, grad_probs)
        # Placeholders for autograd: _StartDispatch receives the gradients through peer memory.
        return grad_rows, grad_probs, None


class _StartCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows_CH: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.start_pull(rows_CH, None)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        rows_CH = grad.new_empty(ctx.transfer.copies.capacity, grad.shape[1])
        yield_turn()
        ctx.transfer.finish_push(rows_CH, None)
        return rows_CH, None


class _FinishCombine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TH: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.finish_pull()
        return x_TH.view_as(x_TH)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.transfer.start_push(grad, None)
        return grad, None
