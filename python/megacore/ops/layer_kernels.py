"""CUDA kernels of norms, rotation and router: the ``cuda=`` implementations of operations.

As in :mod:`megacore.ops.token_kernels`: signatures and results of the references, no host sync,
arguments checked by the caller.

Shapes: as in :mod:`megacore.ops.dense`, :mod:`megacore.ops.rotation` and
:mod:`megacore.ops.routing`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megacore.ops.cuda_module import cuda_kernels
from megacore.ops.token_kernels import dtype_name, launch, pointer

_ALIGNMENT = 16


def takes_norm(x: Tensor, weight: Tensor, *args: Any) -> bool:
    """Return whether the kernel supports a norm of ``x``."""
    del args
    limit: int = cuda_kernels().MAX_NORM_BYTES
    num_bytes = x.shape[-1] * x.element_size()
    return (
        dtype_name(x) is not None
        and weight.dtype == x.dtype
        and weight.shape == x.shape[-1:]
        and 0 < num_bytes <= limit
        and num_bytes % _ALIGNMENT == 0
    )


def takes_add_norm(x: Tensor, added: Tensor, weight: Tensor, *args: Any) -> bool:
    """Return whether the kernel supports a norm of ``x + added``."""
    same = added.dtype == x.dtype and added.shape == x.shape
    return same and takes_norm(x, weight, *args)


def takes_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    of_x: bool,
    of_weight: bool,
    grad_sum: Tensor | None = None,
) -> bool:
    """Return whether the kernel supports the gradients of a norm of ``x``."""
    del scale, of_x, of_weight
    same = grad.dtype == x.dtype and (grad_sum is None or grad_sum.dtype == x.dtype)
    return same and takes_norm(x, weight)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Normalize rows; returns them and the factor of each."""
    return _norm(aligned(x), weight, eps)


def add_rms_norm(
    x: Tensor, added: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Add rows and normalize the sums; returns the sums, the results and the factor of each."""
    x, added = aligned(x), aligned(added)
    total = torch.empty_like(x)
    return total, *_norm(x, weight, eps, added=added.data_ptr(), sum=total.data_ptr())


def _norm(x: Tensor, weight: Tensor, eps: float, **others: int) -> tuple[Tensor, Tensor]:
    weight = aligned(weight)
    y = torch.empty_like(x)
    scale = x.new_empty(*x.shape[:-1], 1, dtype=torch.float32)
    launch(
        "rms_norm",
        x,
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        eps=eps,
        y=y.data_ptr(),
        scale=scale.data_ptr(),
        rows=scale.numel(),
        width=x.shape[-1],
        dtype=dtype_name(x),
        **others,
    )
    return y, scale


def rms_norm_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    of_x: bool,
    of_weight: bool,
    grad_sum: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute the gradients that are asked for; the others are empty."""
    grad, x, weight, scale = aligned(grad), aligned(x), aligned(weight), scale.contiguous()
    grad_sum = None if grad_sum is None else aligned(grad_sum)
    sizes = {"rows": scale.numel(), "width": x.shape[-1], "dtype": dtype_name(x)}
    grad_x = torch.empty_like(x) if of_x else x.new_empty(0)
    grad_weight = weight.new_empty(weight.shape if of_weight else (0,))
    partial_sums = None
    if of_weight:
        num_partial: int = cuda_kernels().norm_partial_rows(**sizes)
        partial_sums = scale.new_empty(num_partial, x.shape[-1])
    launch(
        "rms_norm_backward",
        x,
        grad_y=grad.data_ptr(),
        x=x.data_ptr(),
        weight=weight.data_ptr(),
        scale=scale.data_ptr(),
        grad_x=pointer(grad_x if of_x else None),
        grad_weight=pointer(grad_weight if of_weight else None),
        partial_sums=pointer(partial_sums),
        grad_sum=pointer(grad_sum),
        **sizes,
    )
    return grad_x, grad_weight


def rotates(x: Tensor, head_dim: int) -> bool:
    """Return whether the kernel rotates heads of this dtype and dimension."""
    return dtype_name(x) is not None and head_dim % 2 == 0


def split_and_rotate(
    qkv: Tensor, q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, *, backward: bool
) -> None:
    """Write ``q``, ``k`` and ``v`` from ``qkv``, or backwards ``qkv`` from the others."""
    cos, sin = cos.contiguous(), sin.contiguous()
    launch(
        "split_and_rotate",
        qkv,
        qkv=qkv.data_ptr(),
        q=q.data_ptr(),
        k=k.data_ptr(),
        v=v.data_ptr(),
        cos=cos.data_ptr(),
        sin=sin.data_ptr(),
        **head_sizes(q, k, cos),
        backward=backward,
        dtype=dtype_name(qkv),
    )


def head_sizes(q: Tensor, k: Tensor, cos: Tensor) -> dict[str, Any]:
    """Return the sizes of heads ``(S, B, G * Q, D)`` and ``(S, B, G, D)`` as kernels name them."""
    sequence, batch, groups, head_dim = k.shape
    return {
        "num_tokens": sequence * batch,
        "batch": batch,
        "num_groups": groups,
        "q_per_kv": q.shape[2] // groups,
        "head_dim": head_dim,
        "num_rotated": 2 * cos.shape[-1],
        "position_per_sample": cos.dim() == 3,
    }


def takes_normed_rotation(qkv: Tensor, cos: Tensor, head_dim: int) -> bool:
    """Return whether the kernel normalizes and rotates heads of this dtype and these sizes."""
    size = qkv.element_size()
    num_bytes, limit = head_dim * size, cuda_kernels().MAX_NORMED_HEAD_BYTES
    rotated: int = 2 * cos.shape[-1] * size
    return (
        dtype_name(qkv) is not None
        and num_bytes <= limit
        and num_bytes % (2 * _ALIGNMENT) == 0
        and rotated % (2 * _ALIGNMENT) == 0
    )


def norm_and_rotate(qkv: Tensor, arguments: dict[str, Any]) -> None:
    """Run the kernel with these addresses and sizes."""
    partial_sums = None
    if arguments["grad_q_weight"]:
        heads = qkv.shape[3] // arguments["head_dim"]
        num_partial: int = cuda_kernels().norm_rotate_partial_rows(
            num_heads=arguments["num_tokens"] * arguments["num_groups"] * heads
        )
        partial_sums = qkv.new_empty(num_partial, 2 * arguments["head_dim"], dtype=torch.float32)
    launch(
        "norm_and_rotate",
        qkv,
        **arguments,
        partial_sums=pointer(partial_sums),
        dtype=dtype_name(qkv),
    )


def takes_route(num_experts: int, top_k: int, num_pools: int) -> bool:
    """Return whether the kernel supports a router of these sizes."""
    kernels = cuda_kernels()
    limits: tuple[int, int] = kernels.MAX_ROUTER_EXPERTS, kernels.MAX_ROUTER_CHOICES
    return num_experts <= limits[0] and top_k <= limits[1] and num_pools < 65536


def launch_route(name: str, logits: Tensor, **arguments: Any) -> None:
    """Launch the kernels of a router, with their workspace."""
    numel: int = cuda_kernels().route_workspace_numel(
        **{size: arguments[size] for size in ("num_tokens", "num_experts", "num_pools")}
    )
    workspace = logits.new_empty(numel if arguments["losses"] else 0)
    launch(name, logits, **arguments, workspace=workspace.data_ptr())


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor, contiguous and at an address that kernels can load packs from."""
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
