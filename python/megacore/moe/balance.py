"""Load-balancing losses and the injection of their gradients into the backward pass.

Every definition here is independent of the parallel layout. Token statistics are summed over the
ranks that hold the other tokens; gradients equal those of a single process. The common rule: *the
router's loss of one data-parallel and context-parallel rank is a mean over its tokens, like the
training loss, and gradients are averaged over ranks*. Only where tensor parallelism splits the
sequence, gradients are summed over ranks; each rank then contributes its share of the mean.

Shapes: S this rank's part of the sequence, B batch, E experts, k choices per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from megacore.ops.recompute import RecomputeCache
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.process_groups import Group


@dataclass(frozen=True, kw_only=True)
class RealTokens:
    """Tokens of a forward pass that are not padding.

    Attributes:
        mask_SB: Tokens of this rank that are not padding, ``(S, B)``, bool.
        lengths_B: Such tokens of the whole sequences, on all ranks, ``(B,)``, int64.
    """

    mask_SB: Tensor
    lengths_B: Tensor


@dataclass(frozen=True, kw_only=True)
class RouterGroups:
    """Process groups whose members hold other tokens than this rank.

    Attributes:
        sequence_parallel: The tp group if sequence parallelism splits the sequence over it; a group
            of one if its ranks all route the same tokens.
        cp: The context-parallel group, which splits sequences.
        dp_cp: All ranks of the data-parallel and context-parallel axes.
        holders: All ranks with a replica of this router. If a pipeline holds two copies of the
            model for different microbatches, the ranks of both copies. Default: ``dp_cp``.
    """

    sequence_parallel: Group = field(default_factory=Group.solo)
    cp: Group = field(default_factory=Group.solo)
    dp_cp: Group = field(default_factory=Group.solo)
    holders: Group | None = None


def group_of_pool(groups: RouterGroups, kind: Literal["sequence", "batch"]) -> Group:
    """Return the group that holds other parts of a pool, apart from ``sequence_parallel``."""
    return groups.cp if kind == "sequence" else groups.dp_cp


def spans_ranks(groups: RouterGroups, kind: Literal["sequence", "batch"]) -> bool:
    """Return whether other ranks hold tokens of this rank's pools."""
    return max(groups.sequence_parallel.size, group_of_pool(groups, kind).size) > 1


