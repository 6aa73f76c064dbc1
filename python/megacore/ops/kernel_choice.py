"""Operations that torch computes in place of our kernels: the choice of this process.

Until a choice is made, kernels compute all operations that they take, and torch the products of
linear layers and attention on CPUs. `megacore.qualification` makes it from measurements. All
threads read one choice, also those of autograd, so it is not a context variable.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Literal, get_args

NARROW_DTYPES = ("bfloat16", "float16")
# The products of a linear layer, each with a choice of its own.
Product = Literal["forward", "input_grad", "weight_grad"]
PRODUCT_NAMES: tuple[Product, ...] = get_args(Product)
# Sizes of products on CPUs, and their least multiply-adds. Below the smallest number, a call from
# Python takes longer than the faster product saves. Products of 2 to `FEW_ROWS` rows have a choice
# of their own, because reading or writing the weight takes most of their time. One row is a product
# with a vector, for which libraries have another function.
Size = Literal["few_rows", "small", "medium", "large"]
FEW_ROWS = 8
_MACS: Mapping[Size, int] = MappingProxyType(
    {"few_rows": 1 << 20, "small": 1 << 20, "medium": 1 << 23, "large": 1 << 27}
)
SIZES = tuple(_MACS)


def linear_name(dtype: str, size: Size, product: Product) -> str:
    """Return the name of products of linear layers on CPUs.

    Example:
        >>> linear_name("float32", "large", "weight_grad")
        'linear.float32.large.weight_grad'
    """
    return f"linear.{dtype}.{size}.{product}"


LINEAR_MACS = MappingProxyType(
    {
        linear_name(dtype, size, product): least
        for dtype in ("float32", *NARROW_DTYPES)
        for size, least in _MACS.items()
        for product in PRODUCT_NAMES
    }
)
ATTENTION_DTYPES = ("float32", *NARROW_DTYPES)
# Operations on CPUs that are ours only where they were measured to be faster.
MEASURED = (*LINEAR_MACS, *(f"attention.{dtype}" for dtype in ATTENTION_DTYPES))


def measured_for(dtype: str) -> tuple[str, ...]:
    """Return the names of `MEASURED` that a run with activations of a dtype needs.

    Example:
        >>> measured_for("float16")[-2:]
        ('attention.float32', 'attention.float16')
    """
    return tuple(name for name in MEASURED if name.split(".")[1] in ("float32", dtype))


_LEFT: dict[str, frozenset[str]] = {"cpu": frozenset(MEASURED), "cuda": frozenset()}


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
