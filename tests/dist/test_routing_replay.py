"""Runs that repeat the routing decisions of another one, and recordings that do not fit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import MegacoreError
from megatrain.config import Config
from megatrain.plan.run_plan import check_plan
from megatrain.train.trainer import build_trainer
from tests.dist.test_moe_invariance import make_config
from tests.support.distributed import run_ranks

STEPS = 4
# Other decisions than the router's own, so that a replay which decides for itself is found out.
RECORDED = {"debug.force_balanced": True, "train.steps": STEPS, "model.dropout": 0.1}
REPLAYED = {**RECORDED, "debug.force_balanced": False}


def train(_rank: int, world_size: int, changes: dict[str, Any], first: int = 0) -> Any:
    config = make_config(world_size, changes)
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    metrics = [trainer.train_step(step) for step in range(first, config.train.steps)]
    return [step.loss for step in metrics], [step.experts.load for step in metrics]


def replays(_rank: int, world_size: int, layouts: list[dict[str, Any]]) -> Any:
    return [train(0, world_size, changes) for changes in layouts]


@pytest.mark.dist
def test_a_replay_in_another_layout_has_the_losses_and_loads_of_the_recorded_run(
    tmp_path: Path,
) -> None:
    folder = str(tmp_path / "recording")
    layout = {"parallel.pp": 2, "parallel.tp": 2, "parallel.etp": 1, "parallel.ep": 2}
    expected = run_ranks(
        4, train, 4, {**RECORDED, **layout, "debug.record_routing": folder}, timeout_s=120
    )[0]
    free = train(0, 1, REPLAYED)
    assert free[1] != expected[1]
    again = {**REPLAYED, "debug.replay_routing": folder}
    copy = str(tmp_path / "copy")
    single = train(0, 1, {**again, "debug.record_routing": copy})
    others: list[dict[str, Any]] = [
        {**again, "parallel.ep": 2, "parallel.cp": 2, "moe.dispatcher": "static"},
        {**again, "parallel.pp": 2, "train.recompute": ["full"], "train.microbatch_size": 1},
        {
            **again,
            "parallel.tp": 2,
            "parallel.sequence_parallel": True,
            "debug.replay_routing": copy,
        },
    ]
    found = [single, *run_ranks(2, replays, 2, others, timeout_s=120)[0]]
    for losses, loads in found:
        assert losses == pytest.approx(expected[0], rel=1e-5)
        assert loads == expected[1]


def record(folder: Path, **changes: Any) -> None:
    train(0, 1, {**RECORDED, "train.steps": 2, "debug.record_routing": str(folder), **changes})


def refusal(folder: Path, **changes: Any) -> str:
    settings = {**REPLAYED, "train.steps": 2, "debug.replay_routing": str(folder), **changes}
    config: Config = make_config(1, settings)
    with pytest.raises(MegacoreError) as caught:
        check_plan(config, 1)
    return str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"moe.num_experts": 8}, "moe.num_experts = 8, but it was recorded with 4"),
        ({"moe.top_k": 1}, "moe.top_k = 1, but it was recorded with 2"),
        (
            {"moe.layer_pattern": "dd(e)"},
            "moe.layer_pattern = dd(e), but it was recorded with d(e)",
        ),
        ({"model.num_layers": 3}, "model.num_layers = 3, but it was recorded with 4"),
        ({"model.seq_length": 8}, "model.seq_length = 8, but it was recorded with 16"),
        ({"train.global_batch_size": 4}, "train.global_batch_size = 4, but it was recorded with 8"),
        ({"train.seed": 1}, "train.seed = 1, but it was recorded with 1234"),
        ({"train.steps": 3}, "does not have step 3: it holds steps 1 to 2; record more, or train"),
    ],
)
def test_a_recording_of_something_else_is_refused_before_the_run(
    changes: dict[str, Any], expected: str, recording: Path
) -> None:
    message = refusal(recording, **changes)
    assert expected in message
    assert "\n" not in message


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("routing") / "recording"
    record(folder)
    return folder


def test_what_is_no_recording_is_refused(tmp_path: Path, recording: Path) -> None:
    assert "it has no routing.json; name the folder" in refusal(tmp_path / "nowhere")
    (tmp_path / "notes.txt").write_text("x")
    settings = {"debug.record_routing": str(tmp_path)}
    with pytest.raises(MegacoreError, match="holds something else than a recording; name a new"):
        check_plan(make_config(1, settings), 1)
    for changes, expected in (
        ({"debug.record_routing": str(recording)}, "both name"),
        ({"debug.force_balanced": True}, "replay_routing and force_balanced both decide"),
        ({"graphs.mode": "partial"}, "needs the host in every layer with experts, which"),
    ):
        with pytest.raises(ValueError, match=expected):
            make_config(1, {"debug.replay_routing": str(recording), **changes})
    check_plan(make_config(1, {"debug.record_routing": str(recording)}), 1)


def test_a_missing_part_or_a_damaged_file_ends_the_run_with_its_name(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    record(folder)
    settings = {**REPLAYED, "train.steps": 2, "debug.replay_routing": str(folder)}
    [first] = folder.glob("step_00000000.*")
    content = first.read_bytes()
    first.write_bytes(content[:-100])
    with pytest.raises(MegacoreError, match="cannot read step 1: "):
        train(0, 1, settings)
    first.rename(folder / "kept")
    with pytest.raises(MegacoreError, match="does not have step 1: it holds steps 2 to 2"):
        train(0, 1, settings)
    second = next(folder.glob("step_00000001.*"))
    second.rename(first)  # choices of another step
    (folder / "kept").rename(second)
    with pytest.raises(MegacoreError, match=r"incomplete: no choices of sample 0 of step 0 in lay"):
        train(0, 1, settings)


def test_a_resumed_run_goes_on_recording(tmp_path: Path) -> None:
    folder = tmp_path / "recording"
    record(folder, **{"train.steps": 4})
    resumed = {**RECORDED, "debug.record_routing": str(folder), "train.steps": 3}
    train(0, 1, resumed, first=1)
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["routing.json", *(f"step_0000000{n}.rank_0000.safetensors" for n in range(3))]
    with pytest.raises(MegacoreError, match=r"moe.top_k = 1, but it was recorded with 2; name ano"):
        train(0, 1, {**resumed, "moe.top_k": 1}, first=2)
