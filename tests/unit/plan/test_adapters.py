"""Predictions of runs with adapters: bytes against dry runs, and the time of their parts."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.config import Config, ResolvedConfig, resolve
from megatrain.dry_run import dry_run
from megatrain.plan.device import load_device
from megatrain.plan.forecast import Forecast, forecast
from megatrain.plan.search import search
from megatrain.plan.spec_from_config import model_spec_of, run_spec
from megatrain.plan.state import state_bytes

MODEL = {"hidden_size": 512, "num_layers": 4, "num_heads": 8, "num_kv_heads": 4}
MODEL |= {"ffn_hidden_size": 2048, "seq_length": 512, "vocab_size": 4000, "tie_embeddings": False}
EXPERTS = {"num_experts": 8, "top_k": 2, "ffn_hidden_size": 512}
CLONES = {**EXPERTS, "echo": {"num_spare_slots": 2}}
KINDS: dict[str, dict[str, Any]] = {
    "all": {"rank": 16},
    "q and v": {"rank": 16, "targets": ["q", "v"]},
    "experts": {"rank": 16, "targets": ["experts.*"]},
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2": (2, {"parallel": {"tp": 2, "sequence_parallel": True}}),
    "pp2": (2, {"parallel": {"pp": 2}}),
    "ep4": (4, {"parallel": {"ep": 4}, "moe": EXPERTS}),
    "ep4, clones": (4, {"parallel": {"ep": 4}, "moe": CLONES}),
    "ep4, clones of static": (
        4,
        {"parallel": {"ep": 4}, "moe": {**CLONES, "dispatcher": "static"}},
    ),
}
CASES = [
    (layout, kind)
    for layout, (_, changes) in LAYOUTS.items()
    for kind in KINDS
    if "moe" in changes or kind != "experts"
]


def make_config(gpus: int, **changes: Any) -> ResolvedConfig:
    train = {"microbatch_size": 1, "global_batch_size": 8, "dtype": "bfloat16", "eval_interval": 0}
    sections = {"model": MODEL, "data": {"tokenizer": "bytes"}, **changes}
    sections["train"] = {**train, **changes.get("train", {})}
    return resolve(Config(**sections), gpus, cuda=False)


def predict(config: ResolvedConfig, gpus: int) -> Forecast:
    state = state_bytes(config, gpus)
    return forecast(model_spec_of(config), run_spec(config, gpus), load_device("h100"), state)


@pytest.mark.parametrize(("layout", "kind"), CASES)
def test_bytes_are_those_of_dry_runs(layout: str, kind: str) -> None:
    gpus, changes = LAYOUTS[layout]
    config = make_config(gpus, lora=KINDS[kind], **changes)
    found = dry_run(config, world_size=gpus, rank=0)
    assert found.costs is not None, found.error
    assert sum(found.predicted.values()) == pytest.approx(found.costs.most_bytes, rel=0.05)


def test_bytes_without_padding_are_the_exact_ones() -> None:
    """Searches compare layouts by the number of weights alone."""
    for lora in ({}, KINDS["all"], {**KINDS["q and v"], "modules_to_save": ["head"]}):
        config = make_config(2, lora=lora, parallel={"tp": 2})
        exact = predict(config, 2).fullest.parts
        spec = run_spec(config, 2)
        found = forecast(model_spec_of(config), spec, load_device("h100")).fullest.parts
        for kind in ("weights", "gradients", "optimizer"):
            assert found[kind] == pytest.approx(exact[kind], rel=0.02), (lora, kind)


def test_frozen_weights_take_no_time_for_their_gradients() -> None:
    large = {**MODEL, "hidden_size": 4096, "ffn_hidden_size": 14336, "seq_length": 4096}
    times = {
        name: predict(make_config(1, model=large, lora=lora), 1).step
        for name, lora in {"whole": {}, **KINDS, "wide": {"rank": 64}}.items()
        if name != "experts"
    }
    whole, every = times["whole"].parts, times["all"].parts
    assert "adapters" not in whole
    # Two products of three, and no sums of gradients.
    assert 0.6 < every["gemm"] / whole["gemm"] < 2 / 3
    assert every["head"] < whole["head"]
    assert every["optimizer"] < 0.02 * whole["optimizer"]
    assert every["attention"] == whole["attention"]
    assert times["q and v"].parts["adapters"] < 0.25 * every["adapters"]
    assert times["wide"].parts["adapters"] > every["adapters"]
    assert times["q and v"].seconds < times["whole"].seconds
    recomputed = make_config(1, model=large, lora=KINDS["all"], train={"recompute": ["full"]})
    again = predict(recomputed, 1).step.parts
    forward = every["gemm"] / 2 + every["adapters"] / 4
    assert again["recompute"] > forward
    norms = make_config(1, model=large, lora={"rank": 16, "dora": True})
    assert predict(norms, 1).step.parts["adapters"] > every["adapters"]


def test_frozen_experts_send_no_gradients_of_clones() -> None:
    clones = [
        predict(make_config(4, parallel={"ep": 4}, moe=CLONES, lora=lora), 4)
        for lora in ({}, KINDS["q and v"])
    ]
    assert clones[1].step.parts["clones"] < 0.7 * clones[0].step.parts["clones"]
    slots = [each.fullest.parts["slots of clones"] for each in clones]
    assert slots[1] == slots[0] / 3  # the weights in bfloat16 without gradients in float32


def test_only_layers_above_the_first_adapter_have_a_backward_pass() -> None:
    late = make_config(1, lora={"rank": 4, "targets": ["layers.3.*"]})
    every = make_config(1, lora={"rank": 4})
    assert predict(late, 1).step.seconds < 0.7 * predict(every, 1).step.seconds


def test_a_search_finds_layouts_of_runs_with_adapters() -> None:
    large = {**MODEL, "hidden_size": 4096, "num_layers": 32, "ffn_hidden_size": 14336}
    device, fastest = load_device("h100"), {}
    for name, lora in {"whole": {}, "adapters": KINDS["all"]}.items():
        config = make_config(1, model=large, lora=lora)
        found = search(model_spec_of(config), run_spec(config, 1), device, simulate=20)
        fastest[name] = found.best
    # Not all weights of such a model can be trained on one device, but its adapters can.
    assert not fastest["whole"]
    assert fastest["adapters"][0].fullest.parts["optimizer"] < 1e9
