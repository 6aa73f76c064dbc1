"""A router from its logits to the weights of the chosen experts and its losses, as one operation.

Native for float32 on CPUs and GPUs; elsewhere the torch operations of the reference.

Shapes: T tokens, E experts, k choices per token, P pools of tokens for the load-balancing loss;
token t is in pool ``t mod P``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version

from megacore.ops.cuda_module import cuda_kernels, runs_kernels
from megacore.ops.register import define_compiled
from megacore.ops.topk import top_k

Kernel = Callable[..., None]

_DTYPES = (torch.float32,)
# As in DeepSeek-V3; far below any sum of softmax scores.
TINY = 1e-20


@dataclass(kw_only=True, eq=False)
class RouterLosses:
    """Losses of a router, and where the backward pass starts from.

    The load-balancing loss is the sum of choices times scores over pools and experts, and the
    z-loss the sum of ``logsumexp(logits)**2`` over tokens, each times a scale. Their gradients are
    injected into that of the weights.

    Attributes:
        aux_scale: Scale of the load-balancing loss.
        z_scale: Scale of the z-loss.
        aux_slope: As ``aux_scale``, for the gradient of a pool: the mean over pools is injected.
        z_slope: As ``z_scale``, for the gradient.
        aux_factor: Factor on the gradient of the load-balancing loss: one number, or a tensor with
            one or P. A tensor is read in the backward pass.
        z_factor: The same for the z-loss: one number, or n; token t has that of ``t mod n``.
        counts: Choices of each expert in the gradient of the load-balancing loss, ``(P, E)``
            float32. :func:`route` sets those of this rank; where a pool spans ranks, the caller
            replaces them by the sums before the backward pass.
    """

    aux_scale: float = 0.0
    z_scale: float = 0.0
    aux_slope: float = 0.0
    z_slope: float = 0.0
    aux_factor: float | Tensor = 1.0
    z_factor: float | Tensor = 1.0
    counts: Tensor | None = None


class Routed(NamedTuple):
    """Results of a router.

    Attributes:
        probs: Weights, ``(T, k)``.
        ids: Choices, ``(T, k)`` int64, best first.
        stats: Choices of each expert, and sums of scores, normalized to a sum of 1 for each token,
            ``(2, P, E)``; without losses ``(0, P, E)``.
        losses: Load-balancing loss and z-loss of this rank's tokens, ``(2,)``, without gradient;
            without losses ``(0,)``.
    """

    probs: Tensor
    ids: Tensor
    stats: Tensor
    losses: Tensor


def route(
    logits: Tensor,
    bias: Tensor | None = None,
    chosen: Tensor | None = None,
    *,
    top_k: int,
    num_pools: int,
    is_sigmoid: bool,
    softmax_after_top_k: bool,
    normalize: bool,
    scaling: float,
    losses: RouterLosses | None = None,
    seen: Tensor | None = None,
) -> Routed:
    """Score the experts, choose the best, weigh them and compute the losses.

    Args:
        logits: ``(T, E)``, float32.
        bias: ``(E,)``, added to the scores for the choice only.
        chosen: Choices of an earlier call, ``(T, k)`` int64, in place of the best.
        top_k: k.
        num_pools: P, which divides T.
        is_sigmoid: Scores are the sigmoid of the logits; else their softmax.
        softmax_after_top_k: Weights are the softmax of the chosen logits, which also rank experts.
        normalize: Divide weights by their sum.
        scaling: Factor on the weights.
        losses: Losses to compute; ``None`` for none.
        seen: ``(E,)`` int64, changed: the choices of each expert are added.

    Example:
        >>> probs, ids, stats, losses = route(
        ...     torch.tensor([[0.0, 9.0], [9.0, 0.0]]), top_k=1, num_pools=1, is_sigmoid=False,
        ...     softmax_after_top_k=False, normalize=True, scaling=1.0,
        ...     losses=RouterLosses(aux_scale=0.5))
        >>> ids.tolist(), probs.tolist(), stats.tolist(), losses.tolist()
        ([[1], [0]], [[1.0], [1.0]], [[[1.0, 1.0]], [[1.0, 1.0]]], [1.0, 0.0])
    """
    rule = num_pools, is_sigmoid, softmax_after_top_k, normalize, scaling
    if torch.is_grad_enabled() and logits.requires_grad:
        results = _Route.apply(logits, bias, chosen, seen, top_k, rule, losses)  # type: ignore[no-untyped-call]
    else:
        results = _forward(logits, bias, chosen, seen, top_k, rule, losses)
    return Routed(*results)


def route_reference(
    logits: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    seen: Tensor | None,
    k: int,
    num_pools: int,
    is_sigmoid: bool,
    after: bool,
    normalize: bool,
    scaling: float,
    has_sums: bool,
    aux_scale: float,
    z_scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Compute :func:`route` with torch operations and their autograd, on any device."""
    scores = logits.sigmoid() if is_sigmoid else logits.softmax(-1)
    ranked = (logits if after else scores).detach()
    ids = top_k(ranked if bias is None else ranked + bias, k) if chosen is None else chosen.clone()
    if after:
        probs = logits.gather(1, ids).softmax(-1)
    else:
        probs = scores.gather(1, ids)
        probs = probs / (probs.sum(-1, keepdim=True) + TINY) if normalize else probs
    num_experts = logits.shape[1]
    if not has_sums:
        none = logits.new_empty(0, num_pools, num_experts)
        return probs * scaling, ids, none, logits.new_empty(0)
    share = scores / (scores.sum(-1, keepdim=True) + TINY) if is_sigmoid else scores
    totals = share.view(-1, num_pools, num_experts).sum(0)
    flat = ids.view(-1, num_pools, k).transpose(0, 1).reshape(num_pools, -1)
    counts = torch.zeros_like(totals).scatter_add(1, flat, torch.ones_like(flat, dtype=probs.dtype))
    if seen is not None:
        seen += counts.sum(0).long()
    squares = torch.logsumexp(logits, dim=-1).square().sum()
    losses = torch.stack(((counts * totals).sum() * aux_scale, squares * z_scale))
    return probs * scaling, ids, torch.stack((counts, totals)), losses


