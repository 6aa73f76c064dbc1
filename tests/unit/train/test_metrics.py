from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from megatrain.report import read_metrics
from megatrain.train.meters import ExpertMetrics
from megatrain.train.metrics import MetricsWriter, StepRecord


def _record(step: int, **changes: Any) -> StepRecord:
    values = {
        "step": step + 1,
        "loss": 3.0 - step / 10,
        "grad_norm": 0.5,
        "lr": 1e-3,
        "tokens_per_s": 1000.0,
        "step_time_s": 0.25,
        "num_skipped": 0,
        "samples": 8 * (step + 1),
    }
    return StepRecord(**(values | changes))


def _steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_a_record_is_one_line_and_in_the_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.write(_record(0))
        assert json.loads(path.read_text()) == {
            "step": 1,
            "loss": 3.0,
            "grad_norm": 0.5,
            "lr": 1e-3,
            "tokens_per_s": 1000.0,
            "step_time_s": 0.25,
            "num_skipped": 0,
            "samples": 8,
        }
        writer.write(_record(1, validation_loss=2.5))
    assert [record.get("validation_loss") for record in read_metrics(path)] == [None, 2.5]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_values_that_are_not_finite_stay_legal_json(value: float) -> None:
    text = _record(0, loss=value, grad_norm=value).to_json()
    # A strict parser: NaN and Infinity are no JSON.
    data = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert data["loss"] is None
    assert data["grad_norm"] is None
    assert data["step"] == 1


def test_a_new_run_starts_an_empty_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(_record(0).to_json() + "\n")
    MetricsWriter(path).close()
    assert path.read_text() == ""


def test_resuming_drops_the_steps_after_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        for step in range(6):
            writer.write(_record(step))
    before = path.read_text().splitlines()
    with MetricsWriter(path, resume_step=4) as writer:
        assert _steps(path) == [1, 2, 3, 4]
        writer.write(_record(4, loss=9.0))
    assert _steps(path) == [1, 2, 3, 4, 5]
    assert path.read_text().splitlines()[:4] == before[:4]


def test_resuming_drops_a_line_cut_off_by_a_crash(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [_record(0).to_json(), _record(1).to_json(), _record(2).to_json()[:30]]
    path.write_text("\n".join(lines))
    with MetricsWriter(path, resume_step=3) as writer:
        writer.write(_record(3))
    assert _steps(path) == [1, 2, 4]
    assert [entry.name for entry in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_step_that_occurs_twice_keeps_its_last_record(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f"{_record(0, loss=loss).to_json()}\n" for loss in (1.0, 2.0)))
    MetricsWriter(path, resume_step=1).close()
    assert [record["loss"] for record in read_metrics(path)] == [2.0]


def test_a_missing_file_has_no_records(tmp_path: Path) -> None:
    assert read_metrics(tmp_path / "none.jsonl") == []


def test_a_model_with_experts_tells_their_load() -> None:
    experts = ExpertMetrics(
        load={1: (3, 1), 3: (2, 2)}, num_dropped=4, num_over_budget=1, aux_loss=0.5, z_loss=0.25
    )
    record = json.loads(_record(0, experts=experts).to_json())
    assert record["expert_load"] == {"1": [3, 1], "3": [2, 2]}
    assert record["expert_imbalance"] == 1.5
    assert (record["num_dropped_copies"], record["num_over_budget"]) == (4, 1)
    assert "experts" not in record
    assert "expert_load" not in json.loads(_record(0).to_json())
    brief = json.loads(_record(0, experts=experts, with_load=False).to_json())
    assert "expert_load" not in brief
    assert "with_load" not in record | brief
    assert brief["expert_imbalance"] == 1.5
