from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import ConfigError, DataError
from megacore.parallel.batch import Documents
from megatrain.data import (
    Dataset,
    SampleOrder,
    TokenRange,
    TokenSource,
    microbatch,
    num_microbatches,
)
from megatrain.data.dataset import permute
from megatrain.data.tokenizer import TokenArray

shapes = st.tuples(st.integers(1, 20), st.integers(1, 300)).filter(lambda s: s[1] > s[0])


def _order(shape: tuple[int, int], seed: int = 3, reshuffle: bool = True) -> SampleOrder:
    seq_length, num_tokens = shape
    return SampleOrder(num_tokens=num_tokens, seq_length=seq_length, seed=seed, reshuffle=reshuffle)


def _epoch(order: SampleOrder, epoch: int) -> list[int]:
    return [order.start(epoch * order.num_windows + i) for i in range(order.num_windows)]


@given(size=st.integers(1, 500), key=st.integers(0, 2**64 - 1))
def test_every_key_gives_a_permutation(size: int, key: int) -> None:
    assert sorted(permute(i, size, key) for i in range(size)) == list(range(size))


def test_every_position_is_equally_likely() -> None:
    size, trials = 6, 6000
    counts = np.zeros((size, size))
    for key in range(trials):
        for i in range(size):
            counts[i, permute(i, size, key * 0x9E3779B97F4A7C15)] += 1
    # Binomial with mean 1000 and deviation 29: five deviations.
    assert np.abs(counts - trials / size).max() < 5 * 29


@given(shape=shapes, epoch=st.integers(0, 1000), seed=st.integers(0, 2**32))
def test_an_epoch_cuts_the_stream_into_adjacent_windows(
    shape: tuple[int, int], epoch: int, seed: int
) -> None:
    seq_length, num_tokens = shape
    starts = sorted(_epoch(_order(shape, seed), epoch))
    assert starts[0] >= 0
    assert starts[-1] + seq_length + 1 <= num_tokens
    assert all(b - a == seq_length for a, b in itertools.pairwise(starts))
    # At most two windows' worth of tokens is left out, whatever the phase.
    assert len(starts) >= (num_tokens - 1) // seq_length - 1


@given(shape=shapes)
def test_a_fixed_order_uses_every_whole_window_and_repeats(shape: tuple[int, int]) -> None:
    seq_length, num_tokens = shape
    order = _order(shape, reshuffle=False)
    assert sorted(_epoch(order, 0)) == [
        k * seq_length for k in range((num_tokens - 1) // seq_length)
    ]
    assert _epoch(order, 0) == _epoch(order, 5)


def test_epochs_differ_in_order_and_in_phase() -> None:
    order = _order((10, 1000))
    epochs = [_epoch(order, epoch) for epoch in range(40)]
    phases = {min(starts) for starts in epochs}
    assert phases <= set(range(10))
    assert len(phases) > 5
    ranks = {tuple(np.argsort(starts)) for starts in epochs}
    assert len(ranks) == 40


def test_seeds_differ_and_equal_seeds_agree() -> None:
    assert _epoch(_order((10, 1000), seed=1), 0) != _epoch(_order((10, 1000), seed=2), 0)
    assert _epoch(_order((10, 1000), seed=1), 7) == _epoch(_order((10, 1000), seed=1), 7)


def test_the_order_never_changes_between_versions() -> None:
    # A resumed run must see the samples the first one would have seen.
    starts = [_order((10, 1000), seed=1234).start(i) for i in (0, 1, 2, 99, 10**9)]
    assert starts == [545, 955, 975, 774, 85]


def test_an_order_of_a_trillion_tokens_takes_no_memory() -> None:
    order = SampleOrder(num_tokens=10**12, seq_length=4096, seed=0)
    starts = [order.start(i) for i in range(1000)]
    assert len(set(starts)) == 1000
    assert max(starts) > 9 * 10**11


def stream(tokens: TokenArray) -> TokenRange:
    return TokenSource(name="numbers", description="", tokens=tokens).range()


def _counting_dataset(num_tokens: int = 500, seq_length: int = 7) -> Dataset:
    return Dataset(
        stream(np.arange(num_tokens, dtype=np.uint16)),
        name="numbers",
        seq_length=seq_length,
        seed=1,
        vocab_size=num_tokens,
    )


def test_labels_are_the_tokens_one_later() -> None:
    batch = microbatch(
        _counting_dataset(),
        step=2,
        microbatch=1,
        dp_position=0,
        dp_size=1,
        microbatch_size=4,
        global_batch_size=8,
    )
    assert batch.labels is not None
    assert batch.tokens.dtype == batch.labels.dtype == batch.sample_ids.dtype == torch.int64
    assert batch.tokens.shape == batch.labels.shape == (4, 7)
    assert torch.equal(batch.labels, batch.tokens + 1)
    assert batch.sample_ids.tolist() == [20, 21, 22, 23]
    assert batch.step == 2


@given(
    dp_size=st.sampled_from([1, 2, 4]),
    microbatch_size=st.sampled_from([1, 2, 3]),
    groups=st.sampled_from([4, 8]),
    step=st.integers(0, 50),
)
def test_the_groups_of_a_step_do_not_depend_on_the_layout(
    dp_size: int, microbatch_size: int, groups: int, step: int
) -> None:
    dataset = _counting_dataset()
    total = groups * microbatch_size

    def sample_groups(dp: int) -> set[tuple[int, ...]]:
        count = num_microbatches(total, microbatch_size=microbatch_size, dp_size=dp)
        batches = [
            microbatch(
                dataset,
                step=step,
                microbatch=m,
                dp_position=d,
                dp_size=dp,
                microbatch_size=microbatch_size,
                global_batch_size=total,
            )
            for m in range(count)
            for d in range(dp)
        ]
        return {tuple(batch.sample_ids.tolist()) for batch in batches}

    one = sample_groups(1)
    assert sample_groups(dp_size) == one
    assert sorted(i for ids in one for i in ids) == list(range(step * total, (step + 1) * total))


def test_microbatch_m_of_rank_d_is_group_m_times_dp_plus_d() -> None:
    batch = microbatch(
        _counting_dataset(),
        step=0,
        microbatch=1,
        dp_position=0,
        dp_size=2,
        microbatch_size=3,
        global_batch_size=12,
    )
    assert batch.sample_ids.tolist() == [6, 7, 8]


@pytest.mark.parametrize(
    ("total", "nearest"), [(30, "24 or 32"), (5, "8"), (0, "8")], ids=["between", "below", "zero"]
)
def test_a_batch_that_does_not_divide_names_the_nearest_sizes(total: int, nearest: str) -> None:
    with pytest.raises(ConfigError, match=rf"4 \* 2 = 8; nearest legal values: {nearest}$"):
        num_microbatches(total, microbatch_size=4, dp_size=2)


def test_a_microbatch_number_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="microbatch 2 of dp rank 0: there are 2 microbatches"):
        microbatch(
            _counting_dataset(),
            step=0,
            microbatch=2,
            dp_position=0,
            dp_size=2,
            microbatch_size=2,
            global_batch_size=8,
        )


