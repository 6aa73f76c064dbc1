"""The dispatcher of a rank that has all experts: rows are sorted by expert and stay here."""

from __future__ import annotations

from torch import Tensor

from megacore.moe.dispatchers.base import (
    Dispatcher,
    DispatchPlan,
    ExpertRows,
    PendingCombine,
    PendingDispatch,
    Routing,
    copies_of,
)
from megacore.ops.permutation import permute_with_probs, sort_by_expert
from megacore.parallel.row_exchange import RowSplits


class LocalDispatcher(Dispatcher):
    """Dispatcher without an exchange, for groups of one rank: ``alltoall`` and ``allgather`` there.

    Rows have the order of the other dispatchers, and results the same bits. There is no host sync:
    the number of rows is that of all copies, and dropped copies leave empty rows at the end.
    """

    captured_fields = (
        "probs",
        "row_map",
        "tokens_per_expert",
        "arriving",
        "num_dropped",
    )

    def preprocess(self, routing: Routing) -> DispatchPlan:
        """Sort copies by expert. See `Dispatcher`."""
        ids_Tk = self._within_capacity(routing)
        row_map, counts_E = sort_by_expert(ids_Tk, self.placement.num_experts)
        return DispatchPlan(
            probs=routing.probs,
            row_map=row_map,
            tokens_per_expert=counts_E,
            arriving=counts_E[None],
            rows_per_member=None,
            num_dropped=None if self.capacity is None else copies_of(routing) - counts_E.sum(),
        )

    def dispatch(self, x_TH: Tensor, plan: DispatchPlan, splits: RowSplits) -> PendingDispatch:  # noqa: ARG002
        """Sort the tokens by expert. See `Dispatcher`."""
        num_rows = plan.row_map.numel()
        rows, probs = permute_with_probs(x_TH, plan.probs, plan.row_map, num_rows)
        arrived = ExpertRows(rows=rows, probs=probs, m_splits=plan.arriving[0], row_map=None)
        return PendingDispatch(lambda: arrived)

    def start_combine(
        self,
        rows: Tensor,
        arrived: ExpertRows,  # noqa: ARG002
        splits: RowSplits,  # noqa: ARG002
    ) -> PendingCombine:
        """Return ``rows`` unchanged. See `Dispatcher`."""
        return PendingCombine(lambda: rows)
