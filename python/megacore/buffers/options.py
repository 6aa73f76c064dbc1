"""Options of gradient buffers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacore.options import check_values


@dataclass(frozen=True, kw_only=True)
class BufferOptions:
    """Layout and reduction of gradient buffers.

    Attributes:
        distributed: Shard the optimizer state over the data-parallel ranks of an instance (ZeRO-1);
            without, every rank holds all of it.
        grad_dtype: Number format in which gradients are accumulated and communicated: float32, or
            that of the parameters. ``"param_fp32_sum"`` exchanges slices in the parameters' format
            and adds those of different ranks in float32.
        bucket_numel: Elements per bucket. Default: chosen from the data-parallel size.
        pad_for_ring: Pad buckets to multiples of 2^16 elements.
        average_in_collective: Average by a division after the sum, instead of a scale before it.

    Raises:
        ValueError: If a value is not valid.
    """

    distributed: bool = True
    grad_dtype: Literal["float32", "param", "param_fp32_sum"] = "float32"
    bucket_numel: int | None = None
    pad_for_ring: bool = False
    average_in_collective: bool = True

    def __post_init__(self) -> None:
        check_values(self, least={"bucket_numel": 1})

    @property
    def grads_like_params(self) -> bool:
        """True if gradients have the number format of the parameters."""
        return self.grad_dtype != "float32"
