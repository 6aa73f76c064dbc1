"""Runs of the command with adapters, killed at random moments, have the steps of whole ones."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

from megatrain.checkpoint import load_full_weights
from megatrain.cli import main
from tests.support.jobs import Job, start_function

pytestmark = [pytest.mark.dist, pytest.mark.campaign]

NUM_KILLS, STEPS = 4, 60
CONFIG = """\
[model]
hidden_size = 32
num_layers = 2
num_heads = 4
seq_length = 64

[data]
tokenizer = "bytes"

[train]
microbatch_size = 2
global_batch_size = 8
eval_interval = 0

[run]
plain = true
"""
ADAPTED = ("--lora.rank=2", "--lora.dropout=0.1", "--optimizer.lr=1e-2", f"--train.steps={STEPS}")
SAVED = ("--checkpoint.interval=3", "--checkpoint.resume=auto")
LAYOUTS = [("--nproc=2", "--parallel.tp=2"), ("--nproc=2", "--parallel.pp=2"), ("--nproc=1",)]


def start(folder: Path, *arguments: str) -> Job:
    return start_function(lambda: main(list(arguments)), folder)


def run(folder: Path, *arguments: str) -> None:
    ended = start(folder, *arguments).finish(timeout_s=300)
    assert ended.code == 0, ended.err


def losses(run_dir: Path) -> list[float]:
    """Losses by step, whose last line may be incomplete."""
    metrics = run_dir / "metrics.jsonl"
    lines = metrics.read_text().rpartition("\n")[0].splitlines() if metrics.exists() else []
    return [json.loads(line)["loss"] for line in lines]


def kill(job: Job, rng: random.Random, run_dir: Path) -> None:
    """Kill a job, or one of its ranks, a while after its next step."""
    before, deadline = len(losses(run_dir)), time.monotonic() + 120
    while len(losses(run_dir)) <= before:  # not those after the checkpoint, which it does again
        assert time.monotonic() < deadline, "no step was done"
        time.sleep(0.005)
    time.sleep(rng.uniform(0.0, 0.1))
    ranks = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    if rng.random() < 0.5 and ranks:
        os.kill(int(rng.choice(ranks)), signal.SIGKILL)
        job.finish(timeout_s=60)
    else:
        for pid in [*map(int, ranks), job.pid]:
            os.kill(pid, signal.SIGKILL)
        os.waitpid(job.pid, 0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with settings, a text, pairs, a trained model and its log-probs of the pairs."""
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 50)
    rows = [{"prompt": f"{a}+{b}=", "chosen": str(a + b), "rejected": "no"} for a, b in PAIRS]
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "config.toml").write_text(CONFIG)
    base = f"--run.dir={tmp_path / 'base'}"
    text = f"--data.source={tmp_path / 'text.txt'}"
    run(tmp_path, "train", str(tmp_path / "config.toml"), text, base, "--train.steps=3")
    run(tmp_path, "eval", str(tmp_path / "base"), "--reference", str(tmp_path / "pairs.jsonl"))
    return tmp_path


PAIRS = [(a, b) for a in range(8) for b in range(8)]


@pytest.mark.parametrize("layouts", [LAYOUTS[:1], LAYOUTS], ids=["one layout", "other layouts"])
@pytest.mark.parametrize("kind", ["text", "pairs"])
def test_a_killed_run_with_adapters_goes_on_exactly(
    kind: str, layouts: list[tuple[str, ...]], folder: Path
) -> None:
    rng = random.Random(f"{kind} {len(layouts)}")
    data = [f"--data.source={folder / 'text.txt'}"]
    if kind == "pairs":
        data = [f"--data.source={folder / 'pairs.jsonl'}", "--preference.loss=sigmoid"]
        data += ["--data.split=1,0"]
    settings = [str(folder / "config.toml"), *data, *ADAPTED]
    settings += [f"--checkpoint.load_weights={folder / 'base'}"]
    whole, killed = folder / "whole", folder / "killed"
    run(folder, "train", *settings, *LAYOUTS[0], f"--run.dir={whole}")
    command = ["train", *settings, *SAVED, f"--run.dir={killed}"]
    for number in range(NUM_KILLS):
        kill(start(folder, *command, *layouts[number % len(layouts)]), rng, killed)
        assert 0 < len(losses(killed)) < STEPS, "the run was to be killed before its end"
    run(folder, *command, *layouts[NUM_KILLS % len(layouts)])
    expected, found = losses(whole), losses(killed)
    assert len(expected) == STEPS
    assert found == (expected if len(layouts) == 1 else pytest.approx(expected, rel=1e-5))
    before, after = (load_full_weights(each)[1] for each in (whole, killed))
    assert before.keys() == after.keys()
    for name, values in before.items():
        tolerance = 0.0 if len(layouts) == 1 else 1e-4
        torch.testing.assert_close(after[name], values, rtol=tolerance, atol=tolerance, msg=name)
