"""The ``allgather`` dispatcher: every rank gathers all tokens and computes its own experts' part.

Shapes: T tokens of this rank, k experts per token, G members of the group, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megacore import host_values
from megacore.moe.dispatchers.base import (
    Dispatcher,
    DispatchPlan,
    ExpertRows,
    PendingCombine,
    PendingDispatch,
    Routing,
    balanced_rows,
    copies_of,
    require_equal_tokens,
)
from megacore.ops.permutation import permute_with_probs, sort_by_expert, unpermute
from megacore.parallel.collectives import all_gather
from megacore.parallel.process_groups import Group
from megacore.parallel.row_exchange import RowSplits, gather_rows, reduce_scatter_rows


class AllGatherDispatcher(Dispatcher):
    """Dispatcher that all-gathers the tokens and reduce-scatters the results.

    Traffic does not depend on the routing: ``G - 1`` times the tokens in each direction. This is
    less than for an all-to-all if a token has about as many experts as the group has ranks.

    All members must have equally many tokens in a call; pad to the largest number, or use
    ``alltoall``. On the CPU ``preprocess`` raises an error on every member if the numbers differ: a
    ``RuntimeError`` over shared memory, whose collectives compare sizes; a ``ValueError`` over
    gloo, which costs an additional all-gather of one number. On GPUs the numbers are not compared.
    """

    captured_fields = (
        "probs",
        "row_map",
        "tokens_per_expert",
        "arriving",
        "rows_per_member",
        "num_dropped",
    )

    def preprocess(self, routing: Routing) -> DispatchPlan:
        """Gather the choices of all tokens and select the local experts. See `Dispatcher`."""
        placement, ids_Tk = self.placement, self._within_capacity(routing)
        _, counts_E = sort_by_expert(ids_Tk, placement.num_experts)
        all_ids = _gather_choices(ids_Tk.contiguous(), placement.group)
        local_ids = all_ids - placement.first_local
        is_mine = (local_ids >= 0) & (local_ids < placement.num_local)
        row_map, arriving_L = sort_by_expert(
            torch.where(is_mine, local_ids, -1), placement.num_local
        )
        num_dropped = copies_of(routing) - counts_E.sum()
        return DispatchPlan(
            probs=routing.probs,
            row_map=row_map,
            tokens_per_expert=counts_E,
            arriving=arriving_L[None],
            rows_per_member=arriving_L.sum(),
            num_dropped=num_dropped,
        )

    def read_splits(self, plan: DispatchPlan) -> RowSplits:
        """Read the number of rows of the local experts. See `Dispatcher`."""
        assert plan.rows_per_member is not None
        rows = host_values.read(
            plan.rows_per_member,
            "rows of the local experts",
            assumed=lambda: sum(balanced_rows(plan.probs.numel(), self.placement)[1]),
        )
        return RowSplits(received=(int(rows),))

    def dispatch(self, x_TH: Tensor, plan: DispatchPlan, splits: RowSplits) -> PendingDispatch:
        """Gather tokens and weights synchronously. See `Dispatcher`."""
        assert splits.received is not None
        (num_rows,) = splits.received
        group = self.placement.group
        gathered = gather_rows(x_TH, group), gather_rows(plan.probs, group)
        rows, probs = permute_with_probs(*gathered, plan.row_map, num_rows)
        arrived = ExpertRows(rows=rows, probs=probs, m_splits=plan.arriving[0], row_map=None)
        return PendingDispatch(lambda: arrived)

    def start_combine(
        self,
        rows: Tensor,
        arrived: ExpertRows,  # noqa: ARG002
        splits: RowSplits,  # noqa: ARG002
    ) -> PendingCombine:
        """Return ``rows`` unchanged: ``postprocess`` communicates. See `Dispatcher`."""
        return PendingCombine(lambda: rows)

    def postprocess(self, rows: Tensor, plan: DispatchPlan) -> Tensor:
        """Sum the results of each token over all ranks. See `Dispatcher`."""
        return reduce_scatter_rows(unpermute(rows, plan.row_map), self.placement.group)


def _gather_choices(ids_Tk: Tensor, group: Group) -> Tensor:
    """Gather the choices of all members, ``(G * T, k)``; all must have equally many tokens."""
    num_tokens, top_k = ids_Tk.shape
    on_cpu = ids_Tk.device.type == "cpu"
    if on_cpu and group.host is None and group.size > 1:
        # Unequal sizes abort gloo processes, and no earlier collective of equal size detects them.
        tokens_G = ids_Tk.new_empty(group.size)
        all_gather(tokens_G, ids_Tk.new_full((1,), num_tokens), group)
        require_equal_tokens(tokens_G, group, dispatcher="allgather")
    all_ids = ids_Tk.new_empty(group.size * num_tokens, top_k)
    try:
        all_gather(all_ids, ids_Tk, group)
    except RuntimeError as error:
        error.add_note(
            f"while gathering the choices of {num_tokens} tokens, {top_k} each; the allgather "
            "dispatcher needs equally many tokens on all ranks that share experts: pad to the "
            "largest number, or use alltoall"
        )
        raise
    return all_ids
