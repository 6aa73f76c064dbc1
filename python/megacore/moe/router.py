"""Top-k routers: those of Mixtral, Qwen3-MoE and DeepSeek-V3, and combinations of their options.

Shapes: S this rank's part of the sequence, B batch, T = S * B tokens, H hidden, E experts, k
choices per token.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from megacore.moe.balance import (
    RealTokens,
    RouterGroups,
    inject_gradient,
    load_balancing_loss,
    reduce_stats,
    scales_of_pools,
    spans_ranks,
    z_loss,
)
from megacore.moe.options import RouterOptions
from megacore.ops import top_k
from megacore.ops.counter_random import StepKeys, key_of, token_numbers, uniform
from megacore.ops.recompute import RecomputeCache
from megacore.ops.routing import TINY, RouterLosses, has_kernel, route
from megacore.options import check_options
from megacore.parallel.collectives import all_reduce_

_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class TokenNames:
    """Layout-independent identifiers of the tokens of a forward pass.

    Attributes:
        step: Optimizer step.
        sample_ids_B: Global sample ids, ``(B,)``, int64.
        positions_S: Positions of this rank's tokens in the whole sequence, ``(S,)``, int64.
        keys: Keys of this step on the device, see `StepKeys`; ``None`` to compute the keys.
    """

    step: int
    sample_ids_B: Tensor
    positions_S: Tensor
    keys: StepKeys | None = None


@dataclass(frozen=True, kw_only=True)
class RoutingResult:
    """Expert assignment and auxiliary losses of one forward pass.

    Attributes:
        probs: Weight of each choice, ``(T, k)``, float32.
        expert_ids: The choices, best first, ``(T, k)``, int64; -1 for padding.
        aux_loss: Value of the load-balancing loss times its coefficient, a scalar without gradient;
            ``None`` without that loss. Averaged over ranks and microbatches it is the value of the
            global batch. Its gradient is already attached to ``probs``.
        z_loss: The same for the z-loss.
        num_copies: Choices that are not of padding, int64 scalar; ``None``: all.
    """

    probs: Tensor
    expert_ids: Tensor
    aux_loss: Tensor | None
    z_loss: Tensor | None
    num_copies: Tensor | None = None


class Tape(Protocol):
    """Recorder or replayer of decisions."""

    def choose(self, layer: int, names: TokenNames, decide: Callable[[], Tensor]) -> Tensor:
        """Choose experts, ``(T, k)`` int64; ``decide`` computes the router's own choice."""


