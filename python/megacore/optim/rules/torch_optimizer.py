"""Any element-wise optimizer of torch's interface, over the pieces of a shard."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from megacore.optim.update_rule import StateTensor, UpdateRule

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

    from megacore.optim.update_piece import UpdatePiece

TorchFactory = Callable[["list[nn.Parameter]"], "Optimizer"]

# Number of elements of the probe.
_PROBE = 6


@dataclass(frozen=True, kw_only=True)
class TorchOptimizer(UpdateRule):
    """An optimizer of torch's interface that treats each element on its own.

    The names of its state are found by a step on a few elements. Its state starts at zero, which
    lets it continue from checkpoints of any layout. ``lr`` and, if it has it, ``weight_decay`` of
    its groups are set before each step.

    Args:
        factory: Makes the optimizer of some parameters, flat and fp32.

    Raises:
        ValueError: When the state is asked for, if a trial fails or is not element-wise.

    Sync:
        A step waits for the device, so a CUDA graph cannot include it.

    Example:
        >>> import torch
        >>> rule = TorchOptimizer(factory=lambda params: torch.optim.RMSprop(params, momentum=0.9))
        >>> [tensor.name for tensor in rule.state]
        ['square_avg', 'momentum_buffer']
    """

    factory: TorchFactory

    @property
    def state(self) -> tuple[StateTensor, ...]:
        """Tensors of the optimizer's state with a value per element."""
        return _probe(self.factory)

    def update(self, piece: UpdatePiece, control: Tensor) -> None:
        """Update a piece by a step of the optimizer."""
        from megacore import host_values
        from megacore.ops.optim import ControlAt

        applied = [1.0] * len(ControlAt)
        numbers = host_values.read(control, "decision on a step", assumed=lambda: applied)
        if numbers[ControlAt.IS_APPLIED] == 0.0:
            return
        param = _parameter(piece.param)
        param.grad = piece.scaled_grad(control)
        optimizer = self.factory([param])
        optimizer.state[param] = _with_step(piece.state, int(numbers[ControlAt.STEP_COUNT]) - 1)
        for group in optimizer.param_groups:
            group["lr"] = numbers[ControlAt.LR] * piece.lr_scale
            if "weight_decay" in group:
                group["weight_decay"] = piece.weight_decay
        optimizer.step()
        piece.write_copy()


def _parameter(values: Tensor) -> nn.Parameter:
    """Return a parameter in the memory of some values."""
    from torch import nn

    return nn.Parameter(values.detach(), requires_grad=True)


def _with_step(state: Any, step: int) -> dict[str, Any]:
    """Add the number of steps before, as torch's own optimizers hold it."""
    import torch

    return {"step": torch.tensor(float(step)), **state}


@lru_cache(maxsize=8)
def _probe(factory: TorchFactory) -> tuple[StateTensor, ...]:
    """Find the state of an optimizer by steps on a few elements, and try it on parts of them."""
    import torch
    from torch.optim import Optimizer

    names: list[str] = []
    fault = ""
    try:
        optimizer: Any = factory([_parameter(torch.ones(_PROBE))])
        if isinstance(optimizer, Optimizer):
            names, fault = _trial(factory)
    except Exception as error:
        raise ValueError(
            "factory must return an optimizer of a list of flat parameters, with a step without "
            f"arguments; a trial ended with {type(error).__name__}: {error}"
        ) from error
    kind = type(optimizer).__name__
    if not isinstance(optimizer, Optimizer):
        raise ValueError(f"factory must return a torch.optim.Optimizer, got {kind}")
    if fault:
        raise ValueError(
            "factory must return an element-wise optimizer, since ranks have ranges of elements, "
            f"but {kind} {fault}"
        )
    return tuple(StateTensor(name=name) for name in names)


def _trial(factory: TorchFactory) -> tuple[list[str], str]:
    """Return the names of an optimizer's state, and why it is not element-wise, or ``""``."""
    import torch

    values = torch.linspace(-1.0, 2.0, _PROBE)
    whole, state = _after_steps(factory, values, {})
    names = [key for key in state if key != "step" and state[key] is not None]
    for name in names:
        if getattr(state[name], "shape", None) != values.shape:
            return names, f"holds {name!r} not by element"
    zeros = dict.fromkeys(names, torch.zeros(_PROBE // 2))
    halves = torch.split(values, _PROBE // 2)
    parts = [_after_steps(factory, half, _with_step(zeros, 0))[0] for half in halves]
    if torch.allclose(whole, torch.cat(parts)):
        return names, ""
    return names, "mixes elements in an update, or has a state that does not start at zero"


def _after_steps(
    factory: TorchFactory, values: Tensor, state: dict[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """Return values and state after two steps, with gradients of their size and 30 times that."""
    param = _parameter(values.clone())
    optimizer = factory([param])
    if state:
        optimizer.state[param] = {name: value.clone() for name, value in state.items()}
    for factor in (1.0, 30.0):
        param.grad = factor * values
        optimizer.step()
    return param.detach(), optimizer.state[param]
