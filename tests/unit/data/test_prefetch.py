"""Microbatches made ahead by a thread are those that would be made without it."""

from __future__ import annotations

import gc
import threading
import time
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.errors import DataError
from megacore.parallel.batch import Microbatch
from megatrain.data import write_indexed
from megatrain.data.prefetch import Prefetch
from megatrain.train.trainer import Trainer, build_trainer
from tests.support.configs import FOUR_LAYERS, changed_config


class Maker:
    """Makes microbatches named by step and number, and notes which."""

    def __init__(self, *, bad_step: int = -1) -> None:
        self.made: list[tuple[int, int]] = []
        self.threads: set[int] = set()
        self._bad_step = bad_step

    def __call__(self, step: int, number: int) -> Microbatch:
        self.made.append((step, number))
        self.threads.add(threading.get_ident())
        if step == self._bad_step:
            raise DataError(f"x.bin: document 7 is bad at step {step}")
        ids = torch.tensor([100 * step + number])
        return Microbatch(tokens=ids[:, None], labels=None, sample_ids=ids, step=step)


@settings(max_examples=30, deadline=None)
@given(
    steps=st.lists(st.integers(0, 12), max_size=8),
    depth=st.integers(0, 4),
    count=st.integers(1, 3),
)
def test_any_order_of_steps_gives_their_microbatches(
    steps: list[int], depth: int, count: int
) -> None:
    source = Prefetch(Maker(), num_microbatches=count, end=10, depth=depth)
    for step in steps:
        found = [source(step, number) for number in range(count)]
        assert [batch.sample_ids.item() for batch in found] == [
            100 * step + n for n in range(count)
        ]
        assert all(batch.step == step for batch in found)


def test_a_bounded_number_of_steps_is_made_ahead_and_none_past_the_end() -> None:
    make = Maker()
    source = Prefetch(make, num_microbatches=2, end=5, depth=2)
    source(0, 0)
    until = time.monotonic() + 10
    while len(make.made) < 6 and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.02)
    assert sorted(make.made) == [(step, number) for step in range(3) for number in range(2)]
    for step in range(1, 5):
        source(step, 1)
    time.sleep(0.02)
    assert sorted(make.made) == [(step, number) for step in range(5) for number in range(2)]
    assert threading.get_ident() not in make.threads


def test_one_thread_makes_all_steps_and_ends_with_its_source() -> None:
    before = set(threading.enumerate())
    make = Maker()
    source = Prefetch(make, num_microbatches=1, end=9)
    for step in (0, 1, 2, 7, 3):
        source(step, 0)
    (thread,) = set(threading.enumerate()) - before
    assert make.threads == {thread.ident}
    del source
    gc.collect()
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_an_error_of_the_thread_is_raised_in_its_step() -> None:
    source = Prefetch(Maker(bad_step=2), num_microbatches=1, end=9, depth=3)
    source(0, 0)
    time.sleep(0.02)
    source(1, 0)
    with pytest.raises(DataError, match=r"x\.bin: document 7 is bad at step 2"):
        source(2, 0)


def make_trainer(source: str, **train: int) -> Trainer:
    base = {
        "model": {**FOUR_LAYERS},
        "train": {"steps": 6, "microbatch_size": 1, "global_batch_size": 2, "eval_interval": 0},
        "data": {"source": source, "split": "1,0"},
    }
    changes = {f"train.{key}": value for key, value in train.items()}
    return build_trainer(changed_config(1, base, changes), world_size=1, device=torch.device("cpu"))


def test_training_reads_ahead_the_samples_that_it_would_read(tmp_path: Path) -> None:
    write_indexed(tmp_path / "x", [list(range(200))] * 9, vocab_size=256)
    trainer = make_trainer(str(tmp_path / "x"))
    metrics = [trainer.train_step(step) for step in range(2)]
    assert all(0 <= step.phases["data"] < step.step_time_s for step in metrics)
    plain = make_trainer(str(tmp_path / "x"))
    batches = plain._batches(plain.data.train)
    for step, found in enumerate(metrics):
        assert plain.step.train(step, batches, lr=plain.learning_rate(step)).loss == found.loss
    # Another step and offset, as after a resume with another batch size.
    offset = trainer.prefetched[0](5, 0)
    assert torch.equal(offset.tokens, batches(5, 0).tokens)
    trainer.train_step(2, sample_offset=3)
    moved = plain._batches(plain.data.train, 3)
    assert torch.equal(trainer.prefetched[3](2, 1).tokens, moved(2, 1).tokens)


def test_a_bad_token_read_ahead_is_named_with_its_file(tmp_path: Path) -> None:
    documents = [[1] * 40] * 8
    write_indexed(tmp_path / "x", documents, vocab_size=256)
    trainer = make_trainer(str(tmp_path / "x"), steps=20)
    trainer.train_step(0)
    made = len(trainer.prefetched[0]._ahead)
    wait(trainer.prefetched[0]._ahead.values())
    tokens = trainer.data.sources["x"].tokens
    with (tmp_path / "x.bin").open("r+b") as file:
        file.write(b"\xff\xff" * len(tokens))
    for step in range(1, made + 1):
        trainer.train_step(step)
    with pytest.raises(DataError, match=r"token id 65535 .*in document \d+ of .*x\.bin"):
        trainer.train_step(made + 1)
