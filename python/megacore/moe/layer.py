"""MoE layer: routing, dispatch, expert computation, combine.

Shapes: S this rank's part of the sequence, B batch, H hidden, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from megacore.moe.balance import RealTokens
from megacore.moe.dispatchers import Dispatcher, DispatchPlan
from megacore.moe.echo.layer import Echo, EchoDispatchPlan
from megacore.moe.experts import GroupedExperts
from megacore.moe.router import RoutingResult, TokenNames, TopKRouter
from megacore.ops.recompute import RecomputeCache, is_recomputed
from megacore.ops.register import in_inference
from megacore.parallel.params import has_hooks, use_params

TokenMap = Callable[[Tensor], Tensor]


@runtime_checkable
class InTwoParts(Protocol):
    """Module that can be computed in two parts, with the same bits as by a call."""

    def start(self, x_SBH: Tensor) -> Callable[[], Tensor]:
        """Compute the first part; the result computes the second and returns the output."""


@dataclass(frozen=True, kw_only=True)
class MoECounts:
    """Counters of a layer on this rank since their last reset.

    Attributes:
        tokens_per_expert: Copies of this rank's tokens sent to each expert, ``(E,)`` int64,
            excluding dropped copies.
        num_dropped: Dropped copies, int64 scalar.
        num_over_budget: Dropped copies that exceeded a static buffer, int64 scalar.
        losses: Sums over forward passes of the load-balancing loss and of the z-loss, each with its
            coefficient, ``(2,)`` float32.
    """

    tokens_per_expert: Tensor
    num_dropped: Tensor
    num_over_budget: Tensor
    losses: Tensor


class MoELayer(nn.Module):
    """Routed experts, and optionally a shared expert that processes every token.

    If all tensor-parallel ranks hold the same tokens, ``scatter_tokens`` selects the tokens that
    each rank routes, so that no token is counted twice, and ``gather_tokens`` gathers the results.

    Args:
        router: Chooses experts.
        dispatcher: Exchanges tokens between ranks.
        experts: The experts of this rank.
        shared: The shared expert, with the input and output shapes of the layer. ``None`` for none.
            It is computed during the exchanges: its first part during the dispatch, the second
            during the combine; all of it during the dispatch if it is not `InTwoParts`, has hooks,
            or the layer is recomputed.
        scatter_tokens: Maps the layer's input to the tokens that this rank routes, ``(S', B, H)``.
            Default: all tokens.
        gather_tokens: Maps the results of these tokens to the layer's output.
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
        scatter_tokens: TokenMap | None = None,
        gather_tokens: TokenMap | None = None,
        echo: Echo | None = None,
    ) -> None:
        super().__init__()
        self.router = router
        self.dispatcher = dispatcher
        self.experts = experts
        self.shared = shared
        self._scatter_tokens = scatter_tokens
        self._gather_tokens = gather_tokens
        self.echo = echo
        zeros = router.weight.detach().new_zeros(router.options.num_experts, dtype=torch.int64)
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
        cache: RecomputeCache | None = None,
        real: RealTokens | None = None,
    ) -> Tensor:
        """Apply the layer.

        Args:
            x_SBH: ``(S, B, H)``, normalized.
            names: Identifiers of the tokens that this rank routes; required for jitter.
            loss_factor: Factor between the mean loss of this microbatch and the root of the
                backward pass; applied to the router's losses too. See `TopKRouter.forward`.
            cache: Cache of a recomputed region around the layer: recomputation then reuses the
                routing decisions, and nothing is counted twice. ``None`` without such a region.
            real: The tokens that this rank routes and that are not padding; ``None``: all. Only the
                shared expert computes padding.

        Returns:
            The layer output to add to the residual stream, ``(S, B, H)``.
        """
        tokens_SBH, routing = self.route(
            x_SBH, names, loss_factor=loss_factor, cache=cache, real=real
        )
        plan = self.plan(routing, cache=cache)
        return self.finish(x_SBH, tokens_SBH, plan, cache=cache)

    def route(
        self,
        x_SBH: Tensor,
        names: TokenNames | None,
        *,
        loss_factor: float | Tensor,
        cache: RecomputeCache | None = None,
        real: RealTokens | None = None,
    ) -> tuple[Tensor, RoutingResult]:
        """Route this rank's tokens: the first phase of :meth:`forward`."""
        tokens_SBH = x_SBH if self._scatter_tokens is None else self._scatter_tokens(x_SBH)
        routing: RoutingResult = self.router(
            tokens_SBH, names=names, loss_factor=loss_factor, cache=cache, real=real
        )
        return tokens_SBH, routing

    def plan(self, routing: RoutingResult, *, cache: RecomputeCache | None = None) -> DispatchPlan:
        """Plan the dispatch: the second phase. So far no tensor shape depends on the routing.

        Generation, in inference mode, counts nothing.
        """
        if in_inference():
            return self._decide(routing)
        if cache is None:
            decided = self._decide(routing)
        else:
            decided = cache.once(lambda: _without_gradient(self._decide(routing)))
        plan = replace(decided, probs=routing.probs)
        if cache is None or not cache.is_replay:
            self._count(plan, routing)
        return plan

    def finish(
        self,
        x_SBH: Tensor,
        tokens_SBH: Tensor,
        plan: DispatchPlan,
        *,
        cache: RecomputeCache | None = None,
    ) -> Tensor:
        """Dispatch, compute the experts and combine: the last phase.

        Sync:
            Waits for the device where the dispatcher has to read sizes.
        """
        clones = adapters = None
        if self.echo is not None and isinstance(plan, EchoDispatchPlan):
            clones = self.echo.clones(self.experts, plan)
            use_params(self.experts)
            clones.send_weights()
            if self.experts.adapters is not None:
                adapters = self.experts.adapters.bind(self.echo.extension(plan))
        read_splits = self.dispatcher.read_splits
        splits = read_splits(plan) if cache is None else cache.once(lambda: read_splits(plan))
        pending = self.dispatcher.dispatch(tokens_SBH.flatten(0, 1), plan, splits)
        finish_shared = self._start_shared(x_SBH)
        arrived = pending.finish()
        combining = self.dispatcher.start_combine(
            self.experts(arrived, clones, adapters), arrived, splits
        )
        shared_SBH = None if finish_shared is None else finish_shared()
        routed_SBH = self.dispatcher.postprocess(combining.finish(), plan).view_as(tokens_SBH)
        if clones is not None:
            routed_SBH = clones.send_again_in_backward(routed_SBH)
        output_SBH = routed_SBH if self._gather_tokens is None else self._gather_tokens(routed_SBH)
        return output_SBH if shared_SBH is None else output_SBH + shared_SBH

    def _start_shared(self, x_SBH: Tensor) -> Callable[[], Tensor] | None:
        """Compute the first part of the shared expert, or all; the result returns its output.

        Both parts and their gradients overlap with an exchange in flight.
        """
        if self.shared is None:
            return None
        # A recomputed layer computes all of it now: the gradient of the second part would run the
        # layer again during the exchange of the combine, for which peer memory has no third slot.
        in_two = not is_recomputed() and not has_hooks(self.shared)
        if in_two and isinstance(self.shared, InTwoParts):
            return self.shared.start(x_SBH)
        output: Tensor = self.shared(x_SBH)
        return lambda: output

    def counts(self) -> MoECounts:
        """Return the counters since :meth:`reset_counts`, as live tensors."""
        return MoECounts(
            tokens_per_expert=self.tokens_per_expert,
            num_dropped=self.num_dropped,
            num_over_budget=self.num_over_budget,
            losses=self.losses,
        )

    def reset_counts(self) -> None:
        """Reset all counters, including the token counts for the router's bias update."""
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
        _add(
            (self.tokens_per_expert, plan.tokens_per_expert),
            (self.num_dropped, plan.num_dropped),
            (self.num_over_budget, plan.num_over_budget),
        )
        _add((self.losses[0], routing.aux_loss), (self.losses[1], routing.z_loss))


def _add(*pairs: tuple[Tensor, Tensor | None]) -> None:
    """Add each number that is not ``None`` to its sum, by one operation."""
    found = [(total, number) for total, number in pairs if number is not None]
    if found:
        torch._foreach_add_(*zip(*found, strict=True))


def _without_gradient(plan: DispatchPlan) -> DispatchPlan:
    return replace(plan, probs=plan.probs.detach())
