"""The ``static`` dispatcher over memory of peers: rows go straight to where they are needed.

Shapes: T tokens of this rank, k experts per token, E experts, G members of the group, C rows that
a member has room for, H hidden.
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
    rows_of_copies,
)
from megacore.moe.dispatchers.capacity import Capacity
from megacore.moe.dispatchers.peers import CopyMap, Peers, Ticket
from megacore.ops.library import describe
from megacore.ops.permutation import sort_by_expert
from megacore.parallel.exchange import RowSplits
from megacore.parallel.turns import give_turn


class PeerDispatcher(Dispatcher):
    """Pushes each copy into the memory of the ranks of its expert, and pulls the results.

    Nothing waits for the device. Rows arrive sorted by expert. Each rank has one buffer for what
    arrives from all, so it runs over only if too much comes in all; then the copies for its last
    experts are not sent, and among these those of the last members (``plan.num_over_budget`` counts
    those of this rank). What becomes of the step then is for the caller to decide.
    As for ``StaticDispatcher``, all members must have equally many tokens in a call. Where their
    buffers differ, ``preprocess`` is a ``ValueError`` on every member on the CPU. On GPUs kernels
    compare them, and the next :meth:`Peers.check` is a ``PeerLostError``; but where memory must be
    made first, and not on all, a member waits for the others in vain.

    Args:
        placement: Where the experts are.
        peers: The memory; its group is that of the placement.
        receive_rows: From the tokens of a member and the copies of each to the rows of a buffer,
            for all that arrives from all members.
        capacity: Limit of the copies per expert; ``None`` for no limit.
    """

    captured_fields = (
        "probs",
        "row_map",
        "tokens_per_expert",
        "arriving",
        "num_dropped",
        "num_over_budget",
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
        """Tell all members how many copies go where, and find a row for each. See `Dispatcher`."""
        placement, ids_Tk = self.placement, routing.expert_ids
        num_wanted, num_rows = ids_Tk.numel(), self._receive_rows(*ids_Tk.shape)
        if self.capacity is not None:
            ids_Tk = self.capacity.limit(ids_Tk, routing.probs, num_experts=placement.num_experts)
        sorted_Tk, counts_E = sort_by_expert(ids_Tk, placement.num_experts)
        counts = self.peers.exchange_counts(counts_E, placement, num_rows)
        row_Tk = sorted_Tk + counts.shift[ids_Tk.clamp(min=0)]
        first_row_G = torch.arange(placement.group.size, device=ids_Tk.device) * num_rows
        num_sent = counts.kept.sum()
        return DispatchPlan(
            probs=routing.probs,
            row_map=rows_of_copies(
                row_Tk.masked_fill((ids_Tk < 0) | (row_Tk >= num_rows), -1),
                ids_Tk,
                first_row_G,
                placement,
            ),
            tokens_per_expert=counts.kept,
            arriving=counts.arriving,
            rows_per_member=None,
            num_dropped=num_wanted - num_sent,
            num_over_budget=counts_E.sum() - num_sent,
        )

    def read_splits(self, plan: DispatchPlan) -> RowSplits:  # noqa: ARG002
        """Nothing is read. See `Dispatcher`."""
        return RowSplits()

    def dispatch(self, x_TH: Tensor, plan: DispatchPlan, splits: RowSplits) -> PendingDispatch:  # noqa: ARG002
        """Push tokens and weights. See `Dispatcher`."""
        _check_rows("tokens", x_TH, plan.probs.shape[0], "what was routed")
        m_splits = plan.arriving.sum(0)
        copies = CopyMap(
            rows=plan.row_map.contiguous(),
            num_choices=plan.probs.shape[1],
            capacity=self._receive_rows(*plan.probs.shape),
            num_arrived=m_splits.sum(),
        )
        transfer = _Transfer(self.peers, copies, x_TH)
        rows, probs = _StartDispatch.apply(x_TH, plan.probs.float(), transfer)  # type: ignore[no-untyped-call]
        return _PendingPush(rows, probs, transfer, m_splits)

    def combine(self, rows: Tensor, arrived: ExpertRows, splits: RowSplits) -> Tensor:  # noqa: ARG002
        """Pull the results and add up those of each token. See `Dispatcher`."""
        assert isinstance(arrived, PeerExpertRows)
        _check_rows("results", rows, arrived.copies.capacity, "the rows that arrived")
        transfer = _Transfer(self.peers, arrived.copies, rows)
        pulled = _StartCombine.apply(rows, transfer)  # type: ignore[no-untyped-call]
        give_turn()
        tokens: Tensor = _FinishCombine.apply(pulled, transfer)  # type: ignore[no-untyped-call]
        return tokens

    def postprocess(self, rows: Tensor, plan: DispatchPlan) -> Tensor:  # noqa: ARG002
        """Nothing is left to do: pulling adds. See `Dispatcher`."""
        return rows


@dataclass(frozen=True, kw_only=True)
class PeerExpertRows(ExpertRows):
    """Rows that were pushed here.

    Attributes:
        copies: Where the results of this rank's own tokens will lie.
    """

    copies: CopyMap


def _check_rows(name: str, rows: Tensor, num_rows: int, whose: str) -> None:
    """Refuse what others would read or write past the end of."""
    if rows.dim() != 2 or rows.shape[0] != num_rows:
        raise ValueError(
            f"{name} {describe(rows)} must be a matrix of {num_rows} rows, as {whose} has"
        )


class _Transfer:
    """What the halves of one exchange know of each other."""

    def __init__(self, peers: Peers, copies: CopyMap, like: Tensor) -> None:
        self.peers = peers
        self.copies = copies
        self._like = like.detach()[:0]
        self._tickets: dict[str, Ticket] = {}

    def started(self, way: str, ticket: Ticket) -> None:
        """Remember an exchange: of the ``"forward"`` or of the ``"backward"`` pass."""
        self._tickets[way] = ticket

    def ticket(self, way: str) -> Ticket:
        """What was remembered, once."""
        return self._tickets.pop(way)

    def tokens(self) -> Tensor:
        """Room for this rank's tokens."""
        return self._like.new_empty(self.copies.rows.shape[0], self._like.shape[1])

    def rows(self) -> Tensor:
        """Room for the rows of this rank's experts."""
        return self._like.new_empty(self.copies.capacity, self._like.shape[1])


class _PendingPush(PendingDispatch):
    def __init__(self, rows: Tensor, probs: Tensor, transfer: _Transfer, m_splits: Tensor) -> None:
        self._rows, self._probs = rows, probs
        self._transfer, self._m_splits = transfer, m_splits

    def finish(self) -> ExpertRows:
        give_turn()
        rows, probs = _FinishDispatch.apply(self._rows, self._probs, self._transfer)  # type: ignore[no-untyped-call]
        return PeerExpertRows(
            rows=rows,
            probs=probs,
            m_splits=self._m_splits,
            row_map=None,
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
        give_turn()
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
        # Only say that there are gradients: what travels reaches _StartDispatch by itself.
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
        give_turn()
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
