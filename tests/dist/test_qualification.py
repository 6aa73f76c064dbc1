"""Kernels with faults on one rank: all ranks replace them, and training goes on."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.ops.kernel_choice import MEASURED
from megacore.qualification import choose_kernels
from megatrain.checkpoint import load_full_weights, read_index
from megatrain.config import Config, resolve
from megatrain.report import read_run
from megatrain.train import kernels
from megatrain.train.loop import train
from tests.support.configs import rank_context
from tests.support.distributed import run_ranks


def train_config(folder: Path, world_size: int, **run: Any) -> Any:
    steps, resume = run.pop("steps", 3), run.pop("resume", None)
    sections: dict[str, Any] = {
        # Products of 128 x 256 x 256 and more: the ways to compute them differ in the last bits.
        "model": {"hidden_size": 256, "num_layers": 2, "num_heads": 4, "seq_length": 64},
        "moe": {"num_experts": 4, "top_k": 2},
        "parallel": {"ep": world_size},
        "train": {
            **{"steps": steps, "microbatch_size": 2, "global_batch_size": 2 * world_size},
            "eval_interval": 0,
        },
        "optimizer": {"schedule": "constant"},
        "data": {"source": str(folder.parent / "text.txt"), "tokenizer": "bytes"},
        "checkpoint": {"interval": 2, "keep": 9, "resume": resume},
        "run": {"dir": str(folder), "plain": True} | run,
        "debug": {"trace_step": -1},
    }
    return resolve(Config(**sections), world_size, vocab_size=256, cuda=False)


def run_rank(rank: int, folder: Path, faulty: int | None, run: dict[str, Any]) -> list[str]:
    """Train; the kernels of one rank have faults, which its child process finds."""
    imports = ()
    if rank == faulty:
        from tests.support import planted_kernels

        imports = (planted_kernels.__name__,)
    cache = folder.parent / f"verdicts of rank {rank}"
    kernels.choose_kernels = functools.partial(choose_kernels, imports=imports, folder=cache)  # type: ignore[assignment]
    assert train(train_config(folder, 2, **run), rank_context(rank, 2)) == 0
    from megacore.ops.kernel_choice import left_operations

    return sorted(left_operations("cpu"))


def losses(folder: Path) -> list[float | None]:
    return [
        json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]


def test_faulty_kernels_are_replaced_on_all_ranks(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    for rank in (0, 1):
        (tmp_path / f"verdicts of rank {rank}").mkdir()
    left, other = run_ranks(2, run_rank, tmp_path / "run", 1, {}, timeout_s=240.0)
    assert left == other
    assert {"add_rms_norm", "swiglu_backward", "linear.float32.large.forward"} <= {*left}
    found = read_run(tmp_path / "run")
    text = found.info.environment["choice of kernels"]
    assert "31 operations by our kernels, 2 by torch (add_rms_norm on another rank" in text
    names = ["add_rms_norm", "swiglu_backward", *(name for name in left if name in MEASURED)]
    settings = {"kernels": "trust", "torch_operations": names}
    sound = run_ranks(2, run_rank, tmp_path / "sound", None, settings, timeout_s=240.0)
    assert sound == [left, left]
    # The slow kernel of products sums in another order than the sound one.
    assert losses(tmp_path / "run") == pytest.approx(losses(tmp_path / "sound"), rel=1e-5)


@pytest.fixture
def own_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "verdicts"
    folder.mkdir()
    own = functools.partial(choose_kernels, folder=folder)
    monkeypatch.setattr(kernels, "choose_kernels", own)
    return folder


def swap_times(folder: Path) -> None:
    """Let the measurements of all products say the contrary."""
    (path,) = folder.glob("*.json")
    verdict = json.loads(path.read_text())
    for times in (times for group in verdict["times"].values() for times in group.values()):
        times[:] = [1.0, 9.0] if times[0] >= times[1] else [9.0, 1.0]
    path.write_text(json.dumps(verdict))


def test_a_resumed_run_has_the_bits_of_an_unbroken_one(tmp_path: Path, own_verdicts: Path) -> None:
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 400)
    context = rank_context(0, 1)
    train(train_config(tmp_path / "whole", 1, steps=4), context)
    train(train_config(tmp_path / "parts", 1, steps=2), context)
    swap_times(own_verdicts)
    train(train_config(tmp_path / "parts", 1, steps=4, resume="auto"), context)
    train(train_config(tmp_path / "others", 1, steps=4), context)
    ends = [tmp_path / name / "checkpoints/step_00000004" for name in ("whole", "parts", "others")]
    states = [read_index(path).state.kernels for path in ends]
    assert states[0] == states[1] != states[2]
    whole, parts, others = (load_full_weights(path)[1] for path in ends)
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[name], parts[name]) for name in whole)
    assert not all(torch.equal(whole[name], others[name]) for name in whole)
