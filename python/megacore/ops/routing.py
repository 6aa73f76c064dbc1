"""A router from its logits to the weights of the chosen experts, as one operation.

Native for float32 on CPUs and GPUs; elsewhere the torch operations of the reference.

Shapes: T tokens, E experts, k choices per token, P pools of tokens for the load-balancing loss;
token t is in pool ``t mod P``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore import _core
from megacore.ops import layer_kernels
from megacore.ops.cuda_module import has_cuda_kernels
from megacore.ops.library import define_gradient, define_op
from megacore.ops.topk import top_k

# As in DeepSeek-V3; far below any sum of softmax scores.
TINY = 1e-20


def route(
    logits: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    *,
    top_k: int,
    num_pools: int,
    is_sigmoid: bool,
    softmax_after_top_k: bool,
    normalize: bool,
    scaling: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Score the experts, choose the best and weigh them.

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

    Returns:
        Weights ``(T, k)``; choices ``(T, k)``, int64, best first; choices of each expert ``(P, E)``
        and sums of scores, normalized to a sum of 1 for each token, ``(P, E)``.

    Example:
        >>> probs, ids, counts, totals = route(
        ...     torch.tensor([[0.0, 9.0], [9.0, 0.0]]), None, None, top_k=1, num_pools=1,
        ...     is_sigmoid=False, softmax_after_top_k=False, normalize=True, scaling=1.0)
        >>> ids.tolist(), probs.tolist(), counts.tolist(), totals.tolist()
        ([[1], [0]], [[1.0], [1.0]], [[1.0, 1.0]], [[1.0, 1.0]])
    """
    rule = top_k, num_pools, is_sigmoid, softmax_after_top_k, normalize, scaling
    result: tuple[Tensor, Tensor, Tensor, Tensor] = _route(logits, bias, chosen, *rule)
    return result


