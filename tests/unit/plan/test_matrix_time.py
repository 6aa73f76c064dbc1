"""Predictions of what an optimizer does: whole matrices, groups of parameters, frozen ones."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch

from megacore.optim.matrix_plan import units_of
from megatrain.config import Config, ResolvedConfig, resolve
from megatrain.dry_run import dry_run
from megatrain.plan.device import load_device
from megatrain.plan.forecast import Forecast, forecast
from megatrain.plan.matrix_time import matrix_bytes
from megatrain.plan.run_plan import _param_infos
from megatrain.plan.spec_from_config import model_spec, run_spec
from megatrain.plan.state import state_bytes
from megatrain.plan.updates import Updates, _units
from megatrain.train.trainer import build_trainer

MODEL = {
    "hidden_size": 64,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 192,
    "seq_length": 16,
    "vocab_size": 256,
}
EXPERTS = {
    "num_experts": 4,
    "top_k": 2,
    "ffn_hidden_size": 96,
    "shared_ffn_hidden_size": 80,
    "shared_gate": True,
    "layer_pattern": "d(e)",
}
LATENT = {"kv_rank": 32, "q_rank": 48, "nope_head_dim": 16, "rope_head_dim": 8, "v_head_dim": 16}


def config_of(world_size: int, **sections: dict[str, Any]) -> ResolvedConfig:
    given = {
        "train": {"microbatch_size": 1, "global_batch_size": 8},
        "optimizer": {"name": "muon"},
        **sections,
        "model": MODEL | sections.get("model", {}),
        "run": {"nproc": world_size},
    }
    return resolve(Config.model_validate(given), world_size, vocab_size=256)


def predict(world_size: int, **sections: dict[str, Any]) -> Forecast:
    config = config_of(world_size, **sections)
    return forecast(
        model_spec(config.model, config.moe),
        run_spec(config, world_size),
        load_device("h100"),
        state_bytes(config, world_size),
    )


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "sections",
    [
        {},
        {"moe": EXPERTS},
        {"moe": EXPERTS, "model": {"activation": "gelu"}},  # shared experts have no gate either
        {"moe": {**EXPERTS, "activation": "gelu"}},
        {"model": {"mla": LATENT, "num_kv_heads": 4}},
        {"model": {"num_mtp_layers": 1}, "moe": EXPERTS},
    ],
)
def test_matrices_are_those_of_the_built_model(sections: dict[str, Any], tp: int) -> None:
    config = config_of(4, **sections, parallel={"tp": tp, "ep": 2 if "moe" in sections else 1})
    parallel = config.parallel
    etp = parallel.etp or tp
    built = [
        (unit.shape, unit.matrices, unit.cut)
        for info in _param_infos(config, [0])
        if info.matrices is not None
        for unit in units_of(0, info, tp_size=etp if info.expert else tp, ep_size=parallel.ep)
    ]
    updates = Updates(config.model, config.moe, config.optimizer)
    counted = [
        (unit.shape, unit.matrices, unit.cut)
        for part in (*updates.layers, updates.embedding, updates.head)
        for units in _units(part, (tp, etp, parallel.ep)).values()
        for unit in units
    ]
    assert Counter(counted) == Counter(built)


@pytest.mark.parametrize(
    ("world_size", "sections"),
    [
        (1, {}),
        (4, {}),
        (2, {"optimizer": {"name": "muon", "distributed": False}}),
        (2, {"parallel": {"tp": 2}}),
        (2, {"optimizer": {"name": "muon", "muon": {"precision": "bfloat16"}}}),
        (4, {"parallel": {"ep": 2}, "moe": EXPERTS}),
        (4, {"parallel": {"pp": 2}}),
    ],
)
def test_bytes_of_a_step_of_muon_are_those_of_a_dry_run(
    world_size: int, sections: dict[str, Any]
) -> None:
    sections = {**sections, "model": {"hidden_size": 256, "ffn_hidden_size": 768}}
    config = config_of(world_size, **sections)
    found = dry_run(config, world_size=world_size, rank=0)
    assert found.works, found.error
    assert found.costs is not None
    state = sum(found.predicted[kind] for kind in ("weights", "gradients", "optimizer"))
    measured = found.costs.peak_bytes["optimizer"] - state
    layers = range(4 // config.parallel.pp)
    predicted = matrix_bytes(run_spec(config, world_size), layers)  # of the fullest rank
    assert 0.99 * measured <= predicted <= 1.25 * measured
    # The step is the peak of these runs, whose microbatches have 16 tokens.
    whole = sum(found.predicted.values())
    assert whole == pytest.approx(found.costs.peak_bytes["optimizer"], rel=0.05)


def frozen(pattern: str) -> dict[str, Any]:
    return {"name": "adamw", "groups": [{"pattern": pattern, "optimizer": "none"}]}


def test_frozen_parameters_have_no_weight_gradients_and_no_update() -> None:
    whole, half = (
        predict(2, optimizer=optimizer)
        for optimizer in ({"name": "adamw"}, frozen("layers.*.mlp.*"))
    )
    before, after = whole.step.stages[0], half.step.stages[0]
    assert after.forward == before.forward
    assert after.backward_input == before.backward_input
    share = run_spec(config_of(2, optimizer=frozen("layers.*.mlp.*")), 2).updates.layers[0].dense
    assert after.kinds["gemm"][2] == pytest.approx(share * before.kinds["gemm"][2])
    assert half.step.parts["optimizer"] < whole.step.parts["optimizer"]
    assert half.step.parts["dp"] < whole.step.parts["dp"]
    assert half.step.seconds < whole.step.seconds


def test_no_gradient_passes_below_the_first_trained_layer() -> None:
    patterns = ("embedding", "layers.0.*", "layers.1.*")
    groups = [{"pattern": pattern, "optimizer": "none"} for pattern in patterns]
    optimizer = {"name": "adamw", "groups": groups}
    (whole,) = predict(1, optimizer={"name": "adamw"}).step.stages
    (front,) = predict(1, optimizer=optimizer).step.stages
    assert front.kinds["attention"][1] == pytest.approx(whole.kinds["attention"][1] / 2)
    assert front.forward == pytest.approx(whole.forward)
    # A later stage returns the gradient of its input in any case.
    groups = [{"pattern": f"layers.{layer}.*", "optimizer": "none"} for layer in (0, 1, 2)]
    groups.append({"pattern": "embedding", "optimizer": "none"})
    later = predict(2, parallel={"pp": 2}, optimizer={"name": "adamw", "groups": groups})
    assert later.step.stages[0].backward_input == 0.0
    assert later.step.stages[1].kinds["attention"][1] == pytest.approx(
        whole.kinds["attention"][1] / 2
    )


def test_optimizers_of_groups_count() -> None:
    def seconds(optimizer: dict[str, Any]) -> float:
        return predict(2, optimizer=optimizer).step.parts["optimizer"]

    adamw = seconds({"name": "adamw"})
    sgd = seconds({"name": "adamw", "groups": [{"pattern": "layers.*", "optimizer": "sgd"}]})
    plain = seconds({"name": "sgd"})
    assert plain < sgd < adamw
    muon = seconds({"name": "muon"})
    in_group = seconds({"name": "adamw", "groups": [{"pattern": "layers.*", "optimizer": "muon"}]})
    assert in_group == pytest.approx(muon)
    half = seconds({"name": "adamw", "groups": [{"pattern": "*.mlp.*", "optimizer": "muon"}]})
    assert adamw < half < muon


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_bytes_of_an_average_are_those_of_a_run(distributed: bool, dtype: str) -> None:
    config = config_of(
        1,
        # Sizes that need padding.
        model={"hidden_size": 40, "ffn_hidden_size": 50},
        optimizer={"name": "adamw", "ema_decay": 0.9, "distributed": distributed},
        train={"dtype": dtype, "global_batch_size": 8},
    )
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    assert trainer.average is not None
    held = trainer.optimizer.state_bytes + trainer.average.state_bytes
    assert state_bytes(config, 1)[0]["optimizer"] == held
