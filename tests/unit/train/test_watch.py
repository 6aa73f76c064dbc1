"""Speed, memory, phases and stragglers as the training loop sees them."""

from __future__ import annotations

import math
import mmap
import time
from typing import Any

import pytest
import torch

from megatrain.plan.device import load_device
from megatrain.plan.spec_from_config import model_spec
from megatrain.train.step import NUM_REPORTS
from megatrain.train.trainer import Trainer, build_trainer
from megatrain.train.watch import INTERVAL, RunWatch, calibration_name, peak_flops
from tests.support.configs import FOUR_LAYERS, changed_config

BASE: dict[str, dict[str, Any]] = {
    "model": dict(FOUR_LAYERS),
    "train": {"steps": 40, "microbatch_size": 2, "global_batch_size": 8},
}


def make_trainer(**changes: Any) -> Trainer:
    config = changed_config(1, BASE, {key.replace("__", "."): v for key, v in changes.items()})
    return build_trainer(config, world_size=1, device=torch.device("cpu"))


def run(trainer: Trainer, watch: RunWatch, step: int) -> dict[str, Any]:
    watch.before_step(step)
    metrics = trainer.train_step(step)
    return {"step_time_s": metrics.step_time_s} | watch.measure(step, metrics)


def test_speed_is_that_of_the_formula() -> None:
    trainer = make_trainer(run__calibration="h100", train__dtype="bfloat16")
    watch = RunWatch(trainer)
    values = run(trainer, watch, 0)
    tokens_per_s = 8 * 16 / values["step_time_s"]
    flops = model_spec(trainer.config.model, trainer.config.moe).flops_per_token
    assert values["tokens_per_s"] == values["tokens_per_s_per_device"] == tokens_per_s
    assert values["tflops_per_device"] == pytest.approx(tokens_per_s * flops / 1e12)
    assert values["mfu"] == pytest.approx(tokens_per_s * flops / 989e12)
    assert "hfu" not in values


def test_the_peak_is_that_of_the_number_format() -> None:
    h100, cpu = load_device("h100"), torch.device("cpu")
    for precision, peak in (("bf16", h100.peak_bf16), ("fp32", h100.peak_fp32)):
        assert peak_flops(calibration_name("h100", cpu), precision) == peak
    assert peak_flops(calibration_name(None, cpu), "bf16") is None


def test_recomputation_counts_in_hfu_only() -> None:
    # Every microbatch runs a second forward pass of all layers, or every second one does.
    for keep, share in ((0, 1.0), (1, 0.0)):
        trainer = make_trainer(
            run__calibration="h100", train__recompute=["full"], train__recompute_keep=keep
        )
        values = run(trainer, RunWatch(trainer), 0)
        spec = model_spec(trainer.config.model, trainer.config.moe)
        again = spec.recomputed_flops_per_token({"layer"})
        expected = 1 + share * again / spec.flops_per_token
        assert values.get("hfu", values["mfu"]) == pytest.approx(values["mfu"] * expected)


def test_phases_are_parts_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    watch = RunWatch(trainer)
    fetch = trainer.eager.fetch

    def slow(*args: Any) -> Any:
        time.sleep(0.05)
        return fetch(*args)

    monkeypatch.setattr(trainer.eager, "fetch", slow)
    values = run(trainer, watch, 0)
    times = {name: value for name, value in values.items() if name.startswith("time_")}
    assert times["time_data_s"] >= 0.05
    assert times["time_forward_backward_s"] > 0
    assert times["time_optimizer_s"] > 0
    assert times["time_checkpoint_s"] == 0
    assert sum(times.values()) <= values["step_time_s"]
    with watch.saving():
        time.sleep(0.02)
    assert run(trainer, watch, 1)["time_checkpoint_s"] >= 0.02
    assert run(trainer, watch, 2)["time_checkpoint_s"] == 0


def test_the_norm_is_that_of_all_weights_before_the_update() -> None:
    trainer = make_trainer()
    watch = RunWatch(trainer)
    weights = [weight for chunk in trainer.chunks for _, weight in chunk.param_infos()]
    for step in range(INTERVAL + 1):
        expected = math.sqrt(
            sum(float(weight.detach().double().square().sum()) for weight in weights)
        )
        values = run(trainer, watch, step)
        assert ("param_norm" in values) == (step % INTERVAL == 0)
        if "param_norm" in values:
            assert values["param_norm"] == pytest.approx(expected, rel=1e-6)


def test_memory_is_that_of_the_process() -> None:
    trainer = make_trainer()
    watch = RunWatch(trainer)
    before = run(trainer, watch, 0)
    # A mapping of its own: malloc could hand out pages that are resident already.
    size = 128 << 20
    with mmap.mmap(-1, size) as ballast:
        ballast.write(bytes(size))
        after = run(trainer, watch, 1)
    grown = after["memory_resident_bytes"] - before["memory_resident_bytes"]
    assert grown > 0.5 * size
    assert after["memory_peak_bytes"] >= 0.98 * after["memory_resident_bytes"]
    assert 0 < after["memory_shared_bytes"] < after["memory_resident_bytes"]


def test_a_step_reads_the_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each read of a tensor that `.cpu()` did not return would wait for a GPU."""
    trainer = make_trainer()
    watch = RunWatch(trainer)
    run(trainer, watch, 0)
    reads: list[str] = []
    on_host: dict[int, torch.Tensor] = {}
    # As on a GPU, `.cpu()` makes a new tensor; its views are on the host too.
    monkeypatch.setattr(torch.Tensor, "cpu", lambda tensor: to_host(tensor))

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        reads.append("cpu")
        copy = tensor.clone()
        on_host[copy.untyped_storage().data_ptr()] = copy
        return copy

    def count(name: str) -> None:
        method = getattr(torch.Tensor, name)

        def counted(tensor: torch.Tensor, *args: Any) -> Any:
            if tensor.numel() and tensor.untyped_storage().data_ptr() not in on_host:
                reads.append(name)
            return method(tensor, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)

    for name in ("item", "tolist", "__float__", "__int__", "__bool__"):
        count(name)
    for step in range(1, INTERVAL + 2):
        run(trainer, watch, step)
        assert reads == ["cpu"], step
        reads.clear()
    assert float(torch.ones(())) == 1.0
    assert reads == ["__float__"]


def test_reports_have_a_row_per_rank() -> None:
    trainer = make_trainer()
    trainer.eager.report((1.0, 2.0, 3.0, 4.0), torch.tensor(5.0))
    metrics = trainer.train_step(0)
    assert metrics.reports.tolist() == [[1.0, 2.0, 3.0, 4.0, 5.0]]
    assert NUM_REPORTS == 5
