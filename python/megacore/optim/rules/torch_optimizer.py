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
        ValueError: When the state is asked for, if it is not one number or tensor per element.

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

        numbers = host_values.read(control, "decision on a step", assumed=lambda: [1.0] * 7)
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
    """Find the state of an optimizer by one step."""
    import torch
    from torch.optim import Optimizer

    param = _parameter(torch.ones(_PROBE))
    optimizer = factory([param])
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"the factory must return a torch.optim.Optimizer, got {type(optimizer).__name__}"
        )
    param.grad = torch.ones(_PROBE)
    optimizer.step()
    found = []
    for name, value in optimizer.state[param].items():
        if name == "step" or value is None:
            continue
        if not isinstance(value, torch.Tensor) or value.shape != param.shape:
            raise ValueError(
                f"{type(optimizer).__name__} holds {name!r}, which is no tensor with a value per "
                "element; a rank has ranges of elements, so an optimizer must be element-wise"
            )
        found.append(StateTensor(name=name))
    return tuple(found)
