"""The dispatchers that exchange rows by all-to-all: ``alltoall`` and ``static``.

Shapes: T tokens of this rank, k experts per token, H features, E experts, L experts of this rank, G
members of the group, P ep positions, M rows that arrive, R rows per member of a static buffer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable

import torch
from torch import Tensor

from megacore import host_values
from megacore.moe.dispatchers.base import (
    Dispatcher,
    DispatchPlan,
    ExpertPlacement,
    ExpertRows,
    PendingCombine,
    PendingDispatch,
    Routing,
    balanced_rows,
    constant,
    copies_of,
    gather_counts,
    rows_of_copies,
)
from megacore.moe.dispatchers.capacity import Capacity, index_in_expert, rows_at
from megacore.ops.permutation import (
    permute,
    permute_probs,
    permute_with_probs,
    sort_by_expert,
    unpermute,
)
from megacore.parallel.row_exchange import RowSplits, start_exchange

_PLAN_FIELDS = (
    "probs",
    "row_map",
    "tokens_per_expert",
    "arriving",
    "num_dropped",
)


class _ExchangeDispatcher(Dispatcher):
    """Base of dispatchers that send copies by all-to-all to all ranks that share their expert."""

    def dispatch(self, x_TH: Tensor, plan: DispatchPlan, splits: RowSplits) -> PendingDispatch:
        """Start the all-to-all. See `Dispatcher`."""
        num_rows = self._num_sent(plan, splits)
        group, repeats = self.placement.group, plan.row_map.shape[1] // plan.probs.shape[1]
        probs = plan.probs if repeats == 1 else plan.probs.repeat_interleave(repeats, dim=1)
        x_rows = start_exchange(permute(x_TH, plan.row_map, num_rows), group, splits)
        prob_rows = start_exchange(permute_probs(probs, plan.row_map, num_rows), group, splits)
        expert_of_row_M = self._expert_of_rows(plan, splits)
        return PendingDispatch(
            lambda: self._sort(x_rows.finish(), prob_rows.finish(), expert_of_row_M, plan)
        )

    def _sort(
        self, rows: Tensor, probs: Tensor, expert_of_row_M: Tensor, plan: DispatchPlan
    ) -> ExpertRows:
        """Sort the rows that have arrived by expert."""
        placement, has_padding = self.placement, plan.rows_per_member is None
        row_map, m_splits = sort_by_expert(expert_of_row_M[:, None], placement.num_local)
        num_rows = self._num_received(plan)
        if num_rows is None:
            num_rows = rows.shape[0]
        rows, probs = permute_with_probs(rows, probs[:, None], row_map, num_rows)
        return ExpertRows(
            rows=rows,
            probs=probs,
            m_splits=m_splits,
            row_map=row_map,
            num_rows=m_splits.sum() if has_padding else None,
            expected_rows=placement.expected_rows(plan.probs.numel()) if has_padding else 0,
        )

    def start_combine(self, rows: Tensor, arrived: ExpertRows, splits: RowSplits) -> PendingCombine:
        """Start the reverse all-to-all. See `Dispatcher`."""
        if arrived.row_map is not None:
            rows = unpermute(rows, arrived.row_map)
        results = start_exchange(rows, self.placement.group, splits.reversed())
        return PendingCombine(results.finish)

    def _num_received(self, plan: DispatchPlan) -> int | None:  # noqa: ARG002
        """Fixed number of expert input rows; ``None`` for the number of received rows."""
        return None

    @abstractmethod
    def _num_sent(self, plan: DispatchPlan, splits: RowSplits) -> int:
        """Total number of rows that this rank sends."""

    @abstractmethod
    def _expert_of_rows(self, plan: DispatchPlan, splits: RowSplits) -> Tensor:
        """Local expert of each received row, ``(M,)`` int64; -1 for an empty row."""


class AllToAllDispatcher(_ExchangeDispatcher):
    """Dropless all-to-all dispatcher with exact sizes.

    The sizes depend on the routing, so the host reads them once per layer (``read_splits``).

    Args:
        placement: Placement of the experts.
        capacity: Limit of the copies per expert; ``None`` for no limit.
    """

    captured_fields = (*_PLAN_FIELDS, "rows_per_member")

    def preprocess(self, routing: Routing) -> DispatchPlan:
        """Sort copies by expert and exchange counts. See `Dispatcher`."""
        return self._plan(routing, None)

    def preprocess_counted(self, routing: Routing, arriving: Tensor) -> DispatchPlan:
        """Sort copies by expert. See `Dispatcher`."""
        return self._plan(routing, arriving)

    def _plan(self, routing: Routing, arriving: Tensor | None) -> DispatchPlan:
        placement, ids_Tk = self.placement, self._within_capacity(routing)
        sorted_Tk, counts_E = sort_by_expert(ids_Tk, placement.num_experts)
        arriving_GL = gather_counts(counts_E, placement) if arriving is None else arriving
        sent_P = counts_E.view(placement.ep_size, -1).sum(1)
        sent_G = _per_member(sent_P, placement)
        first_Tk = (sent_P.cumsum(0) - sent_P)[ids_Tk.clamp(min=0) // placement.num_local]
        num_dropped = copies_of(routing) - counts_E.sum()
        return DispatchPlan(
            probs=routing.probs,
            row_map=rows_of_copies(
                (sorted_Tk - first_Tk).masked_fill(ids_Tk < 0, -1),
                ids_Tk,
                sent_G.cumsum(0) - sent_G,
                placement,
            ),
            tokens_per_expert=counts_E,
            arriving=arriving_GL,
            rows_per_member=torch.stack((sent_G, arriving_GL.sum(1))),
            num_dropped=num_dropped,
        )

    def read_splits(self, plan: DispatchPlan) -> RowSplits:
        """Read the sizes of the all-to-all. See `Dispatcher`."""
        assert plan.rows_per_member is not None
        sent, received = host_values.read(
            plan.rows_per_member,
            "rows of an all-to-all",
            assumed=lambda: balanced_rows(plan.probs.numel(), self.placement),
        )
        return RowSplits(sent=tuple(sent), received=tuple(received))

    def _num_sent(self, plan: DispatchPlan, splits: RowSplits) -> int:  # noqa: ARG002
        return sum(splits.sent or ())

    def _expert_of_rows(self, plan: DispatchPlan, splits: RowSplits) -> Tensor:
        num_members, num_local = plan.arriving.shape
        experts = torch.arange(num_local, device=plan.arriving.device).repeat(num_members)
        return experts.repeat_interleave(
            plan.arriving.flatten(), output_size=sum(splits.received or ())
        )


class StaticBudget:
    """Rows per member of a ``static`` buffer, as a multiple of the fair share.

    The layers of a model share one budget, so that a step that exceeded it can be rerun with a
    larger budget.

    Args:
        factor: Multiple of ``copies / ep``.
    """

    def __init__(self, factor: float) -> None:
        self.factor = self._first_factor = factor

    @property
    def growth(self) -> float:
        """Ratio of the current budget to the initial budget."""
        return self.factor / self._first_factor

    def grow(self) -> None:
        """Double the budget."""
        self.factor *= 2.0

    def rows(self, *, num_tokens: int, top_k: int, placement: ExpertPlacement) -> int:
        """Compute the rows per member, at most one per token and local expert.

        Example:
            >>> from megacore.parallel import ProcessGroups
            >>> placement = ExpertPlacement.of(ProcessGroups.single(), 4)
            >>> StaticBudget(0.5).rows(num_tokens=16, top_k=2, placement=placement)
            16
        """
        wanted = rows_at(self.factor, num_tokens * top_k, placement.ep_size)
        return min(wanted, num_tokens * min(top_k, placement.num_local))


class StaticDispatcher(_ExchangeDispatcher):
    """All-to-all dispatcher with sizes fixed before the routing is known, without host sync.

    Each rank has a buffer of R rows per member of the group. Copies that exceed a buffer are found
    on the device and not sent (``plan.num_over_budget`` counts them); among the copies for a
    member, the copies for its last experts are dropped first. The caller decides how to handle
    overflow (``moe.over_budget``). With ``capacity.pad`` the buffers have exactly the capacity's
    rows for each expert, and overflow is impossible.

    All members must have equally many tokens in a call, because buffer sizes depend on the number
    of tokens; pad to the largest number, or use ``alltoall``. On the CPU the numbers are exchanged
    with the counts, and ``preprocess`` raises ``ValueError`` on every member if they differ. On
    GPUs a comparison would require a host sync and is omitted: a mismatch makes NCCL hang.

    Args:
        placement: Placement of the experts.
        budget: Size of the buffers.
        capacity: Limit of the copies per expert; ``None`` for no limit.
        receive_rows: Maps (tokens of a member, copies per token) to the fixed number of expert
            input rows. The total of received rows must not exceed it, but any single member may
            send up to that many: each buffer is sized for it. ``None`` for the total size of the
            buffers.
    """

    captured_fields = (*_PLAN_FIELDS, "num_over_budget")

    def __init__(
        self,
        placement: ExpertPlacement,
        *,
        budget: StaticBudget,
        capacity: Capacity | None = None,
        receive_rows: Callable[[int, int], int] | None = None,
    ) -> None:
        super().__init__(placement, capacity=capacity)
        self.budget = budget
        self._receive_rows = receive_rows

    def preprocess(self, routing: Routing) -> DispatchPlan:
        """Assign each copy a row of a fixed buffer. See `Dispatcher`."""
        placement, ids_Tk = self.placement, self._within_capacity(routing)
        num_limited = (ids_Tk >= 0).sum()
        row_Tk, num_rows = self._rows_in_buffer(ids_Tk)
        first_row_G = torch.arange(placement.group.size, device=ids_Tk.device) * num_rows
        sent_Tk = ids_Tk.masked_fill(row_Tk < 0, -1)
        _, counts_E = sort_by_expert(sent_Tk, placement.num_experts)
        num_sent = counts_E.sum()
        return DispatchPlan(
            probs=routing.probs,
            row_map=rows_of_copies(row_Tk, ids_Tk, first_row_G, placement),
            tokens_per_expert=counts_E,
            arriving=gather_counts(counts_E, placement, equal_tokens=ids_Tk.shape[0]),
            rows_per_member=None,
            num_dropped=copies_of(routing) - num_sent,
            num_over_budget=num_limited - num_sent,
        )

    def num_rows(self, num_tokens: int, top_k: int) -> int:
        """Compute the rows of the buffer for each member."""
        if self._receive_rows is not None:
            most = num_tokens * min(top_k, self.placement.num_local)
            return min(most, self._receive_rows(num_tokens, top_k))
        return buffer_rows(num_tokens, top_k, self.placement, self.budget, self.capacity)

    def _rows_in_buffer(self, ids_Tk: Tensor) -> tuple[Tensor, int]:
        """Compute the row of each copy in its member's buffer (-1: full) and the buffer's rows."""
        placement = self.placement
        num_rows = self.num_rows(*ids_Tk.shape)
        if self.capacity is not None and self.capacity.pad:
            per_expert = num_rows // placement.num_local
            index_Tk = index_in_expert(ids_Tk, None)
            return row_in_padded(ids_Tk, index_Tk, per_expert, placement.num_local), num_rows
        sorted_Tk, counts_E = sort_by_expert(ids_Tk, placement.num_experts)
        sent_P = counts_E.view(placement.ep_size, -1).sum(1)
        first_Tk = (sent_P.cumsum(0) - sent_P)[ids_Tk.clamp(min=0) // placement.num_local]
        row_Tk = sorted_Tk - first_Tk
        return row_Tk.masked_fill((ids_Tk < 0) | (row_Tk >= num_rows), -1), num_rows

    def _num_received(self, plan: DispatchPlan) -> int | None:
        return None if self._receive_rows is None else self._receive_rows(*plan.probs.shape)

    def _num_sent(self, plan: DispatchPlan, splits: RowSplits) -> int:  # noqa: ARG002
        num_tokens, top_k = plan.probs.shape
        return self.placement.group.size * self.num_rows(num_tokens, top_k)

    def _expert_of_rows(self, plan: DispatchPlan, splits: RowSplits) -> Tensor:  # noqa: ARG002
        num_members, num_local = plan.arriving.shape
        num_rows = self.num_rows(*plan.probs.shape)
        rows = torch.arange(num_rows, device=plan.arriving.device)
        if self.capacity is not None and self.capacity.pad:
            per_expert = num_rows // num_local
            expert, index = rows // per_expert, rows % per_expert
            filled = index < plan.arriving[:, expert]
            return torch.where(filled, expert, -1).flatten()
        ends_GL = plan.arriving.cumsum(1)
        expert_GR = torch.searchsorted(
            ends_GL, rows.expand(num_members, -1).contiguous(), right=True
        )
        return torch.where(expert_GR < num_local, expert_GR, -1).flatten()


def buffer_rows(
    num_tokens: int,
    top_k: int,
    placement: ExpertPlacement,
    budget: StaticBudget,
    capacity: Capacity | None,
) -> int:
    """Compute the rows of a static buffer for each member.

    Args:
        num_tokens: Tokens of each member.
        top_k: Copies of each token.
        placement: Placement of the experts.
        budget: Size of the buffers.
        capacity: Limit of the copies per expert; with ``pad`` it determines the size.
    """
    if capacity is not None and capacity.pad:
        per_expert = capacity.rows(num_tokens * top_k, placement.num_experts)
        return per_expert * placement.num_local
    return budget.rows(num_tokens=num_tokens, top_k=top_k, placement=placement)


def static_receive_rows(
    placement: ExpertPlacement, budget: StaticBudget, capacity: Capacity | None
) -> Callable[[int, int], int]:
    """Build the map from (tokens of a member, copies per token) to a rank's total buffer rows."""
    return lambda num_tokens, top_k: (
        placement.group.size * buffer_rows(num_tokens, top_k, placement, budget, capacity)
    )


def row_in_padded(ids_Tk: Tensor, index_Tk: Tensor, per_expert: int, num_local: int) -> Tensor:
    """Compute each copy's row in a buffer of ``per_expert`` rows per local expert; -1: none."""
    rows = ids_Tk.clamp(min=0) % num_local * per_expert + index_Tk
    return rows.masked_fill(ids_Tk < 0, -1)


def _per_member(values_P: Tensor, placement: ExpertPlacement) -> Tensor:
    """Expand a value per ep position to a value per member, ``(G,)``."""
    ep_of = [0] * placement.group.size
    for ep_position, members in enumerate(placement.members):
        for member in members:
            ep_of[member] = ep_position
    return values_P[constant(tuple(ep_of), values_P.device)]
