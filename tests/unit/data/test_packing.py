"""Documents packed into samples: nothing is lost, repeated or cut without need."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.errors import ConfigError, DataError
from megatrain.config import DataConfig
from megatrain.data import TokenSource, load_data, write_indexed
from megatrain.data import packing as packing_module
from megatrain.data import stream as stream_module
from megatrain.data.packing import ArrayFile, PackedDataset, build_packing, ordered_by_best_fit

sizes = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(lambda s: sum(s) >= 2)


def source_of(lengths: list[int]) -> TokenSource:
    """Each token is its position in the stream plus 1, so that padding is no token of it."""
    return TokenSource(
        name="x",
        description="",
        tokens=np.arange(1, sum(lengths) + 1),
        document_starts=np.cumsum([0, *lengths[:-1]]).tolist(),
    )


def packed(
    lengths: list[int], seq_length: int, *, seed: int = 1, document_mask: bool = True
) -> PackedDataset:
    return PackedDataset(
        source_of(lengths).range(),
        name="x",
        label="x",
        seq_length=seq_length,
        seed=seed,
        vocab_size=10_000,
        cache=None,
        document_mask=document_mask,
    )


@settings(max_examples=150, deadline=None)
@given(
    lengths=sizes,
    seq_length=st.integers(1, 30),
    seed=st.integers(0, 2**40),
    epoch=st.integers(0, 5),
    document_mask=st.booleans(),
)
def test_an_epoch_has_every_prediction_of_every_document_once(
    lengths: list[int], seq_length: int, seed: int, epoch: int, document_mask: bool
) -> None:
    data = packed(lengths, seq_length, seed=seed, document_mask=document_mask)
    starts = np.cumsum([0, *lengths[:-1]])
    firsts = {int(start) + 1 for start, length in zip(starts, lengths, strict=True) if length}
    inside: Counter[int] = Counter()
    across = 0
    for number in range(epoch * data.num_rows, (epoch + 1) * data.num_rows):
        sample = data.sample(number)
        assert sample.tokens.shape == sample.labels.shape == (seq_length,)
        for token, label in zip(sample.tokens.tolist(), sample.labels.tolist(), strict=True):
            if label in firsts:
                across += 1
            elif label >= 0:
                assert label == token + 1, "a label is the next token of its document"
                inside[label] += 1
    assert inside == Counter(set(range(1, sum(lengths) + 1)) - firsts)
    assert not (document_mask and across)


@settings(max_examples=150, deadline=None)
@given(lengths=sizes, seq_length=st.integers(1, 30), seed=st.integers(0, 99))
def test_no_document_is_cut_that_fits(lengths: list[int], seq_length: int, seed: int) -> None:
    ends = np.cumsum(lengths)
    packing = build_packing(
        ends - lengths, num_tokens=int(ends[-1]), seq_length=seq_length, seed=seed
    )
    for start, end in zip(ends - lengths, ends, strict=True):
        if 0 < end - start <= seq_length + 1:
            (piece,) = np.flatnonzero((packing.starts == start) & (packing.lengths > 0))
            assert packing.lengths[piece] == end - start
    for row in np.split(packing.lengths, packing.rows[1:-1]):
        assert 0 < row.sum() <= seq_length + 1
    # Any two samples of best fit together have more than one sample's tokens.
    fill = sorted(np.add.reduceat(packing.lengths, packing.rows[:-1]).tolist())
    assert len(fill) < 2 or fill[0] + fill[1] > seq_length + 1
    again = build_packing(
        ends - lengths, num_tokens=int(ends[-1]), seq_length=seq_length, seed=seed
    )
    assert all(
        np.array_equal(getattr(packing, name), getattr(again, name)) for name in vars(packing)
    )


def filled_one_by_one(lengths: list[int], capacity: int) -> list[int]:
    """Tokens of each sample if pieces are packed one by one, ascending."""
    rooms: list[int] = []
    for length in sorted(lengths, reverse=True):
        room = min((room for room in rooms if room >= length), default=None)
        if room is None:
            rooms.append(capacity)
            room = capacity
        rooms[rooms.index(room)] -= length
    return sorted(capacity - room for room in rooms)


@settings(max_examples=150, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 12), min_size=1, max_size=40),
    seed=st.integers(0, 99),
    block=st.integers(1, 7),
)
def test_blocks_change_nothing_and_samples_are_those_of_best_fit(
    lengths: list[int], seed: int, block: int
) -> None:
    sizes = np.array(lengths, dtype=np.int32)
    order, rows = ordered_by_best_fit(sizes, 12, seed)
    with mock.patch.object(packing_module, "_BLOCK", block):
        for whole, in_blocks in zip(
            (order, rows), ordered_by_best_fit(sizes, 12, seed), strict=True
        ):
            assert np.array_equal(whole, in_blocks)
    assert sorted(order.tolist()) == list(range(len(lengths)))
    # Which of several samples with equal room takes a piece is free.
    filled = sorted(int(sizes[row].sum()) for row in np.split(order, rows[1:-1]))
    assert filled == filled_one_by_one(lengths, 12)


def test_packing_is_best_fit_decreasing() -> None:
    """Against the plain algorithm: each piece in turn, the fullest sample with room."""
    random = np.random.RandomState(1)
    lengths = np.minimum(random.lognormal(5.5, 1.0, size=4000).astype(np.int64) + 1, 1025)
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [(room, index) for index, room in enumerate(rooms) if room >= length]
        if fitting:
            rooms[min(fitting)[1]] -= length
        else:
            rooms.append(1025 - length)
    starts = np.cumsum(lengths) - lengths
    packing = build_packing(starts, num_tokens=int(lengths.sum()), seq_length=1024, seed=7)
    fill = np.add.reduceat(packing.lengths, packing.rows[:-1])
    assert sorted((1025 - fill).tolist()) == sorted(rooms)
    assert fill.sum() / (1025 * len(fill)) > 0.98


def test_padding_is_a_document_and_never_counts() -> None:
    data = packed([4, 3], 9)
    sample = data.sample(0)
    assert sample.tokens[7:].tolist() == [0, 0]
    assert sample.labels[-3:].tolist() == [-1, -1, -1]
    assert sample.document_starts[0] == 0
    assert sample.document_starts[-1] == 7
    assert (sample.labels >= 0).sum() == 3 + 2


def test_seed_and_epoch_change_the_order() -> None:
    lengths = [5, 6, 7, 8] * 20

    def epoch(data: PackedDataset, number: int) -> list[list[int]]:
        first = number * data.num_rows
        return [data.sample(n).tokens.tolist() for n in range(first, first + data.num_rows)]

    data, other = packed(lengths, 15), packed(lengths, 15, seed=2)
    assert epoch(data, 0) == epoch(packed(lengths, 15), 0)
    assert epoch(data, 0) != epoch(data, 1)
    assert sorted(epoch(data, 0)) == sorted(epoch(data, 1))
    assert epoch(data, 0) != epoch(other, 0)


@pytest.mark.parametrize("block", [2, 1 << 20])
def test_token_files_are_packed_once_and_read_from_files(
    block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_module, "_BLOCK", block)
    monkeypatch.setattr(stream_module, "_BLOCK", block)
    documents = [np.arange(n) % 250 for n in (30, 5, 0, 9, 70, 3, 0)]
    write_indexed(tmp_path / "corpus", documents, vocab_size=256)
    config = DataConfig(
        source=str(tmp_path / "corpus"),
        cache=str(tmp_path / "cache"),
        packing="best_fit",
        split="100,0",
    )
    data = load_data(config, seq_length=16, seed=1)
    assert data.default_normalization == "token"
    assert isinstance(data.train, PackedDataset)
    assert isinstance(data.train.packing.starts, ArrayFile)
    plain = build_packing(np.array([0, 30, 35, 44, 114]), num_tokens=117, seq_length=16, seed=1)
    rows = range(plain.num_rows)
    assert [data.train.packing.pieces(row) for row in rows] == [plain.pieces(row) for row in rows]
    assert data.train.num_rows == plain.num_rows
    assert len(list((tmp_path / "cache").glob("packing-*/rows.npy"))) == 1


def test_bad_requests_are_one_sentence() -> None:
    with pytest.raises(DataError, match="has 1 tokens, but a sample takes at least 2"):
        packed([1], 4)
    with pytest.raises((ConfigError, ValueError), match="leave one out"):
        DataConfig(packing="best_fit", order="megatron")
