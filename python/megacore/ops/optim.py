"""The optimizer step on flat fp32 tensors, and the sum of squares for gradient clipping."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from megacore.ops.register import DTYPES, define_compiled


@dataclass(frozen=True, kw_only=True)
class AdamWSettings:
    """Hyperparameters of one AdamW step.

    Attributes:
        step: Number of this step, counted from 1 (for the bias corrections).
        lr: Learning rate.
        beta1: Decay of the first moment, in [0, 1).
        beta2: Decay of the second moment, in [0, 1).
        eps: Added to the root of the second moment.
        weight_decay: Decoupled decay: the parameter is scaled by ``1 - lr * weight_decay`` first.
        grad_scale: Factor on every gradient, applied first.

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
                raise ValueError(f"{name} must be in [0, 1), got {getattr(self, name)}")

    @property
    def bias_correction1(self) -> float:
        """Bias correction of the first moment, ``1 - beta1^step``."""
        return 1.0 - self.beta1**self.step

    @property
    def bias_correction2(self) -> float:
        """Bias correction of the second moment, ``1 - beta2^step``."""
        return 1.0 - self.beta2**self.step

    @property
    def numbers(self) -> tuple[float, ...]:
        """The numbers of an element's update, bias corrections in the place of the step."""
        rates = self.lr, self.beta1, self.beta2, self.eps, self.weight_decay
        return *rates, self.bias_correction1, self.bias_correction2, self.grad_scale


