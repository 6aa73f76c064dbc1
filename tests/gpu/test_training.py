"""Training on a GPU: the losses of the CPU, bf16, one rank under the launcher with NCCL."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config import Config, resolve
from megatrain.train.trainer import build_trainer
from megatrain.train.watch import RunWatch
from tests.support.jobs import start_command

pytestmark = pytest.mark.gpu

STEPS = 20
ROOT = Path(__file__).parents[2]


def train(device: str, **changes: dict[str, Any]) -> list[float]:
    sections: dict[str, dict[str, Any]] = {
        "model": {
            "hidden_size": 64,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "seq_length": 32,
            "dropout": 0.1,
        },
        "train": {"steps": STEPS, "microbatch_size": 4, "global_batch_size": 16},
        "optimizer": {"lr": 2e-3, "warmup": 5},
    }
    for name, values in changes.items():
        sections[name] = {**sections.get(name, {}), **values}
    config = resolve(Config(**sections), 1, vocab_size=256, cuda=device == "cuda")
    trainer = build_trainer(config, world_size=1, device=torch.device(device))
    losses = [trainer.train_step(step).loss for step in range(STEPS)]
    return [*losses, trainer.mean_validation_loss(trainer.evaluate())]


def test_losses_in_fp32_are_those_of_the_cpu() -> None:
    assert train("cuda") == pytest.approx(train("cpu"), rel=1e-4)


def test_metrics_measure_the_gpu() -> None:
    sections: dict[str, Any] = {
        "model": {"hidden_size": 256, "num_heads": 4, "seq_length": 64},
        "train": {"steps": 4, "microbatch_size": 4, "global_batch_size": 16},
    }
    config = resolve(Config(**sections), 1, vocab_size=256, cuda=True)
    trainer = build_trainer(config, world_size=1, device=torch.device("cuda"))
    watch = RunWatch(trainer)
    for step in range(3):
        watch.before_step(step)
        metrics = trainer.train_step(step)
        values = watch.measure(step, metrics)
    times = {name: value for name, value in values.items() if name.startswith("time_")}
    assert min(times["time_forward_backward_s"], times["time_optimizer_s"]) > 0
    assert sum(times.values()) <= 1.05 * metrics.step_time_s
    allocated, peak = values["memory_allocated_bytes"], values["memory_peak_bytes"]
    assert 0 < allocated <= peak
    assert values["memory_reserved_bytes"] >= allocated


def test_bf16_learns_like_fp32() -> None:
    losses = train("cuda", train={"dtype": "bfloat16"})
    assert losses == pytest.approx(train("cuda"), rel=0.02)
    assert losses[-1] < losses[0] - 0.5


def test_the_command_trains_under_nccl(tmp_path: Path) -> None:
    arguments = [
        *(sys.executable, "-m", "megacore", "train", str(ROOT / "examples" / "demo.toml")),
        *(
            "--nproc",
            "1",
            "--parallel.tp=1",
            "--parallel.pp=1",
            "--parallel.ep=1",
            "--train.steps=20",
        ),
        f"--run.dir={tmp_path / 'run'}",
    ]
    ended = start_command(arguments, tmp_path).finish(timeout_s=100)
    assert ended.code == 0, ended.err
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    losses = [json.loads(line)["loss"] for line in lines]
    assert len(losses) == 20
    assert losses[-1] < losses[0] - 1.0
    assert (tmp_path / "run" / "report.html").is_file()