def _backward_reference(
    grad_probs: Tensor,
    logits: Tensor,
    ids: Tensor,
    counts: Tensor | None,
    aux_factor: Tensor | None,
    z_factor: Tensor | None,
    num_pools: int,
    *rest: Any,
) -> Tensor:
    *rule, aux_scale, z_scale = rest
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        rule = [None, ids, None, ids.shape[1], num_pools, *rule, True, 0.0, 0.0]
        probs, _, (_, totals), _ = route_reference(leaf, *rule)
        total = (probs * grad_probs).sum()
        if counts is not None and aux_factor is not None:
            total = total + (counts * totals).sum(1).mul(aux_factor).mean() * aux_scale
        if z_factor is not None:
            squares = torch.logsumexp(leaf, dim=-1).square().view(-1, z_factor.numel())
            total = total + (squares * z_factor).sum() * z_scale
        (grad,) = torch.autograd.grad(total, leaf)
    return grad


def has_kernel(logits: Tensor, top_k: int, num_pools: int) -> bool:
    """Return whether one operation routes these logits, on their device."""
    if logits.dtype != torch.float32:
        return False
    if not logits.is_cuda:
        return logits.is_cpu
    return runs_kernels(logits.device) and _sizes_fit(logits.shape[1], top_k, num_pools)


def _sizes_fit(num_experts: int, top_k: int, num_pools: int) -> bool:
    """Return whether the GPU's kernels support a router of these sizes."""
    kernels = cuda_kernels()
    limits: tuple[int, int] = kernels.MAX_ROUTER_EXPERTS, kernels.MAX_ROUTER_CHOICES
    return num_experts <= limits[0] and top_k <= limits[1] and num_pools < 65536


