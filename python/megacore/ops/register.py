"""Registration of operations in torch: schema, one implementation per device, shapes.

Registered operations are visible to ``torch.compile``, autograd and fake tensors. torch chooses the
implementation from the device of the tensors. :func:`define_compiled` chooses there between a
kernel, which is ``megacore::_<name>`` of ``_ops`` or ``_cuda``, and a reference in torch, which
also computes what `megacore.ops.kernel_choice` leaves to it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megacore import _ops  # noqa: F401  registers its operations
from megacore.ops.cuda_module import runs_kernels
from megacore.ops.kernel_choice import is_left

# torch has a process-wide registry of operations; this is the handle on our namespace in it.
_LIBRARY = torch.library.Library("megacore", "DEF")  # type: ignore[no-untyped-call]
# dtypes of kernels by their name there, on GPUs and on CPUs; others use torch operations.
DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}
CPU_DTYPES = (torch.float32, torch.bfloat16)
# Address and size that GPU kernels need for loads of several elements, in bytes.
ALIGNMENT = 16


class Operation:
    """A registered operation, as a function of its arguments in the order of the schema.

    torch's dispatch of an operation with Python implementations takes longer than many operations
    of a small model. A call that nothing observes goes to the implementation: no compiler,
    profiler or dispatch mode, and tensors of no subclass.
    """

    def __init__(self, name: str, cpu: Callable[..., Any], cuda: Callable[..., Any]) -> None:
        self.name = f"megacore::{name}"
        self._op: Callable[..., Any] = getattr(torch.ops.megacore, name).default
        self._cpu = cpu
        self._cuda = cuda
        self._differentiable: Callable[..., Any] | None = None
        self._passes_autograd = False

    def __call__(self, first: torch.Tensor, *others: Any) -> Any:
        """Call the operation; its first argument is a tensor."""
        if not _is_unobserved(first):
            return self._op(first, *others)
        if (
            not self._passes_autograd
            and _is_grad_enabled()
            and (first.requires_grad or _require_grad(others))
            and not torch.is_inference_mode_enabled()
        ):
            return (self._differentiable or self._op)(first, *others)
        return (self._cpu if first.is_cpu else self._cuda)(first, *others)

    def pass_autograd(self) -> None:
        """Let calls pass autograd, which would else add a hook to each result."""
        self._passes_autograd = True
        _let_pass(self.name)

    def set_gradient(
        self, backward: Callable[..., Any], setup_context: Callable[..., None]
    ) -> None:
        """Set the derivative, as in `define_gradient`."""
        cpu, cuda = self._cpu, self._cuda
        checked = once_differentiable(backward)

        def forward(ctx: Any, *args: Any) -> Any:
            output = (cpu if args[0].is_cpu else cuda)(*args)
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


# Bound once, as the checks below are made in each call.
_is_compiling = torch.compiler.is_compiling
_num_dispatch_modes = torch._C._len_torch_dispatch_stack
_is_profiled = torch._C._autograd._profiler_enabled
_is_transformed = torch._C._are_functorch_transforms_active
_is_batched = torch._C._functorch.is_legacy_batchedtensor
_tracing_state = torch._C._get_tracing_state
_is_grad_enabled = torch.is_grad_enabled
_PLAIN = (torch.Tensor, torch.nn.Parameter)
_OTHERS = (type(None), bool, int, float)


def _is_unobserved(first: torch.Tensor) -> bool:
    return (
        not _is_compiling()
        and type(first) in _PLAIN
        and (first.is_cpu or first.is_cuda)
        and _num_dispatch_modes() == 0
        and not _is_profiled()
        and not _is_transformed()
        and not _is_batched(first)
        and _tracing_state() is None
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
    name = _define(schema, fake)
    _LIBRARY.impl(name, cpu, "CPU")  # type: ignore[no-untyped-call]
    _LIBRARY.impl(name, cuda, "CUDA")  # type: ignore[no-untyped-call]
    return Operation(name, cpu, cuda)


def _define(schema: str, fake: Callable[..., Any]) -> str:
    """Register the schema of an operation, and return its name."""
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"megacore::{name}", fake, lib=_LIBRARY)
    return name


def define_compiled(
    schema: str,
    *,
    reference: Callable[..., Any],
    fake: Callable[..., Any],
    fits: Callable[..., bool] | None = None,
    cuda_fits: Callable[..., bool] | None = None,
    dtypes: Collection[torch.dtype] | None = None,
    has_gradient: bool = False,
) -> Operation:
    """Register an operation with kernels in ``_ops`` and ``_cuda``, and return it.

    A kernel is the operation ``megacore::_<name>`` with the same schema; see `compiled`.

    Args:
        schema: Name, arguments and results in torch's schema language.
        reference: The operation with torch operations, where no kernel takes the arguments.
        fake: Returns empty results of the right shapes and dtypes.
        fits: Returns whether the kernels take the arguments. Default: always.
        cuda_fits: Returns whether the GPU's kernel takes arguments that fit. Default: always.
        dtypes: Supported dtypes of the first argument. Default: those of ``DTYPES`` on GPUs and of
            ``CPU_DTYPES`` on CPUs.
        has_gradient: `define_gradient` follows.
    """
    name = schema.split("(", 1)[0]
    kernel = compiled(schema, fake)
    cpu_dtypes = CPU_DTYPES if dtypes is None else dtypes
    cuda_dtypes = DTYPES if dtypes is None else dtypes

    def call_cpu(first: torch.Tensor, *args: Any) -> Any:
        if (
            is_left(name, "cpu")
            or first.dtype not in cpu_dtypes
            or not (fits is None or fits(first, *args))
        ):
            return reference(first, *args)
        return kernel(first, *args)

    def call_cuda(first: torch.Tensor, *args: Any) -> Any:
        if (
            is_left(name, "cuda")
            or not runs_kernels(first.device)
            or first.dtype not in cuda_dtypes
            or not (fits is None or fits(first, *args))
            or not (cuda_fits is None or cuda_fits(first, *args))
        ):
            return reference(first, *args)
        return kernel(first, *args)

    op = define_op(schema, cpu=call_cpu, cuda=call_cuda, fake=fake)
    if not has_gradient:
        op.pass_autograd()
    return op


def compiled(schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register the schema of an operation in C++ by the name ``_<name>`` and return it.

    Its functions are in ``_ops`` and, for GPUs, in ``_cuda``.

    It is called without the checks of torch's Python code, takes positional arguments only, and
    has no derivative.
    """
    name = _define(f"_{schema}", fake)
    _let_pass(f"megacore::{name}")
    kernel: Callable[..., Any] = getattr(torch.ops.megacore, name).default._op
    return kernel


def _let_pass(name: str) -> None:
    fallthrough = torch.library.fallthrough_kernel
    _LIBRARY.impl(name, fallthrough, "Autograd")  # type: ignore[no-untyped-call]


def _require_grad(arguments: tuple[Any, ...]) -> bool:
    for x in arguments:
        # isinstance() of other types takes as long as all checks of a tensor, and any() longer.
        if type(x) not in _OTHERS and isinstance(x, torch.Tensor) and x.requires_grad:
            return True
    return False


def in_inference() -> bool:
    """Return whether inference mode is on; never while the compiler traces, which cannot ask."""
    return not torch.compiler.is_compiling() and torch.is_inference_mode_enabled()


def define_gradient(
    op: Operation, backward: Callable[..., Any], setup_context: Callable[..., None]
) -> None:
    """Register the derivative of an operation of :func:`define_op` or `define_compiled`.

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
