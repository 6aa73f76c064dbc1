"""Data and callbacks of one's own in a training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megacore.errors import MegacoreError
from megatrain.api import Callback, ResolvedConfig, Sample, SampleSource, StepRecord, Trainer
from megatrain.config import Config, resolve
from megatrain.data.loading import load_run_data
from megatrain.train.loop import train
from tests.support.configs import rank_context

MODEL = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "seq_length": 8}


class Squares:
    """Each sample counts up from a square number."""

    num_samples = 10

    def __init__(self, length: int = 8, highest: int = 99) -> None:
        self.length, self.highest = length, highest

    def sample(self, number: int) -> Sample:
        """Return the tokens after the square."""
        tokens = (number**2 + np.arange(self.length + 1)) % (self.highest + 1)
        return Sample(tokens=tokens[:-1], labels=tokens[1:])


def squares(config: ResolvedConfig) -> tuple[SampleSource, Mapping[str, SampleSource]]:
    source = Squares(config.model.seq_length)
    return source, {"first": source, "second": source}


def not_a_pair(_config: ResolvedConfig) -> Any:
    return Squares()


def too_long(_config: ResolvedConfig) -> Any:
    return Squares(9), {}


def too_high(_config: ResolvedConfig) -> Any:
    return Squares(highest=100_000), {"high": Squares(8, 100_000)}


def no_source(_config: ResolvedConfig) -> Any:
    return [1, 2], {}


def no_validation(_config: ResolvedConfig) -> Any:
    return Squares(), {}


class Starts(Squares):
    """Squares with starts of documents."""

    def __init__(self, starts: Any) -> None:
        super().__init__()
        self.starts = starts

    def sample(self, number: int) -> Sample:
        """Return a sample with the starts."""
        return replace(super().sample(number), document_starts=self.starts)


def no_starts(_config: ResolvedConfig) -> Any:
    return Starts(()), {"x": Squares()}


def late_start(_config: ResolvedConfig) -> Any:
    return Starts((3,)), {"x": Squares()}


def start_after_the_end(_config: ResolvedConfig) -> Any:
    return Starts((0, 20)), {"x": Squares()}


def empty_document(_config: ResolvedConfig) -> Any:
    return Starts((0, 4, 4)), {"x": Squares()}


def start_between_tokens(_config: ResolvedConfig) -> Any:
    return Starts((0, 1.5)), {"x": Squares()}


def documents(_config: ResolvedConfig) -> Any:
    return Starts(np.array([0, 3])), {"x": Starts([0, 7])}


def make_config(name: str, folder: Path, **train: Any) -> ResolvedConfig:
    config = Config(
        model=MODEL,
        train={"steps": 3, "microbatch_size": 2, "global_batch_size": 4, **train},
        data={"factory": f"{__name__}:{name}"},
        checkpoint={"interval": -1},
        run={"dir": str(folder / "run"), "plain": True},
        debug={"trace_step": -1},
    )
    return resolve(config, 1, vocab_size=100, cuda=False)


class Recorder(Callback):
    """Writes down its calls."""

    def __init__(self, config: ResolvedConfig) -> None:
        self.file = Path(str(config.run.dir)) / "calls"

    def on_start(self, trainer: Trainer) -> None:
        """Write the number of parameters."""
        self.file.write_text(f"{trainer.num_params}\n")

    def on_step(self, record: StepRecord) -> None:
        """Append the record."""
        with self.file.open("a") as file:
            file.write(record.to_json() + "\n")

    def on_end(self) -> None:
        """Append the end."""
        with self.file.open("a") as file:
            file.write("end\n")


def test_own_data_are_trained_on_and_callbacks_see_every_step(tmp_path: Path) -> None:
    config = make_config("squares", tmp_path, eval_interval=3, callbacks=[f"{__name__}:Recorder"])
    assert train(config, rank_context(0, 1)) == 0
    first, *records, last = (tmp_path / "run" / "calls").read_text().splitlines()
    assert (int(first) > 1000, last) == (True, "end")
    assert records == (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    end = json.loads(records[-1])
    assert end["validation_losses"]["first"] == end["validation_losses"]["second"]
    assert end["epochs"] == {"training": 1.2}
    data = load_run_data(config)
    assert data.train.sample(3).tokens.tolist() == [9, 10, 11, 12, 13, 14, 15, 16]
    assert 3.0 < data.unigram_entropy < 4.6


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("missing", "module .* has no missing"),
        ("not_a_pair", "must return a pair of training samples and a mapping .* got a Squares"),
        (
            "no_source",
            r"must have a positive num_samples and a method sample.*, got a list",
        ),
        ("too_long", r"tokens of sample 0 must be an int64 array of shape \(8,\) \(model.seq_len"),
        ("too_high", r"token ids of sample 10 must be in 0 to 99 \(model.vocab_size\), got 100 to"),
        ("no_validation", "returned no validation set; return one, or set train.eval_interval = 0"),
    ],
)
def test_bad_data_of_ones_own_are_one_sentence(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(MegacoreError, match=message) as error:
        load_run_data(make_config(name, tmp_path))
    assert str(error.value).startswith("data.factory = ")


@pytest.mark.parametrize(
    ("name", "message", "needs_mask"),
    [
        ("no_starts", r"must begin with 0, got \[\]", True),
        ("late_start", r"must begin with 0, got \[3\]", True),
        ("start_after_the_end", "must be below the 8 tokens of the sample, got 20", False),
        ("empty_document", "must rise, each document having a token, got 4 after 4", False),
        ("start_between_tokens", "must be integers: 'float' object cannot", False),
    ],
)
def test_starts_of_documents_of_ones_own_are_checked(
    name: str, message: str, needs_mask: bool, tmp_path: Path
) -> None:
    plain = make_config(name, tmp_path)
    masked = replace_data(plain, document_mask=True)
    with pytest.raises(MegacoreError, match=f"document_starts of sample 0 {message}"):
        load_run_data(masked)
    if needs_mask:
        assert load_run_data(plain).train.sample(0).tokens.tolist() == list(range(8))
    else:
        with pytest.raises(MegacoreError, match=f"document_starts of sample 0 {message}"):
            load_run_data(plain)


def replace_data(config: ResolvedConfig, **data: Any) -> ResolvedConfig:
    return config.model_copy(update={"data": config.data.model_copy(update=data)})


def test_documents_of_ones_own_are_trained_on(tmp_path: Path) -> None:
    config = replace_data(make_config("documents", tmp_path), document_mask=True)
    assert load_run_data(config).train.sample(0).document_starts == (0, 3)
    assert train(config, rank_context(0, 1)) == 0