def _route_fits(logits: Tensor, bias: Any, chosen: Any, seen: Any, *rule: Any) -> bool:
    del bias, chosen, seen
    return _sizes_fit(logits.shape[1], *rule[:2])


def _backward_fits(grad_probs: Tensor, logits: Tensor, ids: Tensor, *args: Any) -> bool:
    del grad_probs
    return _sizes_fit(logits.shape[1], ids.shape[1], args[3])


def _route_fake(
    logits: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    seen: Tensor | None,
    k: int,
    num_pools: int,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del bias, chosen, seen
    has_sums = rest[-3]
    num_tokens, num_experts = logits.shape
    stats = logits.new_empty(2 if has_sums else 0, num_pools, num_experts)
    ids = logits.new_empty(num_tokens, k, dtype=torch.int64)
    return logits.new_empty(num_tokens, k), ids, stats, logits.new_empty(2 if has_sums else 0)


def _backward_fake(grad_probs: Tensor, logits: Tensor, *args: Any) -> Tensor:
    del grad_probs, args
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_RULE = "SymInt num_pools, bool is_sigmoid, bool softmax_after_top_k, bool normalize, float scaling"
_route = define_compiled(
    "route(Tensor logits, Tensor? bias, Tensor? chosen, Tensor(a!)? seen, SymInt k, "
    f"{_RULE}, bool has_sums, float aux_scale, float z_scale) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=route_reference,
    cuda_fits=_route_fits,
    dtypes=_DTYPES,
    fake=_route_fake,
)
_route_backward = define_compiled(
    "route_backward(Tensor grad_probs, Tensor logits, Tensor ids, Tensor? counts, "
    f"Tensor? aux_factor, Tensor? z_factor, {_RULE}, float aux_scale, float z_scale) -> Tensor",
    reference=_backward_reference,
    fits=lambda grad_probs, logits, *_: logits.dtype == grad_probs.dtype,
    cuda_fits=_backward_fits,
    dtypes=_DTYPES,
    fake=_backward_fake,
)


def _forward(
    logits: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    seen: Tensor | None,
    k: int,
    rule: tuple[Any, ...],
    losses: RouterLosses | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    scales = (0.0, 0.0) if losses is None else (losses.aux_scale, losses.z_scale)
    has_sums = losses is not None or seen is not None
    results: tuple[Tensor, Tensor, Tensor, Tensor] = _route(
        logits, bias, chosen, seen, k, *rule, has_sums, *scales
    )
    if seen is not None:
        increment_version(seen)
    if losses is not None:
        losses.counts = results[2][0]
    return results


class _Route(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        results = _forward(logits, *args)
        ctx.mark_non_differentiable(*results[1:])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(logits, results[1])
        ctx.rule, ctx.losses = args[-2:]
        return results

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_probs: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
        logits, ids = ctx.saved_tensors
        if grad_probs is None:
            return (None,) * 7
        losses = RouterLosses() if ctx.losses is None else ctx.losses
        aux_factor = z_factor = None
        if losses.aux_slope != 0.0:
            aux_factor = _factors(losses.aux_factor, logits)
        if losses.z_slope != 0.0:
            is_same = aux_factor is not None and losses.z_factor is losses.aux_factor
            z_factor = aux_factor if is_same else _factors(losses.z_factor, logits)
        grad = _route_backward(
            grad_probs,
            logits,
            ids,
            None if aux_factor is None else losses.counts,
            aux_factor,
            z_factor,
            *ctx.rule,
            losses.aux_slope,
            losses.z_slope,
        )
        return grad, *(None,) * 6


def _factors(factor: float | Tensor, like: Tensor) -> Tensor:
    if isinstance(factor, Tensor):
        return factor.to(like.device, like.dtype).contiguous()
    # Not as_tensor: it copies a host number to the device, which is a host sync.
    return torch.full((), factor, dtype=like.dtype, device=like.device)
