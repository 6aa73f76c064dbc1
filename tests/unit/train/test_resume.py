"""What a resumed run goes on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megacore.checkpoint import read_index
from megacore.config import Config, resolve
from megacore.report import read_run, write_report
from megacore.train import trainer as trainer_module
from megacore.train.loop import train
from tests.support.configs import rank_context


def _train(folder: Path, *, steps: int, batch_size: int, resume: str | None = None) -> None:
    config = Config(
        model={"hidden_size": 16, "num_layers": 1, "num_heads": 2, "seq_length": 8},
        train={
            "steps": steps,
            "microbatch_size": 1,
            "global_batch_size": batch_size,
            "eval_interval": 0,
        },
        data={"source": str(folder / "text.txt"), "tokenizer": "bytes"},
        checkpoint={"interval": 1, "keep": 9, "resume": resume},
        run={"dir": str(folder / "run"), "plain": True},
        debug={"trace_step": -1},
    )
    config = resolve(config, 1, vocab_size=256, cuda=False)
    context = rank_context(0, 1)
    assert train(config, context) == 0


def test_with_another_batch_size_the_data_go_on_where_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    consumed: list[int] = []
    real = trainer_module.microbatch

    def microbatch(*args: Any, **kwargs: Any) -> Any:
        batch = real(*args, **kwargs)
        consumed.extend(batch.sample_ids.tolist())
        return batch

    monkeypatch.setattr(trainer_module, "microbatch", microbatch)
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    _train(tmp_path, steps=2, batch_size=6)
    _train(tmp_path, steps=4, batch_size=4, resume="auto")
    _train(tmp_path, steps=5, batch_size=8, resume="auto")
    assert consumed == list(range(2 * 6 + 2 * 4 + 8))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["samples"] for line in lines] == [6, 12, 16, 20, 28]
    newest = tmp_path / "run" / "checkpoints" / "step_00000005"
    assert read_index(newest).state.samples == 28


def test_a_run_that_fails_leaves_what_a_report_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)

    real = trainer_module.Trainer.train_step

    def fail_in(last: int) -> None:
        def train_step(self: Any, step: int, **options: Any) -> Any:
            if step == last:
                raise KeyboardInterrupt
            return real(self, step, **options)

        with monkeypatch.context() as patch:
            patch.setattr(trainer_module.Trainer, "train_step", train_step)
            with pytest.raises(KeyboardInterrupt):
                _train(tmp_path, steps=2, batch_size=6)

    fail_in(0)
    assert not (tmp_path / "run" / "run.json").exists()
    fail_in(1)
    assert not (tmp_path / "run" / "previous-1").exists(), "the first run left nothing to keep"
    assert write_report(tmp_path / "run").is_file()
    assert read_run(tmp_path / "run").info.wall_time_s is None
    _train(tmp_path, steps=2, batch_size=6)
    assert read_run(tmp_path / "run").info.wall_time_s is not None