def adamw_step_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    settings: AdamWSettings,
    *,
    copy_out: Tensor | None = None,
    control: Tensor | None = None,
) -> None:
    """Take one AdamW step in place, as ``torch.optim.AdamW`` defines it.

    The result is bitwise independent of the device, the CPU, the number of threads, and of any
    split of a tensor into several calls.

    Args:
        param: Parameters, ``(n,)``, fp32, contiguous; updated.
        grad: Their gradients, ``(n,)``, fp32, contiguous.
        exp_avg: First moment, ``(n,)``, fp32, contiguous; updated.
        exp_avg_sq: Second moment, ``(n,)``, fp32, contiguous; updated.
        settings: Hyperparameters of the step.
        copy_out: Receives the new parameters as ``Tensor.to`` rounds them, ``(n,)``, bfloat16 or
            float16, contiguous.
        control: Decision of :func:`decide_step_`, on the device of ``param``: replaces the step
            and ``grad_scale`` of ``settings``, and can skip the step; see :class:`ControlAt`. The
            learning rate is then its own times that of ``settings``.

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
    _adamw_step_(param, grad, exp_avg, exp_avg_sq, copy_out, control, *settings.numbers)
    written = param, exp_avg, exp_avg_sq
    increment_version(written if copy_out is None else (*written, copy_out))


def adamw_step_reference_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    settings: AdamWSettings,
    *,
    copy_out: Tensor | None = None,
    control: Tensor | None = None,
) -> None:
    """Compute :func:`adamw_step_` with torch operations on any device, bitwise equal."""
    tensors = param, grad, exp_avg, exp_avg_sq, copy_out, control
    _step_reference(*tensors, *settings.numbers)


def _step_reference(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    copy_out: Tensor | None,
    control: Tensor | None,
    base_lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    bias1: float,
    bias2: float,
    grad_scale: float,
) -> None:
    _check_step(param, grad, exp_avg, exp_avg_sq, copy_out)
    _check_numbers("control", control, _NUM_DECIDED, param)
    if control is None:
        numbers = [grad_scale, bias1, bias2, 1.0, 0.0, 1.0]
        control = torch.tensor(numbers, dtype=torch.float64).to(param.device)
    lr = control[ControlAt.LR] * base_lr
    is_applied = control[ControlAt.IS_APPLIED] != 0.0
    scaled = grad * control[ControlAt.GRAD_SCALE].float()
    next_avg = exp_avg + (scaled - exp_avg).mul_(1.0 - beta1)
    next_avg_sq = exp_avg_sq * beta2
    next_avg_sq.add_((scaled * scaled).mul_(1.0 - beta2))
    # torch.sqrt of fp32 may be off by one bit (with MKL); a square root in fp64 is exact.
    root = next_avg_sq.double().sqrt_().float()
    root.mul_((1.0 / control[ControlAt.BIAS_CORRECTION2].sqrt()).float()).add_(eps)
    update = (next_avg / root).mul_((lr / control[ControlAt.BIAS_CORRECTION1]).float())
    next_param = (param * (1.0 - lr * weight_decay).float()).sub_(update)
    exp_avg.copy_(torch.where(is_applied, next_avg, exp_avg))
    exp_avg_sq.copy_(torch.where(is_applied, next_avg_sq, exp_avg_sq))
    param.copy_(torch.where(is_applied, next_param, param))
    if copy_out is not None:
        copy_out.copy_(torch.where(is_applied, param.to(copy_out.dtype), copy_out))


@dataclass(frozen=True, kw_only=True)
class StepRules:
    """Rules of :func:`decide_step_`; the same in every step.

    Attributes:
        beta1: For the bias corrections.
        beta2: For the bias corrections.
        clip_grad: Largest gradient norm; 0 turns clipping off.
        loss_scale_interval: Steps without overflow after which the loss scale doubles; 0: constant.
        num_averaged: Number of ranks that averaged the gradients, if these are sums over tokens.
            They are multiplied by this number and divided by the tokens. 0: gradients are means.
    """

    beta1: float
    beta2: float
    clip_grad: float = 0.0
    loss_scale_interval: int = 0
    num_averaged: int = 0

    @property
    def numbers(self) -> tuple[float, ...]:
        """The rules in the order of the attributes."""
        rules = self.beta1, self.beta2, self.clip_grad
        return *rules, self.loss_scale_interval, self.num_averaged


class StateAt(IntEnum):
    """Positions in the state of :func:`decide_step_`; the names are those in checkpoints.

    The loss scale is a power of two, of which gradients are multiples; good steps are those since
    it changed.
    """

    STEP_COUNT = 0
    NUM_SKIPPED = 1
    LOSS_SCALE = 2
    LOSS_SCALE_GOOD_STEPS = 3


class SumsAt(IntEnum):
    """Positions in the sums over all ranks; further ones follow.

    The squared norm of the gradients, ranks with a non-finite gradient, and tokens.
    """

    SQUARED_NORM = 0
    NUM_NON_FINITE = 1
    NUM_TOKENS = 2


class ControlAt(IntEnum):
    """Positions in the control of :func:`adamw_step_`, the decision on one step.

    ``IS_APPLIED`` is 1 or 0. The norm of the gradients is that before clipping, and NaN in a
    skipped step. The caller sets ``LR`` and ``STEP_COUNT``, which kernels do not need.
    """

    GRAD_SCALE = 0
    BIAS_CORRECTION1 = 1
    BIAS_CORRECTION2 = 2
    IS_APPLIED = 3
    GRAD_NORM = 4
    LR = 5
    STEP_COUNT = 6


# Numbers of a control that the kernels need.
_NUM_DECIDED = ControlAt.LR + 1


def decide_step_(state: Tensor, sums: Tensor, control: Tensor, rules: StepRules) -> None:
    """Decide an optimizer step on the device; all tensors are fp64.

    If any gradient is not finite, the step is skipped: the step count is unchanged, and the loss
    scale is halved. Otherwise the step count is incremented, the loss scale doubles after
    ``loss_scale_interval`` such steps (up to 2^24), and gradients are clipped.

    Args:
        state: ``(4,)``, see :class:`StateAt`; updated.
        sums: At least three numbers, see :class:`SumsAt`.
        control: At least six numbers, see :class:`ControlAt`; filled, except for the learning rate
            and what follows, which the caller sets.
        rules: Rules of the decision.

    Raises:
        ValueError: If a tensor does not fit.

    Sync:
        None on CUDA.

    Example:
        >>> state = torch.tensor([0.0, 0.0, 2.0, 0.0], dtype=torch.float64)
        >>> sums = torch.tensor([100.0, 0.0, 0.0], dtype=torch.float64)
        >>> control = torch.full((6,), 0.1, dtype=torch.float64)
        >>> decide_step_(state, sums, control, StepRules(beta1=0.5, beta2=0.75))
        >>> control.tolist(), state.tolist()
        ([0.5, 0.5, 0.25, 1.0, 5.0, 0.1], [1.0, 0.0, 2.0, 0.0])
    """
    _decide_step_(state, sums, control, *rules.numbers)
    increment_version((state, control))


def decide_step_reference_(state: Tensor, sums: Tensor, control: Tensor, rules: StepRules) -> None:
    """Compute :func:`decide_step_` with torch operations on any device.

    Powers, and thus bias corrections, may differ in the last bit of fp64.
    """
    _decide_reference(state, sums, control, *rules.numbers)


def _decide_reference(
    state: Tensor,
    sums: Tensor,
    control: Tensor,
    beta1: float,
    beta2: float,
    clip_grad: float,
    loss_scale_interval: float,
    num_averaged: float,
) -> None:
    _check_decision(state, sums, control)
    is_good = sums[SumsAt.NUM_NON_FINITE] == 0.0
    loss_scale = state[StateAt.LOSS_SCALE]
    scale = 1.0 / loss_scale
    if num_averaged > 0:
        scale = scale * (num_averaged / sums[SumsAt.NUM_TOKENS].clamp(min=1.0))
    state[StateAt.STEP_COUNT] += is_good
    state[StateAt.NUM_SKIPPED] += ~is_good
    if loss_scale_interval > 0:
        good_steps = torch.where(is_good, state[StateAt.LOSS_SCALE_GOOD_STEPS] + 1.0, 0.0)
        grows = good_steps >= loss_scale_interval
        grown = torch.where(grows, (loss_scale * 2.0).clamp(max=2.0**24), loss_scale)
        reduced = (loss_scale / 2.0).clamp(min=1.0)
        state[StateAt.LOSS_SCALE] = torch.where(is_good, grown, reduced)
        state[StateAt.LOSS_SCALE_GOOD_STEPS] = torch.where(grows, 0.0, good_steps)
    norm = sums[SumsAt.SQUARED_NORM].sqrt() * scale
    clip = torch.ones_like(norm)
    if clip_grad > 0.0:
        clip = (clip_grad / (norm + 1e-6)).clamp(max=1.0)
    step_count = state[StateAt.STEP_COUNT]
    control[ControlAt.GRAD_SCALE] = clip * scale
    control[ControlAt.BIAS_CORRECTION1] = 1.0 - beta1**step_count
    control[ControlAt.BIAS_CORRECTION2] = 1.0 - beta2**step_count
    control[ControlAt.IS_APPLIED] = is_good
    control[ControlAt.GRAD_NORM] = torch.where(is_good, norm, math.nan)


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
    result: Tensor = _sum_of_squares(values)
    return result


def sum_of_squares_reference(values: Tensor) -> Tensor:
    """Compute :func:`sum_of_squares` with torch operations, in torch's order."""
    norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
    return norm.square()