def test_a_token_outside_the_vocabulary_stops_the_sample() -> None:
    tokens = np.array([0, 1, 2, -1, 3])
    dataset = Dataset(stream(tokens), name="bad", seq_length=4, seed=0, vocab_size=4)
    with pytest.raises(
        DataError, match=r"bad holds token id -1 \(at position 3, in document 0 of numbers\)"
    ):
        dataset.sample(0)


@pytest.mark.parametrize("arguments", [{"num_tokens": 5}, {"seq_length": 0}, {"seed": -1}])
def test_an_impossible_order_is_refused(arguments: dict[str, int]) -> None:
    legal = {"num_tokens": 100, "seq_length": 10, "seed": 0}
    with pytest.raises(ValueError, match="seq_length"):
        SampleOrder(**(legal | arguments))


@given(
    lengths=st.lists(st.integers(0, 6), min_size=1, max_size=20).filter(lambda x: sum(x) > 8),
    number=st.integers(0, 50),
)
def test_empty_documents_change_no_sample(lengths: list[int], number: int) -> None:
    tokens = np.arange(sum(lengths))
    ends = np.cumsum(lengths)

    def sample(starts: list[int]) -> tuple[list[int], list[int], list[int]]:
        source = TokenSource(name="x", description="", tokens=tokens, document_starts=starts)
        made = Dataset(
            source.range(),
            name="x",
            seq_length=7,
            seed=1,
            vocab_size=200,
            document_mask=True,
        ).sample(number)
        Documents.of([made.document_starts], 7)
        return made.tokens.tolist(), made.labels.tolist(), list(made.document_starts)

    whole = [end - length for end, length in zip(ends.tolist(), lengths, strict=True)]
    full = [start for start, length in zip(whole, lengths, strict=True) if length > 0]
    assert sample(whole) == sample(full)


@pytest.mark.parametrize(
    ("starts", "message"),
    [
        ((), r"must begin with 0, got \[\]"),
        ((3,), r"must begin with 0, got \[3\]"),
        ((0, 20), "must be below the 8 tokens of the sample, got 20"),
        ((0, 4, 4), "must rise, each document having a token, got 4 after 4"),
        ((0, 8), "must be below the 8 tokens"),
    ],
)
def test_starts_of_documents_are_checked(starts: tuple[int, ...], message: str) -> None:
    with pytest.raises(ValueError, match=f"document starts of sample 1 {message}"):
        Documents.of([[0, 3], starts], 8)
    with pytest.raises(ValueError, match=f"document starts of sample 0 {message}"):
        Documents(starts=(starts,), positions=torch.zeros(1, 8, dtype=torch.int64))