def load_balancing_loss(
    scores_SBE: Tensor,
    expert_ids_SBK: Tensor,
    *,
    kind: Literal["sequence", "batch"],
    groups: RouterGroups,
    cache: RecomputeCache | None = None,
    real: RealTokens | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``E * sum_e (share of assignments to e) * (mean score of e)``; 1 if balanced.

    Because of the product, the loss depends on the pool of tokens. ``"sequence"`` treats each
    sequence separately and averages over sequences, so the loss of a global batch does not depend
    on its division into microbatches and ranks. ``"batch"`` pools all tokens of a microbatch on all
    data-parallel ranks. It allows sequences to specialise, but depends on the number of
    microbatches of a step: layouts agree if they have the same number of microbatches.

    Args:
        scores_SBE: Scores of all experts that sum to 1 for each token, ``(S, B, E)``.
        expert_ids_SBK: The choices, ``(S, B, k)``, int64; below 0 for padding.
        kind: The pool.
        groups: Groups that hold the other tokens of the pool.
        cache: Cache of an enclosing recomputed region; sums over ranks are then computed once.
        real: Tokens that are not padding; ``None``: all.

    Returns:
        One loss per pool, ``(P,)``, with this rank's part of the gradient; and the detached mean
        value. Averaged over ranks and microbatches, the value is that of the global batch. Without
        tokens it is 0.

    Sync:
        One all-reduce over each group of the pool.

    Source:
        Switch Transformers, arXiv:2101.03961, equation 4; DeepSeek-V3, arXiv:2412.19437, equation
        17, for ``"sequence"``.

    Example:
        >>> scores = torch.tensor([[[0.75, 0.25]], [[0.75, 0.25]]])
        >>> _, value = load_balancing_loss(
        ...     scores, torch.tensor([[[0]], [[0]]]), kind="sequence", groups=RouterGroups()
        ... )
        >>> value.item()
        1.5
    """
    length, batch, num_experts = scores_SBE.shape
    pools = batch if kind == "sequence" else 1
    count_PE = _count_choices(expert_ids_SBK, pools, num_experts).to(scores_SBE.dtype)
    if real is not None:
        scores_SBE = scores_SBE * real.mask_SB[..., None]
    total_PE = scores_SBE.sum(0)
    if kind == "batch":
        total_PE = total_PE.sum(0, keepdim=True)
    scale, slope = scales_of_pools(
        num_pools=pools,
        num_tokens=length * batch // max(1, pools),
        num_experts=num_experts,
        top_k=expert_ids_SBK.shape[-1],
        kind=kind,
        groups=groups,
    )
    if pools > 0 and real is None and not spans_ranks(groups, kind):
        # Fewer operations than the general case, of which it is the one without other ranks.
        own_P = (count_PE * total_PE).sum(1) * slope
        return own_P, own_P.detach().mean()

    def over_ranks() -> Tensor:
        stats = torch.stack([count_PE, total_PE.detach()])
        reduce_stats(stats, kind=kind, groups=groups)
        return stats

    counts_PE, totals_PE = over_ranks() if cache is None else cache.once(over_ranks)
    if real is not None:  # the tokens of a pool are counted: each has k choices
        top_k = expert_ids_SBK.shape[-1]
        square_P = (counts_PE.sum(1) / top_k).square().clamp(min=1.0) * top_k
        size = group_of_pool(groups, kind).size
        own_P = (counts_PE * total_PE).sum(1) * (num_experts * size / square_P)
        values_P = (counts_PE * totals_PE).sum(1) * (num_experts / square_P)
        return own_P, values_P.mean()
    return (counts_PE * total_PE).sum(1) * slope, (counts_PE * totals_PE).sum() * scale


def scales_of_pools(
    *,
    num_pools: int,
    num_tokens: int,
    num_experts: int,
    top_k: int,
    kind: Literal["sequence", "batch"],
    groups: RouterGroups,
    coef: float = 1.0,
) -> tuple[float, float]:
    """Compute the factors between sums over a pool's tokens and `load_balancing_loss`.

    Args:
        num_pools: Pools of this rank.
        num_tokens: Tokens of a pool on this rank.
        num_experts: Experts.
        top_k: Choices per token.
        kind: The pool.
        groups: Groups that hold the other tokens of the pool.
        coef: Coefficient of the loss.

    Returns:
        The factor of the sum over pools and experts of choices times scores, both summed over
        ranks, to the mean loss of the pools; and that of the choices, summed over ranks, times the
        scores of this rank, to a pool's loss with this rank's part of the gradient.
    """
    own_tokens = max(1, num_tokens * groups.sequence_parallel.size)
    pool_tokens = own_tokens * group_of_pool(groups, kind).size
    slope = coef * num_experts / (own_tokens * pool_tokens * top_k)
    scale = coef * num_experts / (pool_tokens * pool_tokens * top_k)
    return scale / max(1, num_pools), slope


def reduce_stats(
    stats: Tensor, *, kind: Literal["sequence", "batch"], groups: RouterGroups
) -> None:
    """Sum the statistics of pools over the ranks that hold their tokens, in place.

    Sync:
        One all-reduce over each group of more than one rank.
    """
    all_reduce_(stats, groups.sequence_parallel)
    all_reduce_(stats, group_of_pool(groups, kind))


def z_loss(
    logits_SBE: Tensor, *, groups: RouterGroups, real: RealTokens | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the mean of ``logsumexp(logits)**2`` over tokens, which keeps logits small.

    Args:
        logits_SBE: ``(S, B, E)``.
        groups: For the share of the mean under sequence parallelism.
        real: Tokens that are not padding; ``None``: all.

    Returns:
        One loss per sequence, ``(B,)``, with this rank's part of the gradient; and the detached
        mean over this rank's tokens. Averaged over ranks and microbatches, the value is that of the
        global batch.

    Source:
        ST-MoE, arXiv:2202.08906, equation 5.
    """
    length, batch, _ = logits_SBE.shape
    squares_SB = torch.logsumexp(logits_SBE, dim=-1).square()
    if real is None:
        mean_B = squares_SB.sum(0) / max(1, length)
    else:  # ranks hold different numbers of such tokens; the mean over ranks is that over tokens
        size = groups.cp.size * groups.sequence_parallel.size
        mean_B = (squares_SB * real.mask_SB).sum(0) * (size / real.lengths_B.clamp(min=1))
    return mean_B / groups.sequence_parallel.size, mean_B.detach().sum() / max(1, batch)


def inject_gradient(x: Tensor, loss: Tensor, factor: float | Tensor) -> Tensor:
    """Return ``x`` and inject the gradient of the mean of ``factor * loss`` into the backward pass.

    A loss of an intermediate pipeline stage contributes to training without being sent to the last
    stage.

    Args:
        x: Any tensor that the training loss depends on.
        loss: A scalar, or several values whose mean is used.
        factor: Multiplier: one number, or one per loss value. A tensor is read in the backward
            pass, not before, so it may be filled in after the forward passes of a step.

    Example:
        >>> x, y = torch.ones(2, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        >>> inject_gradient(x, y * y, 0.5).sum().backward()
        >>> x.grad.tolist(), y.grad.item()
        ([1.0, 1.0], 3.0)
    """
    result: Tensor = _InjectGradient.apply(x, loss, factor)  # type: ignore[no-untyped-call]
    return result


class _InjectGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, factor: float | Tensor) -> Tensor:
        ctx.factor = factor
        ctx.loss = (loss.dtype, loss.device, loss.shape)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        dtype, device, shape = ctx.loss
        if not isinstance(ctx.factor, Tensor):
            # Not as_tensor: it copies a host number to the device, which is a host sync.
            mean = torch.full(shape, ctx.factor, dtype=dtype, device=device)
        else:
            mean = ctx.factor.to(device, dtype).flatten().expand(shape.numel()).view(shape)
        return grad, mean / shape.numel(), None


def _count_choices(expert_ids_SBK: Tensor, pools: int, num_experts: int) -> Tensor:
    """Count the choices of each expert per pool, ``(pools, E)`` int64."""
    per_pool = expert_ids_SBK.numel() // max(1, pools)
    flat = expert_ids_SBK.transpose(0, 1).reshape(pools, per_pool)
    zeros = flat.new_zeros(pools, num_experts)
    return zeros.scatter_add_(1, flat.clamp(min=0), (flat >= 0).long())
