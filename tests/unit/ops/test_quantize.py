"""Rounding to 8 bits: the native code gives the bits of the torch operations."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.ops.quantize import (
    BLOCK,
    quantize_blocks,
    quantize_blocks_reference,
    quantize_columns,
    quantize_columns_reference,
    quantize_rows,
    quantize_rows_reference,
    row_blocks,
)
from tests.support.quantize import assert_same, awkward

DTYPES = [torch.float32, torch.bfloat16]
SPLITS = [[0, 0, 0], [5, 0, 131], [256, 1, 1], [128, 127, 129], [1, 300, 0, 44]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(0, 128), (1, 1), (3, 128), (130, 200), (70, 1025)])
def test_rows_and_blocks_have_the_bits_of_the_reference(
    rows: int, width: int, dtype: torch.dtype
) -> None:
    x = awkward(rows, width, dtype)
    assert_same(quantize_rows(x), quantize_rows_reference(x))
    assert_same(quantize_rows(x.t()), quantize_rows_reference(x.t().contiguous()))
    w = torch.stack([x, x.flip(0) * 3])
    for transposed in (False, True):
        expected = quantize_blocks_reference(w, transposed)
        assert_same(quantize_blocks(w, transposed=transposed), expected)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", SPLITS)
@pytest.mark.parametrize("padding", [0, 1, 200])
def test_columns_have_the_bits_of_the_reference(
    splits: list[int], padding: int, dtype: torch.dtype
) -> None:
    num_rows = sum(splits) + padding
    x, m_splits = awkward(num_rows, 136, dtype), torch.tensor(splits)
    blocks, num_blocks = row_blocks(m_splits, num_rows)
    used = blocks[: sum(splits)].unique()
    values, scales = quantize_columns(x, m_splits)
    expected = quantize_columns_reference(x, m_splits, False)
    assert scales.shape == (num_blocks, 136)
    assert_same(
        (values[: sum(splits)], scales[used]), (expected[0][: sum(splits)], expected[1][used])
    )
    values, scales = quantize_columns(x, m_splits, transposed=True)
    expected = quantize_columns_reference(x, m_splits, True)
    written = (used[:, None] * BLOCK * 136 + torch.arange(BLOCK * 136)).flatten()
    assert_same((values[written], scales[used]), (expected[0][written], expected[1][used]))


def test_without_splits_one_expert_has_all_rows() -> None:
    x = awkward(300, 40, torch.float32)
    alone = torch.tensor([300])
    assert_same(quantize_columns(x), quantize_columns(x, alone))
    found, expected = (quantize_columns(x, splits, transposed=True) for splits in (None, alone))
    assert_same((found[0][: 384 * 40], found[1][:3]), (expected[0][: 384 * 40], expected[1][:3]))


def test_transposed_columns_are_rows_of_an_expert_side_by_side() -> None:
    x, m_splits = torch.randn(140, 16), torch.tensor([130, 10])
    values, scales = quantize_columns(x, m_splits, transposed=True)
    plain, _ = quantize_columns(x, m_splits)
    first = values[: 256 * 16].view(16, 256).float()
    assert torch.equal(first[:, :130], plain[:130].float().t())
    assert (first[:, 130:] == 0).all()
    second = values[2 * BLOCK * 16 : 3 * BLOCK * 16].view(16, BLOCK).float()
    assert torch.equal(second[:, :10] * scales[2, :, None], (plain[130:].float() * scales[2]).t())


def test_rows_that_are_not_in_use_are_left_out() -> None:
    x = torch.randn(9, 130)
    expected = quantize_rows_reference(x[:4])
    for num_rows, used in ((4, 4), (-1, 0), (100, 9)):
        values, scales = quantize_rows(x, torch.tensor(num_rows))
        used = min(used, 4)
        assert_same((values[:used], scales[:used]), (expected[0][:used], expected[1][:used]))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_spoils_its_block_alone(bad: float) -> None:
    x = torch.ones(2 * BLOCK, 2 * BLOCK)
    x[1, 3] = bad
    spoiled = torch.zeros_like(x, dtype=torch.bool)

    def scaled(values: Tensor, scales: Tensor) -> Tensor:
        return values.float() * scales

    rows, scales = quantize_rows(x)
    spoiled[1, :BLOCK] = True
    assert torch.equal(scaled(rows, scales.repeat_interleave(BLOCK, 1)).isnan(), spoiled)
    columns, scales = quantize_columns(x)
    spoiled[:] = False
    spoiled[:BLOCK, 3] = True
    wide = scales[:2].repeat_interleave(BLOCK, 0)
    assert torch.equal(scaled(columns, wide).isnan(), spoiled)
    blocks, scales = quantize_blocks(x[None])
    spoiled[:] = False
    spoiled[:BLOCK, :BLOCK] = True
    wide = scales[0].repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    assert torch.equal(scaled(blocks[0], wide).isnan(), spoiled)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_take_the_reference(dtype: torch.dtype) -> None:
    x = torch.randn(3, 40).to(dtype)
    assert_same(quantize_rows(x), quantize_rows_reference(x))
    assert_same(quantize_columns(x), quantize_columns_reference(x, None, False))
    assert_same(quantize_blocks(x[None]), quantize_blocks_reference(x[None], False))


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("quantize_rows", (torch.randn(5, 130), None)),
        ("quantize_columns", (torch.randn(140, 16), torch.tensor([130, 4]), False)),
    ],
)
def test_fake_results_have_the_shapes_of_the_real_ones(name: str, args: tuple[Any, ...]) -> None:
    op = getattr(torch.ops.megacore, name).default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))
