"""Operations that torch computes in place of our kernels: the choice of this process.

Until a choice is made, kernels compute all operations that they take, and torch the products of
linear layers on CPUs. `megacore.qualification` makes it from measurements. All threads read one
choice, also those of autograd, so it is not a context variable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from types import MappingProxyType

# Products of linear layers on CPUs, and their least multiply-adds. Below the smallest number, a
# call from Python takes longer than the faster product saves.
LINEAR_MACS = MappingProxyType(
    {"linear.small": 1 << 20, "linear.medium": 1 << 23, "linear.large": 1 << 27}
)

_LEFT: dict[str, frozenset[str]] = {"cpu": frozenset(LINEAR_MACS), "cuda": frozenset()}


def is_left(name: str, device_type: str) -> bool:
    """Return whether torch computes an operation although there may be a kernel."""
    return name in _LEFT[device_type]


def left_operations(device_type: str) -> frozenset[str]:
    """Return the names of all operations that torch computes on devices of a type."""
    return _LEFT[device_type]


def leave_to_torch(names: Collection[str], device_type: str) -> None:
    """Let torch compute these operations on devices of a type, and kernels all others.

    Args:
        names: Of `megacore.qualification.operation_names`.
        device_type: ``"cpu"`` or ``"cuda"``.
    """
    _LEFT[device_type] = frozenset(names)


@contextmanager
def leaving(names: Collection[str], device_type: str) -> Iterator[None]:
    """Let torch compute these operations, and kernels all others, inside ``with``.

    Example:
        >>> with leaving(["rms_norm"], "cpu"):
        ...     is_left("rms_norm", "cpu"), is_left("swiglu", "cpu")
        (True, False)
        >>> is_left("rms_norm", "cpu")
        False
    """
    before = _LEFT[device_type]
    leave_to_torch(names, device_type)
    try:
        yield
    finally:
        _LEFT[device_type] = before
