from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from megacore.errors import DataError
from megatrain.config import DataConfig, SourceConfig
from megatrain.data import Samples, load_data, write_indexed
from megatrain.data.megatron import MegatronBlend, MegatronDataset, fill_blend_index, normalized
from tests.support.megatron_samples import CASES, VOCAB, digest, write_corpora

GOLDEN = json.loads((Path(__file__).parents[2] / "golden" / "megatron_samples.json").read_text())


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    write_corpora(folder)
    return folder


def _sources(folder: Path, names: list[str], weights: list[float] | None) -> list[SourceConfig]:
    return [
        SourceConfig(path=str(folder / name), weight=None if weights is None else weights[index])
        for index, name in enumerate(names)
    ]


def _rows(samples: Samples) -> Iterator[NDArray[np.int64]]:
    assert isinstance(samples, MegatronDataset | MegatronBlend)
    for number in range(len(samples)):
        sample = samples.sample(number)
        yield np.concatenate((sample.tokens, sample.labels[-1:]))


@pytest.mark.parametrize("number", range(len(CASES)))
def test_samples_are_those_of_megatron_core_token_for_token(corpora: Path, number: int) -> None:
    case, golden = CASES[number], GOLDEN[number]
    config = DataConfig(
        sources=_sources(corpora, case["paths"], case.get("weights")),
        validation=_sources(corpora, case.get("validation", []), None),
        split=case.get("split", "1,0"),
        order="megatron",
        cache=str(corpora / "cache"),
    )
    train, validation, _ = case["sizes"]
    data = load_data(
        config,
        seq_length=case["length"],
        seed=case["seed"],
        vocab_size=VOCAB,
        num_samples=train,
        num_validation_samples=validation,
    )
    sets = {"train": data.train, **data.validation}
    assert {name: digest(_rows(found)) for name, found in sets.items()} == golden


def test_the_indices_are_built_once_and_then_mapped(corpora: Path, tmp_path: Path) -> None:
    config = DataConfig(source=str(corpora / "a"), order="megatron", cache=str(tmp_path))
    arguments: dict[str, Any] = {"seq_length": 8, "seed": 1, "vocab_size": VOCAB}
    load_data(config, num_samples=50, **arguments)
    before = {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")}
    assert len(before) == 6
    load_data(config, num_samples=50, **arguments)
    assert {path: path.stat().st_mtime_ns for path in tmp_path.rglob("*.npy")} == before
    assert not list(tmp_path.rglob("*.partial"))


def test_without_weights_a_blend_ends_after_one_epoch(corpora: Path, tmp_path: Path) -> None:
    sources = _sources(corpora, ["a", "b"], None)
    config = DataConfig(sources=sources, order="megatron", cache=str(tmp_path))
    data = load_data(config, seq_length=8, seed=1, vocab_size=VOCAB, num_samples=10**6)
    assert isinstance(data.train, MegatronBlend)
    with pytest.raises(DataError, match=r"samples in Megatron's order, but sample .* is wanted"):
        data.train.sample(len(data.train))


def test_a_token_outside_the_vocabulary_is_named_with_file_and_sequence(tmp_path: Path) -> None:
    write_indexed(tmp_path / "x", [[1] * 9, [1, 300, 1]], vocab_size=400)
    config = DataConfig(source=str(tmp_path / "x"), split="1,0", order="megatron")
    config = config.model_copy(update={"cache": str(tmp_path / "cache")})
    data = load_data(config, seq_length=11, seed=0, vocab_size=400)
    data.train.vocab_size = 256  # type: ignore[attr-defined]
    with pytest.raises(DataError, match=r"token id 300 in sequence 1 of .*x\.bin.* 256 ids"):
        data.train.sample(0)


def test_a_folder_without_write_access_is_one_sentence(corpora: Path) -> None:
    config = DataConfig(source=str(corpora / "a"), order="megatron", cache="/proc/nowhere")
    with pytest.raises(DataError, match=r"data cache /proc/nowhere cannot be written"):
        load_data(config, seq_length=8, seed=1, vocab_size=VOCAB)


@pytest.mark.parametrize(
    ("weights", "golden"),
    [
        ([0.3, 0.3, 0.4], "20120120120212012012"),
        ([0.5, 0.25, 0.25], "012001200120"),
    ],
)
def test_golden_blends(weights: list[float], golden: str) -> None:
    which, samples = blend(weights, len(golden))
    assert "".join(map(str, which)) == golden
    for dataset in range(len(weights)):
        assert samples[which == dataset].tolist() == list(range(golden.count(str(dataset))))


def blend(weights: list[float], size: int) -> tuple[np.ndarray, np.ndarray]:
    which, samples = np.empty(size, dtype=np.int16), np.empty(size, dtype=np.int64)
    counts = fill_blend_index(weights, which, samples)
    assert counts == np.bincount(which, minlength=len(weights)).tolist()
    return which, samples


@settings(deadline=None, max_examples=60)
@given(
    parts=st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0, 0.1, 1e-7, 1e6]), min_size=1, max_size=70),
    size=st.integers(1, 300),
)
def test_a_blend_takes_the_first_dataset_that_is_furthest_behind(
    parts: list[float], size: int
) -> None:
    weights = normalized([*parts, 1.0])
    which, samples = blend(weights, size)
    counts = [0] * len(weights)
    for number in range(size):
        at = float(max(number, 1))
        behind = [weight * at - count for weight, count in zip(weights, counts, strict=True)]
        chosen = behind.index(max(behind))
        assert (which[number], samples[number]) == (chosen, counts[chosen])
        counts[chosen] += 1


def test_a_blend_needs_finite_weights() -> None:
    with pytest.raises(ValueError, match="weights must be finite"):
        blend([0.5, float("nan")], 3)


@pytest.mark.parametrize("weights", [None, [0.7, 0.3]])
def test_an_order_goes_on_after_its_end_with_whole_epochs(
    corpora: Path, tmp_path: Path, weights: list[float] | None
) -> None:
    names = ["a"] if weights is None else ["a", "b"]
    sources = _sources(corpora, names, weights)
    config = DataConfig(sources=sources, split="1,0", order="megatron", cache=str(tmp_path))
    arguments: dict[str, Any] = {"seq_length": 8, "seed": 1, "vocab_size": VOCAB}
    first, longer = (
        load_data(config, num_samples=40, num_read=number, **arguments) for number in (40, 900)
    )
    assert len(longer.train) >= 900 > len(first.train)
    begin = list(_rows(first.train))
    rows = [row.tolist() for row in _rows(longer.train)]
    assert rows[: len(begin)] == [row.tolist() for row in begin]
    if weights is None:
        size = len(load_data(config, num_samples=1, **arguments).train)
        assert len(longer.train) % size == 0
        epochs = [rows[at : at + size] for at in range(0, len(rows), size)]
        assert all(epoch != other for epoch, other in itertools.pairwise(epochs))
