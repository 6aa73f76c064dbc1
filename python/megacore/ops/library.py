"""Registration of operations in torch: schema, one implementation per device, shapes.

Registered operations are visible to ``torch.compile``, autograd and fake tensors. torch chooses the
implementation from the device of the tensors, so a new kernel is one more argument here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

# torch has a process-wide registry of operations; this is the handle on our namespace in it.
_LIBRARY = torch.library.Library("megacore", "DEF")  # type: ignore[no-untyped-call]


class Operation:
    """A registered operation, as a function of its arguments in the order of the schema.

    torch's dispatch of an operation with Python implementations takes longer than many operations
    of a small model. A call that nothing observes goes to the implementation: no compiler,
    profiler or dispatch mode, tensors of no subclass, on the CPU.
    """

    def __init__(self, name: str, cpu: Callable[..., Any]) -> None:
        self.name = f"megacore::{name}"
        self._op: Callable[..., Any] = getattr(torch.ops.megacore, name).default
        self._cpu = cpu
        self._differentiable: Callable[..., Any] | None = None

    def __call__(self, first: torch.Tensor, *others: Any) -> Any:
        """Call the operation; its first argument is a tensor."""
        if not _is_unobserved(first):
            return self._op(first, *others)
        if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
            for x in (first, *others):
                if isinstance(x, torch.Tensor) and x.requires_grad:
                    return (self._differentiable or self._op)(first, *others)
        return self._cpu(first, *others)

    def set_gradient(
        self, backward: Callable[..., Any], setup_context: Callable[..., None]
    ) -> None:
        """Set the derivative, as in `define_gradient`."""
        cpu = self._cpu
        checked = once_differentiable(backward)

        def forward(ctx: Any, *args: Any) -> Any:
            output = cpu(*args)
            setup_context(ctx, args, output)
            return output

        def backward_once(ctx: Any, *grads: Any) -> Any:
            # The check of a second derivative takes longer than small operations.
            return (checked if torch.is_grad_enabled() else backward)(ctx, *grads)

        # Not torch's own setup_context, for which it would inspect the signature in each call.
        parts = {"forward": staticmethod(forward), "backward": staticmethod(backward_once)}
        function: Any = type("Direct", (torch.autograd.Function,), parts)
        # Past Function.apply, whose work for torch.func takes as long as a small operation:
        # `_is_unobserved` rules that out.
        self._differentiable = super(torch.autograd.Function, function).apply  # type: ignore[misc]


def _is_unobserved(first: torch.Tensor) -> bool:
    return (
        not torch.compiler.is_compiling()
        and (type(first) is torch.Tensor or type(first) is torch.nn.Parameter)
        and first.is_cpu
        and torch._C._len_torch_dispatch_stack() == 0
        and not torch._C._autograd._profiler_enabled()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._functorch.is_legacy_batchedtensor(first)
        and torch._C._get_tracing_state() is None
    )


def define_op(
    schema: str,
    *,
    cpu: Callable[..., Any],
    cuda: Callable[..., Any],
    fake: Callable[..., Any],
) -> Operation:
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
    return Operation(name, cpu)


def in_inference() -> bool:
    """Return whether inference mode is on; never while the compiler traces, which cannot ask."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def define_gradient(
    op: Operation, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Register the derivative of an operation made by :func:`define_op`.

    Args:
        op: The operation.
        backward: ``(ctx, *grads)`` to one gradient or ``None`` per argument.
        setup_context: ``(ctx, inputs, output)``; saves the tensors for the backward pass.
    """
    torch.library.register_autograd(op.name, backward, setup_context=setup_context, lib=_LIBRARY)
    op.set_gradient(backward, setup_context)


def describe(tensor: torch.Tensor) -> str:
    """Return shape, dtype and device for messages."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {dtype} on {tensor.device}"
