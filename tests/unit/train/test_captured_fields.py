"""Each dispatcher declares what the rest of an MoE layer needs of a captured plan."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import pytest

from megacore.moe.dispatchers import LocalDispatcher, StaticDispatcher
from megatrain.models import captured
from tests.support.graphed_training import EXPERTS, make_trainer, run

PARTS = {"mode": "partial", "scopes": ["moe_router", "moe_preprocess"]}
# For reports and for the bias of experts, not for losses.
COUNTS = {"num_dropped", "num_over_budget", "tokens_per_expert"}


def losses(name: str, graphs: dict[str, Any] | None) -> list[float]:
    moe = {**EXPERTS, "dispatcher": name}
    if name == "static":
        moe["static_budget"] = 4.0
    return run(make_trainer(graphs, moe=moe, train={"global_batch_size": 1}), 3)


@pytest.mark.parametrize(
    ("name", "dispatcher"),
    [
        ("alltoall", LocalDispatcher),
        ("static", StaticDispatcher),
    ],
)
def test_each_declared_field_is_needed_where_it_exists(
    name: str, dispatcher: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    existing: set[str] = set()
    tensors = captured._tensors

    def noted(value: object, fields: Any) -> captured.Results:
        found = tensors(value, fields)
        existing.update(found)
        return found

    with monkeypatch.context() as patch:
        patch.setattr(captured, "_tensors", noted)
        expected = losses(name, PARTS)
    assert expected == losses(name, None)
    assert {"probs", "row_map"} <= existing
    fields = dispatcher.captured_fields
    for field in sorted(set(fields) - COUNTS):
        rest = tuple(other for other in fields if other != field)
        monkeypatch.setattr(dispatcher, "captured_fields", rest)
        found: list[float] = []
        with suppress(Exception):  # whatever the rest of the layer makes of a missing tensor
            found = losses(name, PARTS)
        assert (found != expected) == (field in existing), field
