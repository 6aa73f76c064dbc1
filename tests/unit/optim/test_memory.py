from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn

from megacore.buffers import ParamGradBuffer
from megacore.optim import AdamW, DistributedOptimizer, memory_row, memory_table
from megacore.optim.options import OptimizerOptions
from megacore.parallel import Group, ProcessGroups
from megacore.parallel.param_info import ParamInfo

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def test_the_table_has_the_published_numbers() -> None:
    rows = {(row.params, row.grads): (row.whole, row.formula()) for row in memory_table()}
    assert rows == {
        ("float16", "float16"): (20, "4 + 16/d"),
        ("float16", "float32"): (18, "6 + 12/d"),
        ("float32", "float32"): (16, "8 + 8/d"),
    }
    assert memory_table()[1].per_rank(5) == Fraction(42, 5)


def test_an_unknown_number_format_is_refused() -> None:
    with pytest.raises(ValueError, match="'int8' is unknown"):
        memory_row(params="int8")


@pytest.mark.parametrize("dp_size", [1, 2, 8])
@pytest.mark.parametrize("moments", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("params", "grads"),
    [
        ("float32", "float32"),
        ("bfloat16", "float32"),
        ("bfloat16", "bfloat16"),
        ("float16", "float32"),
        ("float16", "float16"),
    ],
)
def test_bytes_are_those_that_are_allocated(
    params: str, grads: str, moments: str, dp_size: int
) -> None:
    # A size that needs no padding, so the formula must hold to the byte.
    weight = nn.Parameter(torch.zeros(128 * 8, 4, dtype=DTYPES[params]))
    info = ParamInfo(name="w", full_shape=tuple(weight.shape), tp_dim=None)
    # Allocation needs no communication, so the handle is never used.
    handle: Any = object() if dp_size > 1 else None
    group = Group("dp", tuple(range(dp_size)), dp_size - 1, handle)
    buffer = ParamGradBuffer([(info, weight)], dp_group=group, grad_dtype=DTYPES[grads])
    options = OptimizerOptions(rule=AdamW(moments_dtype=moments))  # type: ignore[arg-type]
    optimizer = DistributedOptimizer([buffer], groups=ProcessGroups.single(), options=options)
    allocated = buffer.param_data.nbytes + buffer.grad_data.nbytes + optimizer.state_bytes
    row = memory_row(params=params, grads=grads, rule=options.rule)
    assert allocated == row.per_rank(dp_size) * weight.numel()
    assert buffer.param_data.nbytes + buffer.grad_data.nbytes == row.resident * weight.numel()


def test_a_moving_average_takes_four_bytes_of_the_shard() -> None:
    assert memory_row(params="bfloat16", average=True).formula() == "6 + 16/d"
    assert memory_row(average=True).formula() == "8 + 12/d"