def _check_step(
    param: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, copy_out: Tensor | None
) -> None:
    tensors = {"param": param, "grad": grad, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    for name, tensor in tensors.items():
        _check_tensor(name, tensor, param, torch.float32)
    if copy_out is not None:
        _check_tensor("copy_out", copy_out, param, torch.bfloat16, torch.float16)


def _check_decision(state: Tensor, sums: Tensor, control: Tensor) -> None:
    _check_numbers("state", state, len(StateAt), state)
    _check_numbers("sums", sums, len(SumsAt), state)
    _check_numbers("control", control, _NUM_DECIDED, state)


def _check_numbers(name: str, numbers: Tensor | None, size: int, like: Tensor) -> None:
    """Check a vector of fp64 numbers; ``sums`` may be longer than ``size``."""
    if numbers is None:
        return
    fits = numbers.dim() == 1 and numbers.numel() >= size and numbers.device == like.device
    if numbers.dtype != torch.float64 or not fits or not numbers.is_contiguous():
        raise ValueError(
            f"{name} {_describe(numbers)} must be a flat float64 tensor of {size} numbers on "
            f"{like.device}"
        )


def _check_tensor(name: str, tensor: Tensor, param: Tensor, *dtypes: torch.dtype) -> None:
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
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


def _nothing(*args: Any) -> None:
    del args


def _sum_fake(values: Tensor) -> Tensor:
    return values.new_empty((), dtype=torch.float64)


_adamw_step_ = define_compiled(
    "adamw_step_(Tensor(a!) param, Tensor grad, Tensor(b!) exp_avg, Tensor(c!) exp_avg_sq,"
    " Tensor(d!)? copy_out, Tensor? control, float lr, float beta1, float beta2, float eps,"
    " float weight_decay, float bias_correction1, float bias_correction2, float grad_scale) -> ()",
    reference=_step_reference,
    dtypes=(torch.float32,),
    fake=_nothing,
)
_decide_step_ = define_compiled(
    "decide_step_(Tensor(a!) state, Tensor sums, Tensor(b!) control, float beta1, float beta2,"
    " float clip_grad, float loss_scale_interval, float num_averaged) -> ()",
    reference=_decide_reference,
    dtypes=(torch.float64,),
    fake=_nothing,
)
_sum_of_squares = define_compiled(
    "sum_of_squares(Tensor values) -> Tensor",
    reference=sum_of_squares_reference,
    dtypes=(*DTYPES, torch.float64),
    cuda_fits=lambda values: values.dtype in DTYPES,
    fake=_sum_fake,
)
