"""Registration of operations in torch: schema, one implementation per device, shapes.

Registered operations are visible to ``torch.compile``, autograd and fake tensors. torch chooses the
implementation from the device of the tensors, so a new kernel is one more argument here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# torch has a process-wide registry of operations; this is the handle on our namespace in it.
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
        cpu: Implementation for CPU tensors.
        cuda: Implementation for CUDA tensors.
        fake: Returns empty results of the right shapes and dtypes.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, cpu, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, cuda, "CUDA")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"megacore::{name}", fake, lib=_LIBRARY)
    op: Callable[..., Any] = getattr(torch.ops.megacore, name).default

    def call(first: torch.Tensor, *others: Any) -> Any:
        # torch's dispatch takes longer than an operation on the few tokens of a generated text.
        if in_inference() and type(first) is torch.Tensor and first.is_cpu:
            return cpu(first, *others)
        return op(first, *others)

    return call


def in_inference() -> bool:
    """Return whether inference mode is on; never while the compiler traces, which cannot ask."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def define_gradient(
    name: str, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Register the derivative of ``megacore::<name>``.

    Args:
        name: An operation made by :func:`define_op`.
        backward: ``(ctx, *grads)`` to one gradient or ``None`` per argument.
        setup_context: ``(ctx, inputs, output)``; saves the tensors for the backward pass.
    """
    torch.library.register_autograd(
        f"megacore::{name}", backward, setup_context=setup_context, lib=_LIBRARY
    )


def describe(tensor: torch.Tensor) -> str:
    """Return shape, dtype and device for messages."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {dtype} on {tensor.device}"
