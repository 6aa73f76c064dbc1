"""Bytes per parameter of mixed-precision training, with and without a sharded optimizer."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from megacore.optim.rules.adamw import AdamW
from megacore.optim.update_rule import DTYPE_BYTES, UpdateRule


@dataclass(frozen=True, kw_only=True)
class MemoryRow:
    """Bytes per parameter element, padding aside.

    Attributes:
        params: Name of the parameters' number format.
        grads: Name of the gradients' number format.
        resident: Bytes on every rank: parameter and gradient.
        sharded: Bytes that are sharded over data-parallel ranks: optimizer state.
    """

    params: str
    grads: str
    resident: int
    sharded: int | Fraction

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameter in ``resident``."""
        return DTYPE_BYTES[self.params]

    @property
    def grad_bytes(self) -> int:
        """Bytes of the gradient in ``resident``."""
        return DTYPE_BYTES[self.grads]

    @property
    def whole(self) -> int | Fraction:
        """Bytes per parameter without sharding."""
        return self.resident + self.sharded

    def per_rank(self, dp_size: int) -> Fraction:
        """Return the bytes per parameter on one of ``dp_size`` ranks, exactly.

        Example:
            >>> memory_row(params="bfloat16").per_rank(8)
            Fraction(15, 2)
        """
        return self.resident + Fraction(self.sharded, dp_size)

    def formula(self) -> str:
        """Return the bytes per rank as a formula, e.g. ``"6 + 12/d"``."""
        return f"{self.resident} + {float(self.sharded):g}/d"


def memory_row(
    *,
    params: str = "float32",
    grads: str = "float32",
    rule: UpdateRule | None = None,
    main_grads: bool = False,
    average: bool = False,
) -> MemoryRow:
    """Count the bytes of one parameter element.

    Args:
        params: Number format of the model's parameters.
        grads: Number format of the gradient buffer.
        rule: The optimizer. Default: ``AdamW()``.
        main_grads: The optimizer keeps float32 copies of low-precision gradients of its shard, as
            Megatron-LM does. megacore converts them block by block instead.
        average: A moving average of the weights is kept, in float32.

    Raises:
        ValueError: If a number format is unknown.

    Example:
        >>> memory_row(params="bfloat16", rule=AdamW(moments_dtype="bfloat16")).formula()
        '6 + 8/d'
    """
    for name in (params, grads):
        if name not in DTYPE_BYTES:
            known = ", ".join(DTYPE_BYTES)
            raise ValueError(f"number format {name!r} is unknown; use one of {known}")
    main_param = 0 if params == "float32" else 4
    main_grad = 4 if main_grads and grads != "float32" else 0
    return MemoryRow(
        params=params,
        grads=grads,
        resident=DTYPE_BYTES[params] + DTYPE_BYTES[grads],
        sharded=_short(
            main_param
            + main_grad
            + (AdamW() if rule is None else rule).state_bytes
            + (4 if average else 0)
        ),
    )


def _short(number: Fraction) -> int | Fraction:
    return int(number) if number.denominator == 1 else number


def memory_table(*, main_grads: bool = True) -> list[MemoryRow]:
    """Return the published table of the distributed optimizer: bytes per parameter.

    Args:
        main_grads: Include the float32 copies of low-precision gradients, as the published
            numbers do. megacore itself needs the memory of ``main_grads=False``.

    Source:
        Megatron-LM, "Distributed Optimizer", table of theoretical memory.

    Example:
        >>> for row in memory_table():
        ...     print(row.params, row.grads, row.whole, "->", row.formula())
        float16 float16 20 -> 4 + 16/d
        float16 float32 18 -> 6 + 12/d
        float32 float32 16 -> 8 + 8/d
        >>> memory_table(main_grads=False)[0].formula()
        '4 + 12/d'
    """
    return [
        memory_row(params=params, grads=grads, main_grads=main_grads)
        for params, grads in (
            ("float16", "float16"),
            ("float16", "float32"),
            ("float32", "float32"),
        )
    ]
