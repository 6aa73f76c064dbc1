"""A run that was saved on one layout goes on with the same losses on any other."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.train.loop import train
from tests.support.configs import changed_config, rank_context
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

STEPS, SAVED = 6, 3
TEXT = "The quick brown fox jumps over the lazy dog. " * 200
# 24 sequences are divisible by 1, 2, 3 and 8 ranks, 24 vocabulary rows by all of their tp.
SECTIONS: dict[str, dict[str, Any]] = {
    "model": {
        "hidden_size": 32,
        "num_layers": 4,
        "num_heads": 4,
        "ffn_hidden_size": 64,
        "seq_length": 16,
        "dropout": 0.1,
    },
    "train": {"steps": STEPS, "microbatch_size": 1, "global_batch_size": 24, "eval_interval": 0},
    "optimizer": {"lr": 5e-3, "warmup": 2},
}


def _train(rank: int, world_size: int, folder: Path, settings: dict[str, Any]) -> None:
    data = {"source": str(folder / "text.txt"), "tokenizer": "bytes"}
    sections = {**SECTIONS, "data": data}
    config = changed_config(world_size, sections, settings)
    context = rank_context(rank, world_size)
    assert train(config, context) == 0


def _losses(world_size: int, folder: Path, name: str, **settings: Any) -> dict[int, float]:
    chosen = {key.replace("__", "."): value for key, value in settings.items()}
    chosen["run.dir"] = str(folder / name)
    run_ranks(world_size, _train, world_size, folder, chosen, timeout_s=200)
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    return {record["step"] - 1: record["loss"] for record in records}


TWO_COPIES = {"parallel__pp": 2, "pipeline__schedule": "dualpipe"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resume")
    (folder / "text.txt").write_text(TEXT)
    return folder


@pytest.fixture(scope="module")
def saved(folder: Path) -> dict[int, float]:
    """Losses of a run on tp2 x pp2 that saves in the background."""
    settings = {"checkpoint__interval": SAVED, "checkpoint__async": True, "checkpoint__keep": 5}
    losses = _losses(4, folder, "saved", parallel__tp=2, parallel__pp=2, **settings)
    assert sorted(losses) == list(range(STEPS))
    return losses


@pytest.fixture(scope="module")
def saved_copies(folder: Path) -> dict[int, float]:
    """Losses of a run with two copies of the model in its pipeline."""
    return _losses(
        2, folder, "copies", checkpoint__interval=SAVED, checkpoint__keep=5, **TWO_COPIES
    )


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (4, {"parallel__tp": 2, "parallel__pp": 2}),
        (1, {}),
        (2, {}),
        (3, {}),
        (8, {"parallel__tp": 2, "parallel__pp": 2}),
        (2, TWO_COPIES),
    ],
    ids=["tp2 pp2", "1", "dp2", "dp3", "tp2 pp2 dp2", "pp2, two copies"],
)
def test_resuming_on_another_layout_gives_the_same_losses(
    folder: Path, saved: dict[int, float], world_size: int, layout: dict[str, Any]
) -> None:
    path = folder / "saved" / "checkpoints" / f"step_{SAVED:08d}"
    name = f"on_{world_size}_{len(layout)}"
    losses = _losses(
        world_size, folder, name, checkpoint__resume=str(path), checkpoint__interval=-1, **layout
    )
    expected = {step: saved[step] for step in range(SAVED, STEPS)}
    if world_size == 4:
        assert losses == expected  # every bit
    else:
        assert losses == pytest.approx(expected, rel=1e-5)
    assert saved[STEPS - 1] < saved[0] - 0.3, "the model must have learnt something"


@pytest.mark.parametrize(
    ("world_size", "layout"), [(2, TWO_COPIES), (1, {}), (4, TWO_COPIES)], ids=["2", "1", "dp2"]
)
def test_of_two_copies_of_the_model_one_is_saved(
    folder: Path, saved_copies: dict[int, float], world_size: int, layout: dict[str, Any]
) -> None:
    path = folder / "copies" / "checkpoints" / f"step_{SAVED:08d}"
    settings = {"checkpoint__resume": str(path), "checkpoint__interval": -1}
    losses = _losses(world_size, folder, f"of_copies_{world_size}", **settings, **layout)
    expected = {step: saved_copies[step] for step in range(SAVED, STEPS)}
    if world_size == 2:
        assert losses == expected  # every bit
    else:
        assert losses == pytest.approx(expected, rel=1e-6)


def test_a_checkpoint_of_two_copies_is_as_large_as_one_of_one_copy(
    folder: Path, saved: dict[int, float], saved_copies: dict[int, float]
) -> None:
    assert saved[0] == pytest.approx(saved_copies[0], rel=1e-6)
    folders = [folder / name / "checkpoints" / f"step_{SAVED:08d}" for name in ("saved", "copies")]
    of_one, of_two = (sum(path.stat().st_size for path in at.glob("*.distcp")) for at in folders)
    assert 0 < of_two < 1.1 * of_one
