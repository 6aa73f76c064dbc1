"""A model of one's own under ``megacore train``: the example in several layouts, end to end."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import pytest
import torch

from megatrain.cli import main
from megatrain.config import load_config, resolve
from megatrain.train.trainer import build_trainer
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks
from tests.support.jobs import Ended, start_function

pytestmark = pytest.mark.dist

EXAMPLE = Path(__file__).parents[2] / "examples" / "own_model"
STEPS = 6
SMALLER = {"train.global_batch_size": "8", "train.microbatch_size": "2", "model.seq_length": "16"}
ALONE = {"parallel.pp": "1", "parallel.tp": "1", "parallel.ep": "1"}
LAYOUTS = {
    "as in the file": (4, {}),
    "sequence parallel": (4, {"parallel.sequence_parallel": "true"}),
    "zero bubble": (4, {"pipeline.schedule": "zb_h1"}),
    "interleaved": (4, {"pipeline.schedule": "interleaved_1f1b", "pipeline.num_chunks": "2"}),
    "dualpipe": (4, {"pipeline.schedule": "dualpipe", "train.microbatch_size": "1"}),
    "dp2 tp2, overlaps": (
        4,
        {
            "parallel.pp": "1",
            "optimizer.overlap": "all",
        },
    ),
    "overlapped experts": (
        4,
        {
            "pipeline.schedule": "interleaved_1f1b",
            "pipeline.num_chunks": "2",
            "pipeline.overlap_moe": "true",
        },
    ),
    "tied": (4, {"model.tie_embeddings": "true"}),
    "etp2": (4, {"parallel.etp": "2", "parallel.ep": "1"}),
    "static": (2, {"parallel.pp": "1", "moe.dispatcher": "static"}),
}


def losses(_rank: int, world_size: int, settings: dict[str, str]) -> list[float]:
    changes = list({**SMALLER, **settings, "train.steps": str(STEPS)}.items())
    config = load_config(EXAMPLE / "train.toml", changes)
    config = resolve(config, world_size, vocab_size=256, cuda=False)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    return [
        *(trainer.train_step(step).loss for step in range(STEPS)),
        *(each.loss for each in trainer.evaluate().values()),
    ]


@cache
def losses_alone(tied: bool, microbatch_size: str) -> list[float]:
    changes = {"model.tie_embeddings": str(tied), "train.microbatch_size": microbatch_size}
    return losses(0, 1, {**ALONE, **changes})


@pytest.mark.parametrize(
    "layout", representatives(LAYOUTS, ["as in the file", "dp2 tp2, overlaps"])
)
def test_the_example_has_the_losses_of_one_process(layout: str) -> None:
    world_size, settings = LAYOUTS[layout]
    alone = losses_alone(layout == "tied", settings.get("train.microbatch_size", "2"))
    together = run_ranks(world_size, losses, world_size, settings)[0]
    assert together == pytest.approx(alone, rel=1e-5)
    assert together[-2] < together[0] - 0.3


def test_the_example_is_one_short_file() -> None:
    assert len((EXAMPLE / "own_model.py").read_text().splitlines()) <= 120


def run(folder: Path, *arguments: str) -> Ended:
    return start_function(lambda: main(list(arguments)), folder).finish(timeout_s=60)


def test_the_commands_train_continue_evaluate_and_refuse(tmp_path: Path) -> None:
    """The run is found again by its own folder, although the module is in another one."""
    out = tmp_path / "run"
    settings = [f"--{key}={value}" for key, value in SMALLER.items()]
    settings += [f"--run.dir={out}", "--run.plain", "--train.eval_interval=2", "--train.steps=2"]
    train = ("train", str(EXAMPLE / "train.toml"), *settings)
    first = run(tmp_path, *train)
    assert first.code == 0, first.err
    alone = [f"--{key}={value}" for key, value in ALONE.items()]
    more = ("--nproc=1", "--train.steps=4", "--checkpoint.resume=auto")
    second = run(tmp_path, "train", str(out / "config.toml"), *alone, *more)
    assert second.code == 0, second.err
    assert "own_model:build" in (out / "report.html").read_text()
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    assert len(records) == 4
    assert all("tflops_per_device" not in record for record in records)

    found = run(tmp_path, "eval", str(out), "--json")
    assert found.code == 0, found.err
    assert json.loads(found.out)["loss"] == records[-1]["validation_loss"]

    for command, expected in {
        ("generate", str(out), "--prompt", "x"): "generates text with its own GPT only",
        ("export-hf", str(out), str(tmp_path / "hf")): "no family of Hugging Face describes",
        ("plan", train[1], "--gpus", "8"): "counts the operations of megacore's GPT, not of model",
        (*train, "--graphs.mode=partial"): "graphs.mode = partial (--graphs.mode=partial) cannot",
        (*train, "--parallel.tp=1", "--parallel.cp=2"): "parallel.cp must be 1: this attention",
    }.items():
        ended = run(tmp_path, *command)
        assert ended.code == 2
        assert expected in ended.err
        assert ended.err.count("megacore: ") == 1
    planned = run(tmp_path, "plan", train[1], *settings)
    assert planned.code == 0, planned.err
    assert "264,320 parameters" in planned.out
