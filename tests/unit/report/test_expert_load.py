from __future__ import annotations

import re
from typing import Any

from megatrain.report.expert_load import MAX_BINS, MAX_LAYERS, load_drawing, relative_loads


def record(step: int, loads: dict[str, list[int]]) -> dict[str, Any]:
    return {"step": step, "expert_load": loads}


def test_loads_are_shares_of_the_fair_one_averaged_over_steps() -> None:
    records = [record(step, {"0": [step, 2, 4 - step], "2": [3, 3, 0]}) for step in range(5)]
    loads = relative_loads(records)
    assert list(loads) == ["0", "2"]
    assert loads["0"][1] == [0.5, 1.0, 1.5]
    assert loads["2"] == [[1.5, 1.5, 0.0]] * 5
    long = relative_loads(records * 100)
    assert len(long["0"]) == MAX_BINS
    assert all(abs(sum(column) - 3.0) < 1e-9 for column in long["0"])


def test_records_without_experts_give_no_picture() -> None:
    assert relative_loads([{"step": 0, "loss": 1.0}]) == {}


def test_a_deep_model_shows_layers_at_even_distances() -> None:
    loads = relative_loads([record(0, {str(layer): [1, 1] for layer in range(32)})])
    assert list(loads) == [str(layer) for layer in range(0, 32, 32 // MAX_LAYERS)]


def test_a_picture_has_one_box_per_expert_and_column_darker_for_more() -> None:
    svg = load_drawing("3", [[0.0, 1.5, 3.0], [1.0, 1.0, 9.0]])
    opacities = [float(value) for value in re.findall(r'fill-opacity="([\d.]+)"', svg)]
    assert opacities == [0.0, 0.5, 1.0, 0.33, 0.33, 1.0]
    assert "layer 3" in svg
    assert "highest 9.00" in svg