def route_reference(
    logits: Tensor,
    bias: Tensor | None,
    chosen: Tensor | None,
    k: int,
    num_pools: int,
    is_sigmoid: bool,
    after: bool,
    normalize: bool,
    scaling: float,
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
    share = scores / (scores.sum(-1, keepdim=True) + TINY) if is_sigmoid else scores
    num_experts = logits.shape[1]
    totals = share.view(-1, num_pools, num_experts).sum(0)
    flat = ids.view(-1, num_pools, k).transpose(0, 1).reshape(num_pools, -1)
    counts = torch.zeros_like(totals).scatter_add(1, flat, torch.ones_like(flat, dtype=probs.dtype))
    return probs * scaling, ids, counts, totals


def _backward_reference(
    grad_probs: Tensor, grad_totals: Tensor | None, logits: Tensor, ids: Tensor, *rule: Any
) -> Tensor:
    with torch.enable_grad():
        leaf = logits.detach().requires_grad_()
        probs, _, _, totals = route_reference(leaf, None, ids, ids.shape[1], *rule)
        results = (probs,) if grad_totals is None else (probs, totals)
        grads = (grad_probs,) if grad_totals is None else (grad_probs, grad_totals)
        (grad,) = torch.autograd.grad(results, leaf, grads)
    return grad


def _rule(
    logits: Tensor, k: int, num_pools: int, is_sigmoid: bool, after: bool, *rest: Any
) -> dict[str, Any]:
    normalize, scaling = rest
    return {
        "num_tokens": logits.shape[0],
        "num_experts": logits.shape[1],
        "top_k": k,
        "num_pools": num_pools,
        "is_sigmoid": is_sigmoid,
        "softmax_after_top_k": after,
        "normalize": normalize,
        "scaling": scaling,
    }


def _route_cpu(
    logits: Tensor, bias: Tensor | None, chosen: Tensor | None, *rule: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if logits.dtype != torch.float32:
        return route_reference(logits, bias, chosen, *rule)
    logits = logits.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    probs, ids, counts, totals = _route_fake(logits, bias, chosen, *rule)
    if chosen is not None:
        ids.copy_(chosen)
    _core.route(
        logits=logits.data_ptr(),
        bias=0 if bias is None else bias.data_ptr(),
        keeps_ids=chosen is not None,
        probs=probs.data_ptr(),
        ids=ids.data_ptr(),
        counts=counts.data_ptr(),
        totals=totals.data_ptr(),
        num_threads=torch.get_num_threads(),
        **_rule(logits, *rule),
    )
    return probs, ids, counts, totals


def has_kernel(logits: Tensor, top_k: int, num_pools: int) -> bool:
    """Return whether one operation routes these logits, on their device."""
    if logits.dtype != torch.float32:
        return False
    if not logits.is_cuda:
        return logits.is_cpu
    return has_cuda_kernels() and layer_kernels.takes_route(logits.shape[1], top_k, num_pools)


def _route_cuda(
    logits: Tensor, bias: Tensor | None, chosen: Tensor | None, *rule: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if not has_kernel(logits, *rule[:2]):
        return route_reference(logits, bias, chosen, *rule)
    logits = logits.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    results = _route_fake(logits, bias, chosen, *rule)
    if chosen is not None:
        results[1].copy_(chosen)
    layer_kernels.route(logits, bias, chosen is not None, results, _rule(logits, *rule))
    return results


def _backward_cuda(
    grad_probs: Tensor, grad_totals: Tensor | None, logits: Tensor, ids: Tensor, *rule: Any
) -> Tensor:
    if not has_kernel(logits, ids.shape[1], rule[0]):
        return _backward_reference(grad_probs, grad_totals, logits, ids, *rule)
    logits = logits.contiguous()
    grad = torch.empty_like(logits)
    grad_totals = None if grad_totals is None else grad_totals.contiguous()
    grads = grad_probs.contiguous(), grad_totals
    layer_kernels.route_backward(*grads, logits, ids, grad, _rule(logits, ids.shape[1], *rule))
    return grad


def _backward_cpu(
    grad_probs: Tensor, grad_totals: Tensor | None, logits: Tensor, ids: Tensor, *rule: Any
) -> Tensor:
    if logits.dtype != torch.float32:
        return _backward_reference(grad_probs, grad_totals, logits, ids, *rule)
    grad_probs = grad_probs.contiguous()
    grad_totals = None if grad_totals is None else grad_totals.contiguous()
    logits = logits.contiguous()
    grad = torch.empty_like(logits)
    _core.route_backward(
        grad_probs=grad_probs.data_ptr(),
        grad_totals=0 if grad_totals is None else grad_totals.data_ptr(),
        logits=logits.data_ptr(),
        ids=ids.data_ptr(),
        grad_logits=grad.data_ptr(),
        num_threads=torch.get_num_threads(),
        **_rule(logits, ids.shape[1], *rule),
    )
    return grad


def _route_fake(
    logits: Tensor, bias: Tensor | None, chosen: Tensor | None, k: int, num_pools: int, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    del bias, chosen, rest
    num_tokens, num_experts = logits.shape
    counts, totals = (logits.new_empty(num_pools, num_experts) for _ in range(2))
    ids = logits.new_empty(num_tokens, k, dtype=torch.int64)
    return logits.new_empty(num_tokens, k), ids, counts, totals


def _backward_fake(
    grad_probs: Tensor, grad_totals: Tensor | None, logits: Tensor, ids: Tensor, *rule: Any
) -> Tensor:
    del grad_probs, grad_totals, ids, rule
    return torch.empty_like(logits, memory_format=torch.contiguous_format)


_RULE = "SymInt num_pools, bool is_sigmoid, bool softmax_after_top_k, bool normalize, float scaling"
_route = define_op(
    f"route(Tensor logits, Tensor? bias, Tensor? chosen, SymInt k, {_RULE}) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    cpu=_route_cpu,
    cuda=_route_cuda,
    fake=_route_fake,
)
_route_backward = define_op(
    "route_backward(Tensor grad_probs, Tensor? grad_totals, Tensor logits, Tensor ids, "
    f"{_RULE}) -> Tensor",
    cpu=_backward_cpu,
    cuda=_backward_cuda,
    fake=_backward_fake,
)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    logits, _, _, _, *rule = inputs
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(logits, output[1])
    ctx.rule = rule


def _grads(
    ctx: Any, grad_probs: Tensor | None, _ids: Any, _counts: Any, grad_totals: Tensor | None
) -> tuple[Tensor | None, ...]:
    logits, ids = ctx.saved_tensors
    if grad_probs is None:
        grad_probs = logits.new_zeros(ids.shape)
    grad = _route_backward(grad_probs, grad_totals, logits, ids, *ctx.rule)
    return grad, *(None,) * 8


define_gradient(_route, _grads, _setup)