class TopKRouter(nn.Module):
    """Router that scores the experts for each token and chooses the best k.

    Args:
        options: Choice of experts and losses.
        weight: The router's matrix, ``(E, H)``. It is replicated over tp; with sequence parallelism
            its gradient must be summed over tp.
        bias: Added to the logits, ``(E,)``; its gradient is summed like the matrix's.
        groups: Groups that hold the other tokens.
        seed: Seed of the run, for jitter.
        layer: Global index of the layer, for jitter.

    Attributes:
        expert_bias: ``(E,)``, float32, a buffer of the module; ``None`` without
            ``options.bias_rate``. Training state, saved in checkpoints.
        tokens_seen: ``(E,)``, int64: choices per expert in training since the last update of the
            bias. Not saved: it is zero between steps.
        tape: Records or replays decisions in training, if set. ``names`` is then required.

    Example:
        >>> router = TopKRouter(RouterOptions(num_experts=2, top_k=1), nn.Parameter(torch.eye(2)))
        >>> routed = router(torch.tensor([[3.0, 1.0], [0.0, 2.0]]))
        >>> routed.expert_ids.tolist(), routed.probs.tolist()
        ([[0], [1]], [[1.0], [1.0]])
    """

    expert_bias: Tensor | None
    tokens_seen: Tensor | None

    def __init__(
        self,
        options: RouterOptions,
        weight: nn.Parameter,
        *,
        bias: nn.Parameter | None = None,
        groups: RouterGroups | None = None,
        seed: int = 0,
        layer: int = 0,
    ) -> None:
        super().__init__()
        check_options(options, RouterOptions, "options")
        if weight.dim() != 2 or weight.shape[0] != options.num_experts:
            raise ValueError(
                f"weight has shape {tuple(weight.shape)}; expected ({options.num_experts}, H)"
            )
        self.options = options
        self.weight = weight
        self.bias = bias
        self.groups = RouterGroups() if groups is None else groups
        self.seed = seed
        self.layer = layer
        self.tape: Tape | None = None
        self._rule: dict[str, Any] = {
            "top_k": options.top_k,
            "is_sigmoid": options.score_function == "sigmoid",
            "softmax_after_top_k": options.softmax_after_top_k,
            "normalize": options.normalize,
            "scaling": options.scaling_factor,
        }
        zeros = weight.detach().new_zeros(options.num_experts, dtype=torch.float32)
        biased = options.bias_rate is not None
        self.register_buffer("expert_bias", zeros if biased else None)
        self.register_buffer("tokens_seen", zeros.long() if biased else None, persistent=False)

    @property
    def uses_names(self) -> bool:
        """Return whether a call now depends on the identifiers of its tokens."""
        options = self.options
        in_training = options.jitter > 0.0 or self.tape is not None
        return self.options.force_balanced or (self.training and in_training)

    @property
    def random_uses(self) -> tuple[str, ...]:
        """Purposes of the router's random numbers, as `StepKeys` identifies them."""
        if self.options.jitter == 0.0:
            return ()
        return (f"router jitter|{self.seed}|{{step}}|{self.layer}",)

    def forward(
        self,
        hidden: Tensor,
        *,
        names: TokenNames | None = None,
        loss_factor: float | Tensor = 1.0,
        expert_ids: Tensor | None = None,
        cache: RecomputeCache | None = None,
        real: RealTokens | None = None,
    ) -> RoutingResult:
        """Route the tokens.

        Args:
            hidden: ``(S, B, H)``, or ``(S, H)`` for one sequence.
            names: Token identifiers; required for jitter.
            loss_factor: Factor between a mean over the tokens of this microbatch and the number
                that ``backward`` starts from, such as the loss scale divided by the number of
                microbatches. The gradients of the auxiliary losses get the same factor. A tensor is
                read in the backward pass. With shape ``(B,)`` it holds a factor for the token mean
                of each sequence, and the mean over sequences is the microbatch's contribution. A
                pool over ranks (``aux_loss_type="batch"``) uses the mean of all factors, computed
                in the forward pass.
            expert_ids: Precomputed choices, ``(T, k)``, int64, used instead of the best experts.
            cache: Cache of a recomputed region around the router, if there is one.
            real: Tokens that are not padding; ``None``: all. Padding gets no expert.

        Raises:
            ValueError: If shapes are inconsistent, or if jitter is enabled without ``names``.

        Sync:
            None on the device. In training, the load-balancing loss does an all-reduce over the
            groups of its pool, except groups of one.
        """
        if hidden.dim() == 2:
            hidden = hidden[:, None]
        if hidden.dim() != 3 or hidden.shape[2] != self.weight.shape[1]:
            raise ValueError(
                f"hidden has shape {tuple(hidden.shape)}; expected (S, B, {self.weight.shape[1]})"
            )
        options = self.options
        logits_SBE = self._logits(hidden, names)
        logits = logits_SBE.flatten(0, 1)
        num_pools = hidden.shape[1] if options.aux_loss_type == "sequence" else 1
        if expert_ids is None and real is None and self._is_fused(logits, num_pools):
            return self._route(logits_SBE, num_pools, loss_factor=loss_factor, cache=cache)
        scores = _scores(logits, options)
        if expert_ids is None:
            expert_ids = _once(cache, lambda: self._decide(logits, scores.detach(), names))
        elif expert_ids.shape != (logits.shape[0], options.top_k):
            raise ValueError(
                f"expert_ids have shape {tuple(expert_ids.shape)}; expected "
                f"({logits.shape[0]}, {options.top_k})"
            )
        num_copies = None
        if real is None:
            probs = _weights(logits, scores, expert_ids, options)
        else:
            is_padding = ~real.mask_SB.reshape(-1, 1)
            probs = _weights(logits, scores, expert_ids, options).masked_fill(is_padding, 0.0)
            expert_ids = expert_ids.masked_fill(is_padding, -1)
            num_copies = real.mask_SB.sum() * options.top_k
        aux_value = z_value = None
        if self.training:
            self._count(expert_ids, cache)
            if options.aux_loss_coef > 0.0:
                own, value = load_balancing_loss(
                    _normalized(scores, options).view_as(logits_SBE),
                    expert_ids.view(*logits_SBE.shape[:2], options.top_k),
                    kind=options.aux_loss_type,
                    groups=self.groups,
                    cache=cache,
                    real=real,
                )
                own, aux_value = own * options.aux_loss_coef, value * options.aux_loss_coef
                probs = inject_gradient(probs, own, self._pool_factor(loss_factor, cache))
            probs, z_value = self._with_z_loss(probs, logits_SBE, loss_factor, real)
        return RoutingResult(
            probs=probs,
            expert_ids=expert_ids,
            aux_loss=aux_value,
            z_loss=z_value,
            num_copies=num_copies,
        )

    def _is_fused(self, logits: Tensor, num_pools: int) -> bool:
        """Return whether one operation makes the decisions: none is replaced or by groups."""
        options = self.options
        return (
            has_kernel(logits, options.top_k, num_pools)
            and not self.options.force_balanced
            and options.groups_top_k >= options.num_groups
            and (self.tape is None or not self.training)
        )

    def _route(
        self,
        logits_SBE: Tensor,
        num_pools: int,
        *,
        loss_factor: float | Tensor,
        cache: RecomputeCache | None,
    ) -> RoutingResult:
        """Route by one operation, which has the losses too, for `forward`."""
        options = self.options
        losses = None
        if self.training and max(options.aux_loss_coef, options.z_loss_coef) > 0.0:
            losses = self._losses(logits_SBE, num_pools, loss_factor, cache)
        is_replay = cache is not None and cache.is_replay
        routed = route(
            logits_SBE.flatten(0, 1),
            self.expert_bias,
            cache.once(_unknown) if cache and is_replay else None,
            **self._rule,
            num_pools=num_pools,
            losses=losses,
            seen=self.tokens_seen if self.training and not is_replay else None,
        )
        if cache and not is_replay:
            cache.once(lambda: routed.ids)
        aux_value = z_value = None
        if losses is not None and options.aux_loss_coef > 0.0:
            aux_value = routed.losses[0]
            if spans_ranks(self.groups, options.aux_loss_type):
                stats = _once(cache, lambda: self._reduced(routed.stats))
                losses.counts = stats[0]
                aux_value = (stats[0] * stats[1]).sum() * losses.aux_scale
        if losses is not None and options.z_loss_coef > 0.0:
            z_value = routed.losses[1]
        return RoutingResult(
            probs=routed.probs, expert_ids=routed.ids, aux_loss=aux_value, z_loss=z_value
        )

    def _losses(
        self,
        logits_SBE: Tensor,
        num_pools: int,
        loss_factor: float | Tensor,
        cache: RecomputeCache | None,
    ) -> RouterLosses:
        options, losses = self.options, RouterLosses()
        length, batch, num_experts = logits_SBE.shape
        if options.aux_loss_coef > 0.0:
            losses.aux_factor = self._pool_factor(loss_factor, cache)
            losses.aux_scale, losses.aux_slope = scales_of_pools(
                num_pools=num_pools,
                num_tokens=length * batch // max(1, num_pools),
                num_experts=num_experts,
                top_k=options.top_k,
                kind=options.aux_loss_type,
                groups=self.groups,
                coef=options.aux_loss_coef,
            )
        if options.z_loss_coef > 0.0:
            losses.z_factor = loss_factor
            losses.z_scale = options.z_loss_coef / max(1, length * batch)
            losses.z_slope = losses.z_scale / self.groups.sequence_parallel.size
        return losses

    def _reduced(self, stats: Tensor) -> Tensor:
        reduce_stats(stats, kind=self.options.aux_loss_type, groups=self.groups)
        return stats

    def _count(self, expert_ids: Tensor, cache: RecomputeCache | None) -> None:
        if self.tokens_seen is not None and not (cache and cache.is_replay):
            chosen = expert_ids.flatten()
            self.tokens_seen.scatter_add_(0, chosen.clamp(min=0), (chosen >= 0).long())

    def _with_z_loss(
        self,
        probs: Tensor,
        logits_SBE: Tensor,
        loss_factor: float | Tensor,
        real: RealTokens | None,
    ) -> tuple[Tensor, Tensor | None]:
        coef = self.options.z_loss_coef
        if coef == 0.0:
            return probs, None
        own, value = z_loss(logits_SBE, groups=self.groups, real=real)
        return inject_gradient(probs, own * coef, loss_factor), value * coef

    def _pool_factor(self, factor: float | Tensor, cache: RecomputeCache | None) -> float | Tensor:
        """Compute the gradient factor of the load-balancing loss for its pool."""
        if not isinstance(factor, Tensor) or factor.dim() == 0:
            return factor
        if self.options.aux_loss_type == "sequence":
            return factor

        def mean_over_ranks() -> Tensor:
            group = self.groups.dp_cp
            mean = factor.float().mean()
            all_reduce_(mean, group)
            return mean / group.size

        return _once(cache, mean_over_ranks)

    def _logits(self, hidden_SBH: Tensor, names: TokenNames | None) -> Tensor:
        """Compute logits, ``(S, B, E)``; float32, or float64 for a float64 input."""
        weight = self.weight
        if self.options.fp32 and hidden_SBH.dtype.itemsize < 4:
            hidden_SBH = hidden_SBH.float()
        if self.training and self.options.jitter > 0.0:
            hidden_SBH = self._jitter(hidden_SBH, names)
        bias = None if self.bias is None else self.bias.to(hidden_SBH.dtype)
        logits = nn.functional.linear(hidden_SBH, weight.to(hidden_SBH.dtype), bias)
        return logits.float() if logits.dtype.itemsize < 4 else logits

    def _jitter(self, hidden_SBH: Tensor, names: TokenNames | None) -> Tensor:
        if names is None:
            raise ValueError("jitter needs the names of the tokens (names=TokenNames(...))")
        (use,) = self.random_uses
        key = key_of(use.format(step=names.step)) if names.keys is None else names.keys.of(use)
        numbers = token_numbers(
            key,
            sample_ids_B=names.sample_ids_B,
            positions_S=names.positions_S,
            num_features=hidden_SBH.shape[2],
        )
        factor = (uniform(numbers) * 2.0 - 1.0).mul_(self.options.jitter).add_(1.0)
        return hidden_SBH * factor.to(hidden_SBH.dtype)

    def _decide(self, logits: Tensor, scores: Tensor, names: TokenNames | None) -> Tensor:
        if self.tape is None or not self.training:
            return self._choose(logits, scores, names)
        if names is None:
            raise ValueError("a tape needs the names of the tokens (names=TokenNames(...))")
        return self.tape.choose(self.layer, names, lambda: self._choose(logits, scores, names))

    def _choose(self, logits: Tensor, scores: Tensor, names: TokenNames | None) -> Tensor:
        options = self.options
        if self.options.force_balanced:
            return _balanced_choices(logits, options, names)
        ranked = logits.detach() if options.softmax_after_top_k else scores
        if self.expert_bias is not None:
            ranked = ranked + self.expert_bias
        if options.groups_top_k < options.num_groups:
            ranked = _only_best_groups(ranked, options)
        return top_k(ranked, options.top_k)


