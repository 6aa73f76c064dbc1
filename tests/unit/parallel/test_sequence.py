"""The shares of a sequence: they partition it, and causal attention costs each rank the same."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megacore.parallel.sequence import context_positions


def shares(seq_length: int, size: int) -> list[torch.Tensor]:
    return [
        context_positions(seq_length, cp_size=size, position=position) for position in range(size)
    ]


@given(size=st.integers(1, 16), length=st.integers(1, 8))
def test_shares_partition_the_sequence_and_balance_the_pairs(size: int, length: int) -> None:
    seq_length = 2 * size * length
    found = shares(seq_length, size)
    assert torch.equal(torch.cat(found).sort().values, torch.arange(seq_length))
    # A token at position i attends to i + 1 tokens.
    pairs = {int((positions + 1).sum()) for positions in found}
    assert pairs == {seq_length * (seq_length + 1) // 2 // size}


def test_a_sequence_without_equal_slices_is_refused() -> None:
    with pytest.raises(ValueError, match="over 2 ranks cuts a sequence into 4 equal slices, but"):
        shares(18, 2)
