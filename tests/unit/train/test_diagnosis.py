"""The first non-finite value of a step is found where it was planted."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.moe import GroupedExperts, MoELayer
from megacore.parallel.process_groups import ProcessGroups
from megatrain.config import ModelConfig, MoEConfig
from megatrain.models import GPTChunk
from megatrain.train.diagnosis import NonFinite, NonFiniteSearch, first_of_all
from megatrain.train.trainer import Trainer, build_trainer
from tests.support.configs import FOUR_LAYERS, changed_config


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 200)
    sections = {
        "model": FOUR_LAYERS,
        "data": {"source": str(tmp_path / "text.txt"), "tokenizer": "bytes"},
        "train": {"microbatch_size": 1, "global_batch_size": 2, "eval_interval": 0},
    }
    config = changed_config(1, sections, {"run.dir": str(tmp_path)})
    return build_trainer(config, world_size=1, device=torch.device("cpu"))


def _params(trainer: Trainer) -> dict[str, torch.nn.Parameter]:
    return {info.name: param for info, param in trainer.chunks[0].param_infos()}


def _search(trainer: Trainer) -> tuple[NonFinite | None, bool]:
    search = NonFiniteSearch(trainer.chunks, trainer.optimizer, rank=0)
    metrics = trainer.train_step(0, search=search)
    return search.found, metrics.skipped


def test_a_sound_step_has_none_and_is_not_changed(trainer: Trainer) -> None:
    assert _search(trainer) == (None, False)
    [chunk] = trainer.chunks
    assert not any(module._forward_hooks for module in chunk.modules())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_is_named_though_everything_after_it_is_not_finite(
    trainer: Trainer, value: float
) -> None:
    with torch.no_grad():
        _params(trainer)["layers.2.mlp.norm"].fill_(value)
    found, skipped = _search(trainer)
    assert str(found) == "rank 0, weight layers.2.mlp.norm"
    assert skipped


def test_the_first_layer_of_the_forward_pass_is_named(trainer: Trainer) -> None:
    def spoil(_module: Any, _inputs: Any, output: Any) -> Any:
        return output * math.inf

    trainer.chunks[0].layers[1].attention.register_forward_hook(spoil)
    found, skipped = _search(trainer)
    assert str(found) == "rank 0, output of layers.1.attention"
    assert skipped


def test_the_last_layer_with_a_spoiled_gradient_is_named(trainer: Trainer) -> None:
    for name in ("layers.1.mlp.norm", "layers.3.mlp.norm"):
        _params(trainer)[name].register_hook(lambda grad: grad * math.nan)
    found, skipped = _search(trainer)
    assert str(found) == "rank 0, gradient of layers.3.mlp.norm"
    assert skipped


def test_of_all_ranks_the_first_in_the_order_of_the_step_is_told() -> None:
    late = NonFinite(phase=2, order=-3, rank=0, name="layers.3.w")
    early = NonFinite(phase=1, order=2, rank=1, name="layers.2")
    assert min(late, early) == early
    world = ProcessGroups.single().world
    assert first_of_all(early, world) == "the first non-finite value: rank 1, output of layers.2"
    assert first_of_all(None, world).startswith("no rank had a non-finite weight")


def test_rows_that_did_not_arrive_are_not_searched() -> None:
    chunk = GPTChunk(
        ModelConfig(hidden_size=32, num_layers=1, vocab_size=256),
        layers=range(1),
        has_embedding=True,
        has_head=True,
        groups=ProcessGroups.single(),
        moe=MoEConfig(num_experts=4),
    )
    searched = [module for _, _, module in chunk.ordered_modules()]
    assert any(isinstance(module, MoELayer) for module in searched)
    assert not any(isinstance(module, GroupedExperts) for module in searched)