@torch.no_grad()
def update_expert_biases(routers: Sequence[TopKRouter]) -> None:
    """Raise the bias of experts below the mean load by the rate; lower it for those above the mean.

    Call it once per optimizer step. The load counts all tokens of the step, in integers, so every
    layout makes the same update.

    Args:
        routers: All routers of this rank with an expert bias, in the same order on all ranks of
            their groups; all routers must have the same groups.

    Sync:
        One all-reduce over each of the groups that hold other tokens.

    Source:
        Wang et al., arXiv:2408.15664.

    Example:
        >>> options = RouterOptions(num_experts=2, top_k=1, bias_rate=1e-3)
        >>> router = TopKRouter(options, nn.Parameter(torch.eye(2)))
        >>> _ = router(torch.tensor([[3.0, 1.0], [2.0, 1.0]]))
        >>> update_expert_biases([router])
        >>> [round(x, 4) for x in router.expert_bias.tolist()], router.tokens_seen.tolist()
        ([-0.001, 0.001], [0, 0])
    """
    biased = [router for router in routers if router.tokens_seen is not None]
    if not biased:
        return
    load = torch.stack([router.tokens_seen for router in biased if router.tokens_seen is not None])
    groups = biased[0].groups
    all_reduce_(load, groups.sequence_parallel)
    all_reduce_(load, groups.dp_cp if groups.holders is None else groups.holders)
    missing = (load.sum(1, keepdim=True) - load * load.shape[1]).sign()
    for router, sign in zip(biased, missing, strict=True):
        assert router.expert_bias is not None
        assert router.tokens_seen is not None
        assert router.options.bias_rate is not None
        router.expert_bias += router.options.bias_rate * sign
        router.tokens_seen.zero_()


