"""Metrics that come from all ranks, and profiles of all ranks on one clock."""

from __future__ import annotations

import gzip
import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.cli import main
from megatrain.config import resolve
from megatrain.report import read_metrics
from megatrain.train.trainer import build_trainer
from megatrain.train.watch import INTERVAL, RunWatch
from tests.dist.test_invariance import make_config
from tests.support.distributed import run_ranks
from tests.support.jobs import start_command

pytestmark = pytest.mark.dist

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {}),
    "dp2 gather overlapped": (2, {"optimizer.overlap": "params"}),
    "tp2 pp2, tied": (4, {"parallel.tp": 2, "parallel.pp": 2}),
    "dp2, one rank slow": (2, {}),
}


def watch(rank: int, world_size: int, changes: dict[str, Any], slow: int) -> list[dict[str, Any]]:
    config = make_config(world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    if rank == slow:
        fetch = trainer.eager.fetch

        def fetch_slowly(*args: Any) -> Any:
            time.sleep(0.1)
            return fetch(*args)

        trainer.eager.fetch = fetch_slowly  # type: ignore[method-assign]
    own = RunWatch(trainer)
    values = []
    for step in range(INTERVAL):
        own.before_step(step)
        values.append(own.measure(step, trainer.train_step(step)))
    return values


@pytest.fixture(scope="module")
def norm() -> float:
    """Of the initial weights, each counted once."""
    config = make_config(1, {})
    trainer = build_trainer(
        resolve(config, 1, vocab_size=256, cuda=False), world_size=1, device=torch.device("cpu")
    )
    weights = [weight.detach() for chunk in trainer.chunks for _, weight in chunk.param_infos()]
    return math.sqrt(sum(float(weight.double().square().sum()) for weight in weights))


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_rank_has_the_metrics_of_all(name: str, norm: float) -> None:
    world_size, changes = LAYOUTS[name]
    slow = 1 if "slow" in name else -1
    by_rank = run_ranks(world_size, watch, world_size, changes, slow)
    for values in by_rank:
        assert values[0]["param_norm"] == pytest.approx(norm, rel=1e-6)
        assert "param_norm" not in values[1]
    shared = [key for key in by_rank[0][-1] if key.startswith(("memory", "slowest"))]
    assert len(shared) == 5
    assert all(
        values[step].get(key) == by_rank[0][step].get(key)
        for values in by_rank
        for step in range(INTERVAL)
        for key in shared
    ), "ranks disagree"
    if slow >= 0:
        assert by_rank[0][-1]["slowest_rank"] == slow
        assert by_rank[0][-1]["slowest_rank_ratio"] > 1.2
        # The other rank waits for it, in the reduction of gradients.
        assert by_rank[0][-1]["time_grad_reduce_s"] > 0.05
    if changes.get("parallel.pp") == 2:
        assert max(values[-1]["time_pipeline_wait_s"] for values in by_rank) > 0


def test_a_profiled_run_has_one_trace_of_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    (tmp_path / "run.toml").write_text(
        "[model]\nhidden_size = 32\nseq_length = 16\n[parallel]\npp = 2\n"
        "[train]\nsteps = 4\nmicrobatch_size = 4\nglobal_batch_size = 8\n"
        '[debug]\nprofile_steps = "2-6"\n'
        f'[data]\nsource = "{tmp_path}/text.txt"\n'
        f'[run]\ndir = "{tmp_path}/run"\nplain = true\ncalibration = "h100"\n'
    )
    path, folder = str(tmp_path / "run.toml"), tmp_path / "run"
    assert main(["train", path, "--nproc=2", "--train.steps=5"]) == 2
    assert "debug.profile_steps must be one step" in capsys.readouterr().err
    # Not forked from this process: torch's profiler does not survive a fork after its first use.
    command = [sys.executable, "-m", "megacore", "train", path, "--nproc=2"]
    ended = start_command([*command, "--debug.profile_steps=2-3"], tmp_path).finish(timeout_s=60)
    assert ended.code == 0, ended.err
    assert "USDT" not in ended.err + ended.out
    assert ended.out.count("megacore trace merge") == 1
    assert all(0 < record["mfu"] < 1 for record in read_metrics(folder / "metrics.jsonl"))
    assert main(["trace", "merge", str(folder)]) == 0
    with gzip.open(folder / "profile" / "all_ranks.json.gz", "rt") as file:
        events = json.load(file)["traceEvents"]
    # By rank and name, the last of two steps.
    spans = {
        (event["pid"] // 1000, event["name"]): event
        for event in events
        if event["ph"] == "X" and event.get("cat") == "user_annotation"
    }
    names = {name for _, name in spans}
    for microbatch in range(2):
        for action in ("0F", "0B", "1F", "1B"):
            assert f"pipeline {action}{microbatch}" in names
        # The second stage starts after the first one has ended.
        first = spans[0, f"pipeline 0F{microbatch}"]
        second = spans[1, f"pipeline 1F{microbatch}"]
        assert second["ts"] >= first["ts"] + first["dur"]
    assert {"data", "passes", "pipeline_wait", "grad_reduce", "optimizer"} <= names
