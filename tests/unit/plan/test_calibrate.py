"""Calibrations: constants that make predictions the measured times."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatrain.cli import main
from megatrain.plan.calibrate import _EXPERTS, _config, _fitted_rate, _small
from megatrain.plan.cost import LayerCosts
from megatrain.plan.device import load_device
from megatrain.plan.spec_from_config import model_spec, run_spec

HOST = replace(
    load_device("h100"), peak_fp32=1e11, peak_bf16=4e11, peak_hbm=5e10, host_waits=1, gemm_half=4
)
CASES = {
    "memory_bound_layer": ("bfloat16", lambda costs: costs.by_kind[False].total),
    "memory_bound_layer_fp32": ("float32", lambda costs: costs.by_kind[False].total),
    "memory_bound_loss": ("float32", lambda costs: costs.head.total),
    "grouped_efficiency": ("float32", lambda costs: costs.by_kind[True].total),
}


@settings(max_examples=20, deadline=None)
@given(key=st.sampled_from(sorted(CASES)), rate=st.floats(0.02, 0.9))
def test_a_fitted_rate_is_the_one_that_made_the_times(key: str, rate: float) -> None:
    dtype, part = CASES[key]
    cases = []
    for hidden in (128, 256):
        experts = {"moe": _EXPERTS} if key == "grouped_efficiency" else {}
        config = _config({**_small(hidden, dtype, 4096), **experts})
        costs = LayerCosts(
            model_spec(config.model, config.moe), run_spec(config, 1), replace(HOST, **{key: rate})
        )
        cases.append((part, config, part(costs)))
    assert _fitted_rate(HOST, key, cases) == pytest.approx(rate, rel=1e-3)


def test_a_difference_that_noise_made_negative_is_no_crash() -> None:
    _, part = CASES["memory_bound_loss"]
    cases = [(part, _config(_small(128, "float32", 4096)), -1e-4)]
    assert 0.01 <= _fitted_rate(HOST, "memory_bound_loss", cases) <= 4


@pytest.mark.campaign
def test_a_machine_is_measured_and_plans_with_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(tmp_path / "cpu.toml")
    assert main(["calibrate", "--cpu", "--quick", f"--out={path}"]) == 0
    device = load_device(path)
    assert device.origin == "measured"
    for name in ("layer", "layer_fp32", "loss", "loss_blocks"):
        assert 0.01 < getattr(device, f"memory_bound_{name}") < 4
    assert 0.1 < device.grouped_efficiency < 4
    assert 0 <= device.contention_share < 5
    capsys.readouterr()
    assert main(["plan", "examples/moe.toml", "--gpus=4", "--device", path]) == 0
    assert "calibration: measured" in capsys.readouterr().out
