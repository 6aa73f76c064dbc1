"""The optimizer step on flat fp32 tensors, and the sum of squares for gradient clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megacore import _core
from megacore.ops import cuda_kernels, has_cuda_kernels


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """The numbers of one AdamW step.

    Attributes:
        step: Number of this step, counted from 1 (for the bias corrections).
        lr: Learning rate.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay: the parameter is scaled by ``1 - lr * weight_decay`` first.
        grad_scale: Every gradient is multiplied by this first.

    Raises:
        ValueError: If the step or a beta is out of range.
    """

    step: int
    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step is {self.step}; steps are counted from 1")
        for name in ("beta1", "beta2"):
            if not 0.0 <= getattr(self, name) < 1.0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must lie in [0, 1)")

    @property
    def bias_correction1(self) -> float:
        """``1 - beta1^step``: how much of the first moment's weight is filled."""
        return 1.0 - self.beta1**self.step

    @property
    def bias_correction2(self) -> float:
        """``1 - beta2^step``: how much of the second moment's weight is filled."""
        return 1.0 - self.beta2**self.step


def adamw_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    settings: AdamWSettings,
    *,
    copy_out: Tensor | None = None,
) -> None:
    """Take one AdamW step in place, as ``torch.optim.AdamW`` defines it.

    The bits of the result do not depend on the device, the processor, the number of threads, or on
    how a tensor is cut into several calls.

    Args:
        param: Parameters, ``(n,)``, fp32, contiguous; updated.
        grad: Their gradients, ``(n,)``, fp32, contiguous.
        exp_avg: First moment, ``(n,)``, fp32, contiguous; updated.
        exp_avg_sq: Second moment, ``(n,)``, fp32, contiguous; updated.
        settings: The numbers of the step.
        copy_out: Receives the new parameters rounded to bfloat16, ``(n,)``, contiguous.

    Raises:
        ValueError: If shapes, dtypes, devices or layouts do not fit.

    Sync:
        None on CUDA: the kernel is queued on the current stream.

    Source:
        Loshchilov and Hutter, arXiv:1711.05101.

    Example:
        >>> p, g, m, v = torch.ones(2), torch.tensor([1.0, -1.0]), torch.zeros(2), torch.zeros(2)
        >>> adamw_step_(p, g, m, v, AdamWSettings(step=1, lr=0.5))
        >>> [round(x, 4) for x in p.tolist()]
        [0.5, 1.5]
    """
    kind = param.device.type
    if kind != "cpu" and not (kind == "cuda" and has_cuda_kernels()):
        adamw_step_reference_(param, grad, exp_avg, exp_avg_sq, settings, copy_out=copy_out)
        return
    _check_step(param, grad, exp_avg, exp_avg_sq, copy_out)
    arguments: dict[str, Any] = {
        "param": param.data_ptr(),
        "grad": grad.data_ptr(),
        "exp_avg": exp_avg.data_ptr(),
        "exp_avg_sq": exp_avg_sq.data_ptr(),
        "param_bf16": 0 if copy_out is None else copy_out.data_ptr(),
        "numel": param.numel(),
        **_numbers(settings),
    }
    if kind == "cuda":
        with torch.cuda.device(param.device):
            stream = torch.cuda.current_stream().cuda_stream
            cuda_kernels().adamw_step(**arguments, stream=stream)
    else:
        _core.adamw_step(**arguments, num_threads=torch.get_num_threads())


def adamw_step_reference_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    settings: AdamWSettings,
    *,
    copy_out: Tensor | None = None,
) -> None:
    """Do what :func:`adamw_step_` does, with torch operations: any device, the same bits."""
    _check_step(param, grad, exp_avg, exp_avg_sq, copy_out)
    scaled = grad * settings.grad_scale
    exp_avg.add_((scaled - exp_avg).mul_(1.0 - settings.beta1))
    exp_avg_sq.mul_(settings.beta2).add_((scaled * scaled).mul_(1.0 - settings.beta2))
    # torch.sqrt of fp32 may be off by one bit (it uses MKL where it can); through fp64 it is exact.
    root = exp_avg_sq.double().sqrt_().float()
    root.mul_(1.0 / math.sqrt(settings.bias_correction2)).add_(settings.eps)
    update = (exp_avg / root).mul_(settings.lr / settings.bias_correction1)
    param.mul_(1.0 - settings.lr * settings.weight_decay).sub_(update)
    if copy_out is not None:
        copy_out.copy_(param)


def sum_of_squares(values: Tensor) -> Tensor:
    """Sum the squares of all elements in fp64, in an order that depends on the size only.

    Args:
        values: Any shape, contiguous, fp32 (other floating dtypes are converted first).

    Returns:
        A 0-d fp64 tensor on the same device. It is finite exactly if every element is.

    Raises:
        ValueError: If the tensor is not contiguous.

    Sync:
        None on CUDA.

    Example:
        >>> sum_of_squares(torch.tensor([3.0, 4.0])).item()
        25.0
    """
    if not values.is_contiguous():
        raise ValueError(f"values {_describe(values)} must be contiguous")
    if values.device.type != "cpu":
        return sum_of_squares_reference(values)
    values = values.float()
    total = _core.sum_of_squares(values=values.data_ptr(), numel=values.numel())
    return torch.tensor(total, dtype=torch.float64)


def sum_of_squares_reference(values: Tensor) -> Tensor:
    """Do what :func:`sum_of_squares` does, with torch operations, in torch's order."""
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()


def _numbers(settings: AdamWSettings) -> dict[str, float]:
    return {
        "lr": settings.lr,
        "beta1": settings.beta1,
        "beta2": settings.beta2,
        "eps": settings.eps,
        "weight_decay": settings.weight_decay,
        "bias_correction1": settings.bias_correction1,
        "bias_correction2": settings.bias_correction2,
        "grad_scale": settings.grad_scale,
    }


def _check_step(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, copy_out: Tensor | None
) -> None:
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, param, torch.float32)
    if copy_out is not None:
        _check_tensor("copy_out", copy_out, param, torch.bfloat16)


def _check_tensor(name: str, tensor: Tensor, param: Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype != dtype:
        wanted = str(dtype).removeprefix("torch.")
        raise ValueError(f"{name} {_describe(tensor)} must be {wanted}")
    if tensor.dim() != 1 or tensor.shape != param.shape or tensor.device != param.device:
        raise ValueError(
            f"{name} {_describe(tensor)} must be flat and of the size and device of param "
            f"{_describe(param)}"
        )
    if not tensor.is_contiguous():
        raise ValueError(f"{name} {_describe(tensor)} must be contiguous")


def _describe(tensor: Tensor) -> str:
    dtype = str(tensor.dtype).removeprefix("torch.")
    return f"{tuple(tensor.shape)} {dtype} on {tensor.device}"
