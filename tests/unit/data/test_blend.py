from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import DataError, MegacoreError
from megatrain.config import DataConfig, SourceConfig
from megatrain.data import ByteTokenizer, TokenSource, load_data, write_indexed
from megatrain.data.blend import BlendOrder

weights = st.lists(st.floats(0.01, 10), min_size=1, max_size=5)


@given(weights=weights, count=st.integers(1, 400))
def test_a_blend_takes_every_sample_of_a_dataset_in_turn(weights: list[float], count: int) -> None:
    order = BlendOrder(weights)
    taken: list[list[int]] = [[] for _ in weights]
    for number in range(count):
        index, inner = order.locate(number)
        taken[index].append(inner)
    assert taken == [list(range(len(numbers))) for numbers in taken]
    assert order.counts(count) == [len(numbers) for numbers in taken]


@given(weights=weights, at=st.integers(0, 10**13))
def test_shares_hold_at_any_point_of_the_order(weights: list[float], at: int) -> None:
    counts = BlendOrder(weights).counts(at)
    assert sum(counts) == at
    for weight, count in zip(weights, counts, strict=True):
        assert abs(count - at * weight / sum(weights)) < len(weights) + at * 1e-11


def _corpus(folder: Path, name: str, token: int, size: int) -> SourceConfig:
    write_indexed(folder / name, [[token] * 10] * (size // 10), vocab_size=100)
    return SourceConfig(path=str(folder / name))


def test_weights_are_shares_of_the_tokens(tmp_path: Path) -> None:
    sources = [
        _corpus(tmp_path, "a", 1, 5000).model_copy(update={"weight": 3.0}),
        _corpus(tmp_path, "b", 2, 1000).model_copy(update={"weight": 1.0}),
    ]
    data = load_data(DataConfig(sources=sources, split="1,0"), seq_length=8, seed=0)
    rows = [data.train.sample(number).tokens for number in range(400)]
    assert [int(np.mean([row[0] == token for row in rows]) * 400) for token in (1, 2)] == [300, 100]
    epochs = data.train.epochs(400)
    assert epochs["a"] == pytest.approx(300 * 8 / 5000, rel=0.01)
    assert epochs["b"] == pytest.approx(100 * 8 / 1000, rel=0.02)


def test_without_weights_sources_count_by_their_size(tmp_path: Path) -> None:
    sources = [_corpus(tmp_path, "a", 1, 4000), _corpus(tmp_path, "b", 2, 1000)]
    data = load_data(DataConfig(sources=sources, split="1,0"), seq_length=8, seed=0)
    tokens = [int(data.train.sample(number).tokens[0]) for number in range(100)]
    assert tokens.count(1) == 80


def test_sources_of_one_blend_have_different_orders(tmp_path: Path) -> None:
    write_indexed(tmp_path / "a", [list(range(1000))], vocab_size=1000)
    sources = [
        SourceConfig(path=str(tmp_path / "a"), name=name, weight=1.0) for name in ("one", "two")
    ]
    data = load_data(
        DataConfig(sources=sources, split="1,0"), seq_length=9, seed=0, vocab_size=1000
    )
    starts = [int(data.train.sample(number).tokens[0]) for number in range(40)]
    assert starts[::2] != starts[1::2]


def test_validation_sets_are_read_whole_and_named(tmp_path: Path) -> None:
    config = DataConfig(
        sources=[_corpus(tmp_path, "a", 1, 1000)],
        validation=[_corpus(tmp_path, "b", 2, 100), _corpus(tmp_path, "c", 3, 200)],
    )
    data = load_data(config, seq_length=8, seed=0, need_validation=True)
    assert list(data.validation) == ["b", "c"]
    assert data.validation["c"].num_tokens == 200
    assert data.train.num_tokens == 1000
    with pytest.raises(DataError, match=r"validation data 'b' has 100 tokens, but .* = 101"):
        load_data(config, seq_length=100, seed=0, need_validation=True)


def count_up(tokenizer: ByteTokenizer) -> TokenSource:
    """A factory of a source."""
    tokens = np.arange(200) % tokenizer.vocab_size
    return TokenSource(name="count", description="numbers", tokens=tokens)


def test_a_factory_makes_a_source() -> None:
    source = SourceConfig(path=f"{__name__}:count_up", kind="factory", name="numbers")
    data = load_data(DataConfig(sources=[source], split="1,0"), seq_length=8, seed=0)
    sample = data.train.sample(0)
    assert (sample.labels == sample.tokens + 1).all()


def count_with_mask(tokenizer: ByteTokenizer) -> TokenSource:
    """A factory of a source where only even tokens count."""
    source = count_up(tokenizer)
    return replace(source, loss_mask=(source.tokens % 2 == 0).astype(np.uint8))


def test_a_source_may_leave_tokens_out_of_the_loss() -> None:
    source = SourceConfig(path=f"{__name__}:count_with_mask", kind="factory", name="numbers")
    data = load_data(DataConfig(sources=[source], split="1,0"), seq_length=8, seed=0)
    sample = data.train.sample(0)
    following = sample.tokens + 1
    assert sample.labels.tolist() == np.where(following % 2 == 0, following, -1).tolist()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("json:nothing", r'path of a data factory = "json:nothing": module json .* has no nothing'),
        ("no_such_module_here:x", "there is no module no_such_module_here"),
        ("megatrain.data:load_tokenizer", "must return a megatrain.data.TokenSource, got ByteTok"),
    ],
)
def test_a_bad_factory_is_explained(path: str, message: str) -> None:
    if "load_tokenizer" in path:
        path = f"{__name__}:wrong_factory"
    source = SourceConfig(path=path, kind="factory")
    with pytest.raises(MegacoreError, match=message):
        load_data(DataConfig(sources=[source]), seq_length=8, seed=0)


def wrong_factory(tokenizer: ByteTokenizer) -> ByteTokenizer:
    """A factory of something else."""
    return tokenizer


def test_records_hold_the_losses_of_several_sets() -> None:
    from megatrain.train.metrics import StepRecord

    record = StepRecord(
        step=0,
        loss=1.0,
        grad_norm=1.0,
        lr=1.0,
        tokens_per_s=1.0,
        step_time_s=1.0,
        num_skipped=0,
        samples=1,
        validation_loss=2.5,
        validation_losses={"web": 2.0, "code": float("nan")},
        epochs={"web": 0.5},
    )
    found = json.loads(record.to_json())
    assert found["validation_losses"] == {"web": 2.0, "code": None}
    assert found["epochs"] == {"web": 0.5}


def test_weights_without_a_finite_sum_are_refused() -> None:
    sources = [SourceConfig(path=name, weight=1e308) for name in ("a", "b")]
    for key in ("sources", "validation"):
        groups: dict[str, Any] = {key: sources}
        with pytest.raises(ValueError, match=f"weights of {key} must have a finite sum, got inf"):
            DataConfig(**groups)
    with pytest.raises(ValueError, match="expected two or three weights"):
        DataConfig(split="1e308,1e308")
