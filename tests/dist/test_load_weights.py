"""Starting from weights alone: any source, any layout, a fresh optimizer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from megacore.errors import CheckpointError, MegacoreError
from megatrain.checkpoint import TrainState, load_full_weights, save_checkpoint
from megatrain.hf import sections_from_hf
from megatrain.hf.export_checkpoint import export_checkpoint
from megatrain.hf.import_checkpoint import import_checkpoint
from megatrain.hf_folder import read_config
from megatrain.train.initial_weights import load_initial_weights
from megatrain.train.trainer import Trainer, build_trainer
from tests.support.configs import FOUR_LAYERS, changed_config
from tests.support.distributed import run_ranks
from tests.support.hf_quantized import save_fp8, save_mxfp4

BASE: dict[str, dict[str, Any]] = {
    "model": {**FOUR_LAYERS, "tie_embeddings": False},
    "moe": {"num_experts": 4, "ffn_hidden_size": 16},
    # With seed 1234 two experts of a token differ by less than the rounding of layouts in step 24.
    "train": {
        "steps": 20,
        "microbatch_size": 2,
        "global_batch_size": 8,
        "eval_interval": 0,
        "seed": 2,
    },
    "optimizer": {"lr": 2e-3, "warmup": 0, "schedule": "constant"},
}
LAYOUT = {"parallel.tp": 2, "parallel.pp": 2, "parallel.etp": 1, "parallel.ep": 2}


def make_trainer(world_size: int, changes: dict[str, Any]) -> Trainer:
    config = changed_config(world_size, BASE, changes)
    return build_trainer(config, world_size=world_size, device=torch.device("cpu"))


def train(
    _rank: int,
    world_size: int,
    changes: dict[str, Any],
    source: Path | None,
    steps: range,
    out: Path | None,
) -> list[float]:
    """Losses of some steps from given weights, and a checkpoint at their end."""
    trainer = make_trainer(world_size, changes)
    if source is not None:
        assert load_initial_weights(trainer, source) == ()
    losses = [trainer.train_step(step).loss for step in steps]
    if out is not None:
        save_checkpoint(
            out / "checkpoints",
            trainer.pieces(),
            state=TrainState(step=steps.stop, samples=0, optimizer=trainer.optimizer.scalars()),
            config=trainer.config.model_dump(),
            groups=trainer.groups,
        )
    return losses


def fresh_optimizer_in_the_middle() -> list[float]:
    """Losses of 40 steps in one process whose moments are those of a new run after 20."""
    first = make_trainer(1, {})
    losses = [first.train_step(step).loss for step in range(20)]
    second = make_trainer(1, {})
    weights = {piece.info.name: piece.tensors["main_param"] for piece in first.pieces()}
    for piece in second.pieces():
        piece.tensors["main_param"].copy_(weights[piece.info.name])
    second.optimizer.finish_load(0)
    return losses + [second.train_step(step).loss for step in range(20, 40)]


@pytest.mark.dist
@pytest.mark.campaign
def test_twenty_steps_an_export_an_import_and_twenty_steps_are_forty(tmp_path: Path) -> None:
    expected = fresh_optimizer_in_the_middle()
    run, folder, again = tmp_path / "run", tmp_path / "hf", tmp_path / "again"
    losses = run_ranks(4, train, 4, LAYOUT, None, range(20), run)[0]
    assert losses == pytest.approx(expected[:20], rel=1e-5)
    export_checkpoint(run, folder)
    import_checkpoint(folder, again)
    before, after = load_full_weights(run)[1], load_full_weights(again)[1]
    assert all(torch.equal(before[name], after[name]) for name in before)
    ways = [
        run_ranks(4, train, 4, LAYOUT, source, range(20, 40), None)[0]
        for source in (folder, again, run)
    ]
    assert ways[0] == ways[1] == ways[2], "each source has the same bits"
    assert ways[0] == pytest.approx(expected[20:], rel=1e-5)


@pytest.mark.dist
def test_weights_of_another_model_are_refused_with_the_setting_that_differs(
    tmp_path: Path,
) -> None:
    train(0, 1, {}, None, range(1), tmp_path / "run")
    export_checkpoint(tmp_path / "run", tmp_path / "hf")
    other = make_trainer(1, {"moe.num_experts": 8})
    with pytest.raises(MegacoreError, match=r"moe\.num_experts = 4 instead of 8"):
        load_initial_weights(other, tmp_path / "hf")
    with pytest.raises(CheckpointError, match=r"moe\.num_experts is 4 there and 8 here"):
        load_initial_weights(other, tmp_path / "run")
    fewer = make_trainer(1, {"model.num_layers": 2})
    with pytest.raises(MegacoreError, match=r"tensors have no place .* model\.num_layers = 4 inst"):
        load_initial_weights(fewer, tmp_path / "hf")
    faster = make_trainer(1, {"model.rope_base": 500.0})
    (note,) = load_initial_weights(faster, tmp_path / "hf")
    assert "model.rope_base = 10000.0 instead of 500.0: the run uses the latter" in note
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_initial_weights(other, tmp_path / "nowhere")


def parts_differ(_rank: int, world_size: int, changes: dict[str, Any], folders: list[Path]) -> int:
    """Number of this rank's parts with other values from the second folder than from the first."""
    model, moe = sections_from_hf(read_config(folders[0]))
    base = {"model": model.model_dump(), "moe": moe.model_dump(), "train": BASE["train"]}
    config = changed_config(world_size, base, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    found = []
    for folder in folders:
        load_initial_weights(trainer, folder)
        found.append([piece.tensors["main_param"].clone() for piece in trainer.pieces()])
    assert any(part.count_nonzero() for part in found[0])
    return sum(not torch.equal(*parts) for parts in zip(*found, strict=True))


@pytest.mark.dist
@pytest.mark.parametrize("name", ["deepseek-v3", "gpt-oss"])
def test_ranks_get_their_parts_of_quantized_weights(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    quantized.mkdir()
    plain.mkdir()
    wanted = save_mxfp4(quantized) if name == "gpt-oss" else save_fp8(name, quantized)
    save_file(wanted, plain / "model.safetensors")
    config = read_config(quantized)
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    for world_size, sizes in {
        2: {"tp": 2, "etp": 1, "ep": 2},
        4: {"tp": 2, "etp": 2, "ep": 2},
    }.items():
        changes = {f"parallel.{key}": value for key, value in sizes.items()}
        found = run_ranks(world_size, parts_differ, world_size, changes, [plain, quantized])
        assert found == [0] * world_size
