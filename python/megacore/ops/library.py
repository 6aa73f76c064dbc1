"""How an operation becomes known to torch: schema, one implementation per device, shapes.

Registered this way an operation is visible to ``torch.compile``, to autograd and to fake tensors.
The implementations are chosen by torch from the device of the tensors: a new kernel is one more
argument here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch keeps operations in a registry of its own; this is the handle on our names in it.
_LIBRARY = torch.library.Library("megacore", "DEF")  # type: ignore[no-untyped-call]


def define_op(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
) -> Callable[..., Any]:
    """Register ``megacore::<name>`` and return the callable operation.

    Args:
        schema: Name, arguments and results in torch's schema language.
        cpu: Computes it for CPU tensors.
        cuda: Computes it for CUDA tensors.
        fake: Returns empty results of the right shapes and dtypes.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, cpu, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, cuda, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"megacore::{name}", fake, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.megacore, name).default
    return op


def define_gradient(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Give ``megacore::<name>`` a derivative.

    Args:
        name: An operation made by :func:`define_op`.
        backward: ``(ctx, *grads)`` to one gradient or ``None`` per argument.
        setup_context: ``(ctx, inputs, output)``; keeps what the backward pass needs.
    """
    torch.library.register_autograd(
        f"megacore::{name}", backward, setup_context=setup_context, lib=_LIBRARY
    )


def describe(tensor: torch.Tensor) -> str:
    """Shape, dtype and device for messages."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {dtype} on {tensor.device}"
