"""ECHO around the ranks: settings, plans for people, recorded routings, records and pictures."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from megacore.errors import ConfigError, MegacoreError
from megacore.moe import plan_offload
from megacore.moe.dispatchers import device_peers
from megacore.moe.echo.clones import FC1
from megacore.moe.echo.device_plan import plan_offload_on_device
from megacore.moe.echo.memory import DeviceCloneMemory
from megacore.moe.echo.slots import CloneRoutes, SlotBuffers
from megacore.moe.options import EchoOptions
from megacore.ops import clone_exchange
from megacore.ops.echo_counts import EchoCounts
from megacore.parallel.process_groups import Group
from megatrain.cli import main
from megatrain.config import load_config
from megatrain.config.load import split_overrides
from megatrain.config.toml_file import config_to_toml
from megatrain.echo_study.recorded_counts import recorded_counts
from megatrain.report.expert_load import echo_sentence, echo_series
from megatrain.train.meters import ExpertMetrics

TOML = """\
[model]
hidden_size = 32
num_layers = 2
num_heads = 4
seq_length = 16
[parallel]
ep = 2
[moe]
num_experts = 8
ffn_hidden_size = 16
[moe.echo]
num_spare_slots = 2
tolerance = 0.0
[train]
microbatch_size = 2
global_batch_size = 8
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "x.toml"
    path.write_text(TOML)
    return path


def test_a_section_inside_of_a_section(config: Path, tmp_path: Path) -> None:
    pairs, rest = split_overrides(["--moe.echo.tolerance=0.05", "--moe.echo.planner", "echo"])
    loaded = load_config(config, pairs)
    assert rest == []
    echo = loaded.moe.echo
    assert (echo.num_spare_slots, echo.tolerance, echo.planner) == (2, 0.05, "echo")
    assert loaded.origin("moe.echo.num_spare_slots") == f"{config}:12"
    saved = tmp_path / "saved.toml"
    saved.write_text(config_to_toml(loaded))
    assert load_config(saved) == loaded


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (
            "moe.echo.num_spare_slot=1",
            "unknown key moe.echo.num_spare_slot; did you mean moe.echo.num_spare_slots",
        ),
        ("moe.ecko.num_spare_slots=1", r"unknown section \[moe.ecko\]; did you mean \[moe.echo\]"),
        ("moe.echo=1", r"\[moe.echo\] must be a table of settings"),
        ("moe.echo.num_spare_slots=-1", "moe.echo.num_spare_slots = -1: must be at least 0"),
        ("moe.echo.planner=ecko", "expected one of .* did you mean echo"),
        ("moe.num_experts=0", "echo.num_spare_slots = 2 is for experts, but num_experts = 0"),
    ],
)
def test_mistakes_in_it_are_named(config: Path, setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(config, [tuple(setting.split("=", 1))])


def test_a_domain_must_divide_the_ranks(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(config), "--world-size=2", "--moe.echo.domain_size=3"]) == 2
    assert "moe.echo.domain_size = 3" in capsys.readouterr().err


def test_plan_echo_prints_memory_and_bound(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config), "--world-size=2", "--echo", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    numel = 3 * 16 * 32
    assert plan["slot_weight_bytes"] == plan["slot_grad_bytes"] == 2 * numel * 4
    assert plan["num_slot_sets"] == 1
    assert plan["clone_traffic_bytes"] == 3 * numel * 4
    # 2 slots for 4 experts per rank: (1 + b)^2 / (4 b) with b = 1/2.
    assert (plan["mean_rows"], plan["guaranteed_factor"]) == (64, 1.125)
    assert (plan["guaranteed_rows"], plan["is_theorem"]) == (72, False)
    assert main(["plan", str(config), "--nproc=2", "--echo", "--moe.echo.num_spare_slots=4"]) == 0
    assert "guaranteed: no rank computes more than 64 rows" in capsys.readouterr().out
    assert main(["plan", str(config), "--nproc=2", "--echo", "--moe.echo.planner=echo"]) == 0
    assert "no bound" in capsys.readouterr().out
    assert main(["plan", str(config), "--nproc=2"]) == 0
    assert "2 spare slots per rank, balanced planner" in capsys.readouterr().out
    assert main(["plan", str(config), "--nproc=2", "--echo", "--moe.echo.num_spare_slots=0"]) == 2
    assert "nothing is cloned; set it to 1 or more" in capsys.readouterr().err
    assert main(["plan", str(config), "--nproc=2", "--echo", "--parallel.ep=1"]) == 2
    assert "no other rank to clone experts to" in capsys.readouterr().err


