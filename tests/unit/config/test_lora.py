"""Mistakes of ``[lora]`` are one sentence, for runs and for plans."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from megacore.errors import ConfigError
from megatrain.config import LoraConfig
from megatrain.plan.run_plan import plan_run
from megatrain.train.trainer import build_trainer
from tests.support.configs import FOUR_LAYERS, changed_config

BASE: dict[str, dict[str, Any]] = {
    "model": {**FOUR_LAYERS, "tie_embeddings": False},
    "train": {"steps": 2, "microbatch_size": 2, "global_batch_size": 4, "eval_interval": 0},
    "lora": {"rank": 2},
}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"rank": 0}, r"rank must be greater than or equal to 1, got 0"),
        ({"alpha": 8.0}, r"alpha is of adapters, but rank is not set; set rank to 1 or more"),
        ({"rank": 2, "alpha": 0.0}, r"alpha must be greater than 0, got 0"),
        ({"rank": 2, "targets": []}, r"targets must be a list of 1 or more, got \[\]"),
    ],
)
def test_values_have_ranges(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**values)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"lora.targets": ["q", "q_proj"]},
            "lora.targets must match names of projections, but 'q_proj' matches none of 28, whose "
            "names end in down, gate, k, output, q, up, v",
        ),
        (
            {"lora.targets": ["router"]},
            "lora.targets must match names of projections, but 'router' matches none of 28, whose "
            "names end in down, gate, k, output, q, up, v",
        ),
        (
            {"lora.modules_to_save": ["lm_head"]},
            "lora.modules_to_save must match names of parameters, but 'lm_head' matches none of 27;"
            " nearest: head, embedding, final_norm",
        ),
        (
            {"lora.modules_to_save": ["head"], "model.tie_embeddings": True},
            "lora.modules_to_save must match names of parameters, but 'head' matches none: the "
            "output layer has the weights of the embedding (model.tie_embeddings = true); name "
            "'embedding', which trains both",
        ),
        (
            {"optimizer.groups": [{"pattern": "*.qkv", "lr_scale": 2.0}]},
            "optimizer.groups: the pattern '*.qkv' matches none of the 56 parameters; nearest: "
            "layers.0.attention.k.lora_a, layers.0.attention.k.lora_b, "
            "layers.0.attention.output.lora_a",
        ),
    ],
)
def test_mistakes_are_one_sentence(changes: dict[str, Any], message: str) -> None:
    config = changed_config(1, BASE, changes)
    whole = f"^{re.escape(message)}$"
    with pytest.raises(ConfigError, match=whole):
        build_trainer(config, world_size=1, device=torch.device("cpu"))
    with pytest.raises(ConfigError, match=whole):
        plan_run(config, 1)


def test_what_is_trained_are_adapters_and_modules_to_save() -> None:
    changes = {
        "lora.targets": ["q", "mlp.down"],
        "lora.modules_to_save": ["head"],
        "optimizer.groups": [{"pattern": "*.lora_b", "lr_scale": 16.0}],  # LoRA+
    }
    config = changed_config(1, BASE, changes)
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    trained = {info.name for buffer in trainer.optimizer.buffers for info, _ in buffer.params}
    projections = ("attention.q", "mlp.down")
    assert trained == {"head"} | {
        f"layers.{layer}.{name}.lora_{factor}"
        for layer in range(4)
        for name in projections
        for factor in "ab"
    }
    assert "layers.0.attention.qkv" in {info.name for info, _ in trainer.frozen.params}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_plan_has_the_bytes_of_a_trainer(dtype: str) -> None:
    config = changed_config(1, BASE, {"train.dtype": dtype, "lora.modules_to_save": ["head"]})
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    [rank] = plan_run(config, 1).ranks
    buffers = trainer.optimizer.buffers
    assert rank.optimizer_bytes == trainer.optimizer.state_bytes
    assert rank.grad_bytes == sum(buffer.grad_data.nbytes for buffer in buffers)
    weights = sum(buffer.param_data.nbytes for buffer in buffers) + trainer.frozen.num_bytes
    assert rank.param_bytes == weights


@pytest.mark.parametrize(("init", "bound"), [("kaiming_uniform", 32**-0.5), ("gaussian", None)])
def test_initial_values_are_those_of_peft(init: str, bound: float | None) -> None:
    config = changed_config(1, BASE, {"lora.init": init, "lora.rank": 16})
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    params = {
        info.name: param for buffer in trainer.optimizer.buffers for info, param in buffer.params
    }
    first = torch.stack([params[f"layers.{layer}.attention.q.lora_a"] for layer in range(4)])
    if bound is not None:
        assert 0.95 * bound < first.abs().max() <= bound
    assert first.std().item() == pytest.approx(1 / 16 if bound is None else bound / 3**0.5, rel=0.1)
    assert all(not param.any() for name, param in params.items() if name.endswith("lora_b"))
    assert not torch.equal(first[0], first[1])
