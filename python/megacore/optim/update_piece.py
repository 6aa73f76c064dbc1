"""Consecutive elements of a shard that an update rule changes together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megacore.ops.optim import ControlAt

# Elements that a step takes at once: copies of a block stay in the cache.
_BLOCK = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Numbers of one step for some elements: 0-d tensors on their device.

    Attributes:
        lr: Learning rate, with the factor of the parameters, fp32.
        keep: ``1 - lr * weight_decay``, the factor of decoupled weight decay, fp32.
        weight_decay: Weight decay.
        bias_correction1: ``1 - beta1^step`` of the rule's decays, fp64.
        bias_correction2: ``1 - beta2^step``, fp64.
    """

    lr: Tensor
    keep: Tensor
    weight_decay: float
    bias_correction1: Tensor
    bias_correction2: Tensor

    @classmethod
    def of(cls, control: Tensor, *, lr_scale: float, weight_decay: float) -> Rates:
        """Take the numbers from the decision on a step."""
        lr = control[ControlAt.LR] * lr_scale
        return cls(
            lr=lr.float(),
            keep=(1.0 - lr * weight_decay).float(),
            weight_decay=weight_decay,
            bias_correction1=control[ControlAt.BIAS_CORRECTION1],
            bias_correction2=control[ControlAt.BIAS_CORRECTION2],
        )


@dataclass(frozen=True, kw_only=True)
class UpdatePiece:
    """Consecutive elements that share their settings.

    Attributes:
        param: Main parameters, ``(n,)``, fp32.
        grad: Reduced gradients, ``(n,)``, fp32 or of 16 bits, before clipping.
        state: State by name, ``(n,)`` or a value for each block, in its number formats.
        copy_out: Receives the rounded parameters, ``(n,)``, of 16 bits; ``None`` if the parameters
            are fp32.
        lr_scale: Factor on the learning rate.
        weight_decay: Weight decay.
    """

    param: Tensor
    grad: Tensor
    state: Mapping[str, Tensor]
    copy_out: Tensor | None
    lr_scale: float
    weight_decay: float

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.param.numel()

    def part(self, start: int, end: int) -> UpdatePiece:
        """Return a range of the elements."""
        return UpdatePiece(
            param=self.param[start:end],
            grad=self.grad[start:end],
            state={name: self._cut(values, start, end) for name, values in self.state.items()},
            copy_out=None if self.copy_out is None else self.copy_out[start:end],
            lr_scale=self.lr_scale,
            weight_decay=self.weight_decay,
        )

    def _cut(self, values: Tensor, start: int, end: int) -> Tensor:
        elements = self.numel // values.numel()
        return values[start // elements : end // elements]

    def blocks(self) -> Iterator[UpdatePiece]:
        """Yield the elements in blocks, in order."""
        for start in range(0, self.numel, _BLOCK):
            yield self.part(start, min(start + _BLOCK, self.numel))

    def rates(self, control: Tensor) -> Rates:
        """Return the numbers of a step."""
        return Rates.of(control, lr_scale=self.lr_scale, weight_decay=self.weight_decay)

    def scaled_grad(self, control: Tensor) -> Tensor:
        """Return averaged and clipped gradients: a new tensor, fp32."""
        return self.grad.float() * control[ControlAt.GRAD_SCALE].float()

    def apply(
        self, step: Callable[[Tensor, Tensor, Mapping[str, Tensor], Rates], None], control: Tensor
    ) -> None:
        """Call :meth:`UpdateRule.step` on blocks, and keep its results unless it is skipped.

        Sync:
            None: old values are selected where the step is skipped, so a CUDA graph can record it.
        """
        rates = self.rates(control)
        for block in self.blocks():
            block._apply_at_once(step, control, rates)

    def _apply_at_once(
        self,
        step: Callable[[Tensor, Tensor, Mapping[str, Tensor], Rates], None],
        control: Tensor,
        rates: Rates,
    ) -> None:
        before = {"": self.param, **self.state}
        after = {name: values.to(torch.float32, copy=True) for name, values in before.items()}
        state = {name: after[name] for name in self.state}
        step(after[""], self.scaled_grad(control), state, rates)
        for name, old in before.items():
            self.keep(old, after[name], control)
        self.write_copy()

    def direction(
        self,
        direction: Callable[[Tensor, Mapping[str, Tensor]], Tensor],
        control: Tensor,
        out: Tensor,
    ) -> None:
        """Call :meth:`MatrixRule.direction` on blocks, and write its results to ``out``.

        Args:
            direction: The method.
            control: The decision of :func:`megacore.ops.optim.decide_step_`.
            out: Receives the direction, ``(n,)``, fp32.

        Sync:
            None: the old state is selected where the step is skipped.
        """
        scale = control[ControlAt.GRAD_SCALE].float()
        for block, into in zip(self.blocks(), torch.split(out, _BLOCK), strict=True):
            if block.grad.dtype == into.dtype:
                grad = torch.mul(block.grad, scale, out=into)
            else:
                grad = into.copy_(block.grad).mul_(scale)
            state = {
                name: values.to(torch.float32, copy=True) for name, values in block.state.items()
            }
            result = direction(grad, state)
            if result is not into:
                into.copy_(result)
            for name, values in state.items():
                self.keep(block.state[name], values, control)

    def move(self, update: Tensor, control: Tensor) -> None:
        """Apply weight decay, subtract an update times the learning rate, unless skipped.

        Args:
            update: Overwritten.
            control: The decision of :func:`megacore.ops.optim.decide_step_`.

        Sync:
            None on CUDA.
        """
        rates = self.rates(control)
        for block, step in zip(self.blocks(), torch.split(update, _BLOCK), strict=True):
            moved = (block.param * rates.keep).sub_(step.mul_(rates.lr))
            self.keep(block.param, moved, control)
        self.write_copy()

    def keep(self, old: Tensor, new: Tensor, control: Tensor) -> None:
        """Overwrite a tensor of the state unless the step is skipped.

        Sync:
            None.
        """
        is_applied = control[ControlAt.IS_APPLIED] != 0.0
        torch.where(is_applied, new.to(old.dtype), old, out=old)

    def write_copy(self) -> None:
        """Round the main parameters into the buffer, if they are a copy."""
        if self.copy_out is not None:
            self.copy_out.copy_(self.param)