def test_a_plan_gives_the_bytes_of_the_slots_for_clones(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slot_bytes = 200 * 3 * 16 * 32 * 4
    many = ("--moe.echo.num_spare_slots=200", "--world-size=2")
    assert main(["plan", str(config), *many, "--json"]) == 0
    clones = json.loads(capsys.readouterr().out)["clones"]
    assert clones["slot_weight_bytes"] == clones["slot_grad_bytes"] == slot_bytes
    assert main(["plan", str(config), *many]) == 0
    mib = f"{slot_bytes / (1 << 20):.2f} MiB"
    printed = " ".join(capsys.readouterr().out.split())
    assert f"all layers: {mib} of weights and {mib} of gradients, not in the sums below" in printed
    assert (
        main(["plan", str(config), "--world-size=2", "--moe.echo.num_spare_slots=0", "--json"]) == 0
    )
    assert json.loads(capsys.readouterr().out)["clones"] is None


def test_microbatches_in_turns_need_a_second_set_of_weights(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    turns = ["--world-size=2", "--pipeline.schedule=1f1b", "--pipeline.overlap_moe=true"]
    assert main(["plan", str(config), *turns, "--echo", "--json"]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert (plan["num_slot_sets"], plan["slot_grad_bytes"]) == (2, 2 * 3 * 16 * 32 * 4)
    assert plan["slot_weight_bytes"] == 2 * plan["slot_grad_bytes"]
    assert main(["plan", str(config), *turns, "--echo"]) == 0
    printed = capsys.readouterr().out
    assert "2 spare slots per rank, weights in two sets (overlap_moe), balanced" in printed
    assert "0.02 MiB of weights and 0.01 MiB of gradients" in printed
    assert main(["plan", str(config), *turns]) == 0
    assert "weights in two sets" in capsys.readouterr().out
    assert main(["plan", str(config), *turns, "--moe.dispatcher=allgather"]) == 2
    assert "use alltoall or static, or turn it off" in capsys.readouterr().err


def test_the_guarantee_is_what_the_planner_reaches_on_the_worst_loads() -> None:
    config = EchoOptions(num_spare_slots=2, tolerance=0.0)
    counts = np.zeros((6, 24), np.int64)
    counts[:, :16] = 60  # two thirds of the ranks are hot: the worst share for 2 slots of 4
    plan = plan_offload(counts, num_spare_slots=2, tolerance=0.0)
    assert plan.imbalance_after == pytest.approx(config.guaranteed_factor(4), rel=0.02)
    assert EchoOptions(num_spare_slots=2, planner="echo").guaranteed_factor(4) is None


@pytest.mark.parametrize(("num_local", "num_slots"), [(8, 7), (32, 31), (4, 4)])
def test_a_receive_buffer_takes_what_the_planner_stops_at(num_local: int, num_slots: int) -> None:
    factor = EchoOptions(num_spare_slots=num_slots).guaranteed_factor(num_local)
    rng = np.random.default_rng(1)
    for _ in range(10):
        shares = rng.dirichlet(np.full(8 * num_local, 0.5), 8)
        plan = plan_offload((shares * 20_000).astype(np.int64), num_spare_slots=num_slots)
        assert factor is not None
        assert plan.imbalance_after <= factor


def test_routes_of_all_ranks_fit_each_other() -> None:
    counts = np.random.default_rng(3).integers(0, 100, (4, 8)) * np.array([9, 1, 1, 1, 5, 1, 1, 1])
    plan = plan_offload(counts, num_spare_slots=3, tolerance=0.0)
    handle = object()
    groups = [Group("ep", (0, 1, 2, 3), rank, handle) for rank in range(4)]
    routes = [CloneRoutes.of(plan.slot_expert, 2, group) for group in groups]
    sent = [(home, rank, e) for home, r in enumerate(routes) for rank, e in r.outgoing]
    received = [
        (home, rank, int(plan.slot_expert[rank, slot]) % 2)
        for rank, r in enumerate(routes)
        for slot, home in r.incoming
    ]
    assert sorted(sent) == sorted(received)
    assert len(sent) == plan.num_clones > 0
    for home in range(4):  # messages between two ranks match by their order
        for rank in range(4):
            assert [m for m in sent if m[:2] == (home, rank)] == [
                m for m in received if m[:2] == (home, rank)
            ]


def test_slots_hold_no_memory_before_they_are_used() -> None:
    assert SlotBuffers(1000).num_bytes() == 0


def write_recording(folder: Path) -> None:
    """Two steps of one layer, two samples of four tokens; rank files share the second sample."""
    folder.mkdir()
    about = {"format": "megacore-routing", "format_version": 1, "settings": {"moe.num_experts": 4}}
    (folder / "routing.json").write_text(json.dumps(about))
    ids = torch.tensor([[0, 1], [0, 2], [0, 3], [0, 1]], dtype=torch.int32)
    missing = torch.full((2, 2), -1, dtype=torch.int32)
    for step in range(2):
        first = {f"{step}.1.0": ids, f"{step}.1.1": torch.cat([ids[:2], missing])}
        save_file(first, folder / f"step_{step:08d}.rank_0.safetensors")
        second = {f"{step}.1.1": torch.cat([missing, ids[2:]])}
        save_file(second, folder / f"step_{step:08d}.rank_1.safetensors")


@pytest.mark.parametrize("settings", [{}, {"moe.num_experts": 0}, {"moe.num_experts": "4"}])
def test_a_recording_that_does_not_say_how_many_experts_is_refused(
    tmp_path: Path, settings: dict[str, Any]
) -> None:
    about = {"format": "megacore-routing", "format_version": 1, "settings": settings}
    (tmp_path / "routing.json").write_text(json.dumps(about))
    with pytest.raises(MegacoreError, match=r"says moe.num_experts = .* at least 1"):
        recorded_counts(tmp_path, num_ranks=2)


def test_a_recording_becomes_counts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "a"
    write_recording(folder)
    num_experts, steps = recorded_counts(folder, num_ranks=2)
    assert num_experts == 4
    assert [counts.tolist() for counts in steps] == [[[4, 2, 1, 1], [4, 2, 1, 1]]] * 2
    arguments = ["echo", "simulate", "--routing", str(folder), "--ep=2", "--num-spare-slots=2"]
    assert main([*arguments, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert {row["planner"]: row["imbalance"] for row in results}["none"] == 1.5
    assert main([*arguments[:-2], "--ep=3"]) == 2
    assert "4 recorded experts do not divide over 3 ranks" in capsys.readouterr().err
    assert main([*arguments, "--counts=x.npy"]) == 2
    assert "both name recorded tokens" in capsys.readouterr().err
    assert main(["echo", "simulate", "--routing", str(tmp_path / "none"), "--ep=2"]) != 0


def make_metrics() -> ExpertMetrics:
    counts = EchoCounts(num_plans=4, highest_before=60, highest_after=44, mean_load=40)
    counts.num_clones, counts.bytes_sent, counts.plan_us = 6, 1 << 20, 100
    return ExpertMetrics(
        load={1: (3, 1)},
        num_dropped=0,
        num_over_budget=0,
        aux_loss=0.0,
        z_loss=0.0,
        echo={1: EchoCounts.of_list(list(vars(counts).values()))},
    )


def test_records_tell_of_clones_and_the_report_draws_them() -> None:
    record = make_metrics().as_record()
    assert record["echo"]["1"] == {
        "imbalance_before": 1.5,
        "imbalance_after": 1.1,
        "num_clones": 1.5,
        "num_moved_copies": 0.0,
        "bytes_sent": 1 << 20,
        "plan_us": 25.0,
    }
    records = [{"step": 1}, {"step": 2, **record}]
    assert [series.points for series in echo_series(records)] == [[(2, 1.5)], [(2, 1.1)]]
    assert "1.5 clones per microbatch" in echo_sentence(records)
    assert "1.0 MiB in all, each plan 25 microseconds" in echo_sentence(records)
    assert echo_series([{"step": 0}]) == []


class Message:
    """Something under way, as torch.distributed would return it."""

    def __init__(self) -> None:
        self.is_done = False

    def wait(self) -> None:
        self.is_done = True


def test_gradients_under_way_survive_a_layer_without_clones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # gloo forgets a message whose work is let go of, and its receiver waits for ever.
    message = Message()
    under_way = [message]
    monkeypatch.setattr(
        "megacore.moe.echo.slots._post", lambda sent, *_: (under_way if sent else [], [])
    )
    slots, like = SlotBuffers(1), torch.zeros(1, 3, 2)
    idle = CloneRoutes(group=Group.solo(), num_used=0, incoming=(), outgoing=())
    slots.grads(FC1, like, 1)
    slots.exchange_grads(FC1, replace(idle, num_used=1, incoming=((0, 0),)), like[:0])
    slots.exchange_grads(FC1, idle, like[:0])
    assert not message.is_done
    slots.grads(FC1, like, 1)
    assert message.is_done, "memory that is being sent must not be written"


def test_kernels_of_both_sets_of_slots_tell_failures_in_one_place(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def memory_of(_group: Group, _device: torch.device, num_bytes: int) -> tuple[Any, ...]:
        return torch.zeros(2, dtype=torch.int64), torch.empty(num_bytes, dtype=torch.uint8), None

    # Weights of the second set that did not come must spoil the gradients, which are in the first.
    launched: list[tuple[Any, ...]] = []
    stream = SimpleNamespace(device=torch.device("cuda", 1))
    monkeypatch.setattr(clone_exchange, "wait", lambda *arguments: launched.append(arguments))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    monkeypatch.setattr(
        device_peers,
        "symmetric_memory",
        memory_of,
    )
    options = SimpleNamespace(_timeout=timedelta(seconds=1))
    handle = SimpleNamespace(_get_backend=lambda _: SimpleNamespace(options=options))
    group = Group("ep", (0, 1), 0, handle)  # type: ignore[arg-type]
    plan = plan_offload_on_device(torch.tensor([[9, 1], [9, 1]]), rank=0, num_spare_slots=1)
    fc1, fc2 = torch.zeros(1, 6, 5), torch.zeros(1, 5, 3)
    first = DeviceCloneMemory(group, 1, fc1, fc2)
    second = DeviceCloneMemory(group, 1, fc1, fc2, beside=first)
    for memory in (first, second):
        memory.wait_for_weights(FC1, plan)
    for memory, failure, slot_expert, tensor, projection, *_ in launched:
        assert memory.device == failure.device, "kernels run on the device of the memory"
        assert (slot_expert is plan.slot_expert, tensor, projection) == (True, None, 0)
    assert launched[0][1] is launched[1][1], "one word for both sets"
    assert launched[0][5:] == (1, 2, 0, 120, 60, 120, 60, pytest.approx(1 / 3))
    assert launched[1][5:] == (1, 2, 0, 120, 60, 0, 0, pytest.approx(1 / 3))
    assert (first.num_bytes, second.num_bytes) == (360, 180)