def _once(cache: RecomputeCache | None, make: Callable[[], _T]) -> _T:
    return make() if cache is None else cache.once(make)


def _unknown() -> Tensor:
    raise RuntimeError("megacore bug: a decision is replayed that was not kept")


def _scores(logits: Tensor, options: RouterOptions) -> Tensor:
    return logits.sigmoid() if options.score_function == "sigmoid" else logits.softmax(-1)


def _normalized(scores: Tensor, options: RouterOptions) -> Tensor:
    """Normalize scores to a sum of 1 for each token."""
    if options.score_function != "sigmoid":
        return scores
    return scores / (scores.sum(-1, keepdim=True) + TINY)


def _weights(logits: Tensor, scores: Tensor, expert_ids: Tensor, options: RouterOptions) -> Tensor:
    if options.softmax_after_top_k:
        weights = logits.gather(1, expert_ids).softmax(-1)
    else:
        weights = scores.gather(1, expert_ids)
        if options.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
    return weights if options.scaling_factor == 1.0 else weights * options.scaling_factor


def _only_best_groups(ranked: Tensor, options: RouterOptions) -> Tensor:
    """Mask the scores of experts outside the best groups with minus infinity."""
    per_group = options.num_experts // options.num_groups
    grouped = ranked.view(ranked.shape[0], options.num_groups, per_group)
    num_best = min(options.group_score_top, grouped.shape[2])
    group_scores = grouped.topk(num_best, dim=-1).values.sum(-1)
    closed = torch.ones_like(group_scores, dtype=torch.bool)
    closed.scatter_(1, top_k(group_scores, options.groups_top_k), False)
    return grouped.masked_fill(closed[..., None], -torch.inf).flatten(1)


def _balanced_choices(logits: Tensor, options: RouterOptions, names: TokenNames | None) -> Tensor:
    """Assign k experts per token round-robin; with ``names``, independent of the layout."""
    if names is None:
        token = torch.arange(logits.shape[0], device=logits.device)
    else:
        token = (names.positions_S[:, None] + names.sample_ids_B[None, :]).flatten()
    choice = torch.arange(options.top_k, device=logits.device)
    chosen: Tensor = (token[:, None] * options.top_k + choice) % options.num_experts
    return chosen
