"""An MoE layer: route tokens, bring them to their experts, compute, bring the results back.

Shapes: S this rank's part of the sequence, B batch, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from megacore.moe.dispatchers import Dispatcher, DispatchPlan
from megacore.moe.echo.layer import Echo, EchoPlan
from megacore.moe.experts import GroupedExperts
from megacore.moe.router import RoutingResult, TokenNames, TopKRouter
from megacore.ops.recompute import Memo

Mapping = Callable[[Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class MoECounts:
    """What happened in a layer since its counts were reset, on this rank.

    Attributes:
        tokens_per_expert: Copies that each expert was given from this rank's tokens, ``(E,)``
            int64. Dropped copies are not among them.
        num_dropped: Copies that no expert saw, int64 scalar.
        num_over_budget: Those of them that a static buffer had no room for, int64 scalar.
        losses: Sums over forward passes of the load-balancing loss and of the z-loss, each with its
            coefficient, ``(2,)`` float32.
    """

    tokens_per_expert: Tensor
    num_dropped: Tensor
    num_over_budget: Tensor
    losses: Tensor


class MoELayer(nn.Module):
    """Routed experts, and perhaps a shared one that sees every token.

    Where tensor parallelism gives all its ranks the same tokens, each rank routes a share of them,
    so no token is counted twice; ``take_share`` and ``join_shares`` say how.

    Args:
        router: Chooses experts.
        dispatcher: Moves tokens.
        experts: The experts of this rank.
        shared: The shared expert: takes and returns what the layer does. ``None`` for none.
        overlap_shared: Compute the shared expert while tokens travel.
        take_share: From the layer's input to the tokens that this rank routes, ``(S', B, H)``.
            Default: all of them.
        join_shares: Back from the results of these tokens to the layer's output.
        echo: Clones of hot experts; the dispatcher then moves tokens to ``echo.places``.
    """

    tokens_per_expert: Tensor
    num_dropped: Tensor
    num_over_budget: Tensor
    losses: Tensor

    def __init__(
        self,
        *,
        router: TopKRouter,
        dispatcher: Dispatcher,
        experts: GroupedExperts,
        shared: nn.Module | None = None,
        overlap_shared: bool = False,
        take_share: Mapping | None = None,
        join_shares: Mapping | None = None,
        echo: Echo | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.dispatcher = dispatcher
        self.experts = experts
        self.shared = shared
        self.overlap_shared = overlap_shared
        self._take_share = take_share
        self._join_shares = join_shares
        self.echo = echo
        zeros = router.weight.detach().new_zeros(router.config.num_experts, dtype=torch.int64)
        self.register_buffer("tokens_per_expert", zeros, persistent=False)
        self.register_buffer("num_dropped", zeros.new_zeros(()), persistent=False)
        self.register_buffer("num_over_budget", zeros.new_zeros(()), persistent=False)
        losses = zeros.new_zeros(2, dtype=torch.float32)
        self.register_buffer("losses", losses, persistent=False)

    def forward(
        self,
        x_SBH: Tensor,
        names: TokenNames | None = None,
        *,
        loss_factor: float | Tensor = 1.0,
        memo: Memo | None = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            x_SBH: ``(S, B, H)``, normed.
            names: Names of the tokens that this rank routes; jitter needs them.
            loss_factor: What the mean loss of this microbatch is multiplied by on its way into the
                backward pass; the router's losses get the same factor. See `TopKRouter.forward`.
            memo: That of a recomputed region around the layer: tokens then go where they went
                before, and nothing is counted twice.

        Returns:
            What the residual stream gains, ``(S, B, H)``.
        """
        memo = Memo() if memo is None else memo
        tokens_SBH, routing = self.route(x_SBH, names, loss_factor=loss_factor, memo=memo)
        plan = self.plan(routing, memo=memo)
        return self.finish(x_SBH, tokens_SBH, plan, memo=memo)

    def route(
        self,
        x_SBH: Tensor,
        names: TokenNames | None,
        *,
        loss_factor: float | Tensor,
        memo: Memo,
    ) -> tuple[Tensor, RoutingResult]:
        """The first part of :meth:`forward`: this rank's tokens and their experts."""
        tokens_SBH = x_SBH if self._take_share is None else self._take_share(x_SBH)
        routing: RoutingResult = self.router(
            tokens_SBH, names=names, loss_factor=loss_factor, memo=memo
        )
        return tokens_SBH, routing

    def plan(self, routing: RoutingResult, *, memo: Memo) -> DispatchPlan:
        """The second part: which copy goes where. Up to here no size depends on the routing."""
        decided = memo.once(lambda: _without_gradient(self._decide(routing)))
        plan = replace(decided, probs=routing.probs)
        if not memo.is_replay:
            self._count(plan, routing)
        return plan

    def finish(
        self, x_SBH: Tensor, tokens_SBH: Tensor, plan: DispatchPlan, *, memo: Memo
    ) -> Tensor:
        """The rest: to the experts and back.

        Sync:
            Waits for the device where the dispatcher has to read sizes.
        """
        clones = None
        if self.echo is not None and isinstance(plan, EchoPlan):
            clones = self.echo.clones(self.experts, plan)
            self.experts(None, clones)
        splits = memo.once(lambda: self.dispatcher.read_splits(plan))
        pending = self.dispatcher.dispatch(tokens_SBH.flatten(0, 1), plan, splits)
        # Between the start and the end of the exchange.
        shared_SBH = self.shared(x_SBH) if self.shared and self.overlap_shared else None
        arrived = pending.finish()
        rows = self.dispatcher.combine(self.experts(arrived, clones), arrived, splits)
        routed_SBH = self.dispatcher.postprocess(rows, plan).view_as(tokens_SBH)
        if clones is not None:
            routed_SBH = clones.watch(routed_SBH)
        if self.shared is not None and shared_SBH is None:
            shared_SBH = self.shared(x_SBH)
        output_SBH = routed_SBH if self._join_shares is None else self._join_shares(routed_SBH)
        return output_SBH if shared_SBH is None else output_SBH + shared_SBH

    def counts(self) -> MoECounts:
        """What happened since :meth:`reset_counts`; the tensors go on counting."""
        return MoECounts(
            tokens_per_expert=self.tokens_per_expert,
            num_dropped=self.num_dropped,
            num_over_budget=self.num_over_budget,
            losses=self.losses,
        )

    def reset_counts(self) -> None:
        """Start counting anew; also forgets what the router's bias would learn from."""
        for count in vars(self.counts()).values():
            count.zero_()
        if self.echo is not None:
            self.echo.reset_counts()
        if self.router.tokens_seen is not None:
            self.router.tokens_seen.zero_()

    def _decide(self, routing: RoutingResult) -> DispatchPlan:
        if self.echo is None:
            return self.dispatcher.preprocess(routing)
        return self.echo.plan(routing, self.dispatcher)

    @torch.no_grad()
    def _count(self, plan: DispatchPlan, routing: RoutingResult) -> None:
        self.tokens_per_expert += plan.tokens_per_expert
        self.num_dropped += plan.num_dropped
        self.num_over_budget += plan.num_over_budget
        for index, loss in enumerate((routing.aux_loss, routing.z_loss)):
            if loss is not None:
                self.losses[index] += loss


def _without_gradient(plan: DispatchPlan) -> DispatchPlan:
    return replace(plan, probs=plan.probs.detach())
