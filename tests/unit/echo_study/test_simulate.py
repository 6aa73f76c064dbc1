"""``megacore echo simulate`` and the figures behind it."""

from __future__ import annotations

import doctest
import importlib
import json
from pathlib import Path

import numpy as np
import pytest

from megacore.moe import plan_offload
from megatrain.cli import main
from megatrain.echo_study.simulate import (
    PLANNERS,
    SimulationOptions,
    remote_fraction,
    simulate,
    table,
)

SMALL = ["--ep", "4", "--experts", "16", "--top-k", "2", "--tokens", "64", "--steps", "2"]
COUNTS = np.array([[30, 10], [50, 10]])


@pytest.mark.parametrize(
    "module",
    [
        "megacore.moe.echo.plan",
        "megatrain.echo_study.baselines",
        "megatrain.echo_study.workloads",
        "megatrain.echo_study.simulate",
    ],
)
def test_examples_in_docstrings_are_right(module: str) -> None:
    assert doctest.testmod(importlib.import_module(module)).failed == 0


def test_examples_in_the_documentation_are_right() -> None:
    page = Path(__file__).parents[3] / "docs" / "echo.md"
    result = doctest.testfile(str(page), module_relative=False)
    assert result.attempted > 2
    assert result.failed == 0


def test_summaries_say_what_the_plans_do() -> None:
    options = SimulationOptions(num_spare_slots=1, tolerance=0.0)
    none, echo, balanced, eplb, previous = simulate("two", [COUNTS, COUNTS], options)
    assert (none.imbalance, none.num_clones, none.remote_fraction) == (1.6, 0.0, 0.6)
    assert (echo.imbalance, echo.num_moved_tokens) == (1.0, 30.0)
    assert (balanced.imbalance, balanced.num_clones, balanced.bound_held) == (1.0, 1.0, 1.0)
    assert balanced.remote_fraction == pytest.approx(0.3)  # rank 1 now serves 30 of its own 50
    assert echo.remote_fraction == pytest.approx(0.54)  # only its proportional share, 18
    assert eplb.remote_fraction is None
    assert eplb.imbalance == previous.imbalance  # both steps are the same


def test_remote_fraction_counts_tokens_one_by_one() -> None:
    rng = np.random.default_rng(0)
    counts = rng.integers(0, 40, (4, 8)) * rng.integers(0, 2, 8)
    plan = plan_offload(counts, num_spare_slots=2, tolerance=0.0)
    local = 0
    for rank in range(4):
        local += plan.rerouted[rank, rank].sum()
        for expert in (2 * rank, 2 * rank + 1):
            elsewhere = plan.rerouted[rank][plan.slot_expert == expert].sum()
            local += counts[rank, expert] - elsewhere
    assert remote_fraction(counts, plan) == pytest.approx(1 - local / counts.sum())
    assert (
        remote_fraction(
            np.zeros((2, 2), np.int64), plan_offload(np.zeros((2, 2), int), num_spare_slots=1)
        )
        == 0.0
    )


def test_previous_step_is_what_the_history_planner_knows() -> None:
    first, second = np.array([[80, 10], [80, 10]]), np.array([[10, 80], [10, 80]])
    options = SimulationOptions(num_spare_slots=1)
    *_, current, previous = simulate("swap", [first, second], options)
    assert current.imbalance_worst < previous.imbalance_worst


def test_nothing_to_simulate_is_explained() -> None:
    with pytest.raises(ValueError, match="no step"):
        simulate("empty", [], SimulationOptions())


def test_table_has_one_line_per_planner() -> None:
    lines = table(simulate("two", [COUNTS], SimulationOptions(num_spare_slots=1))).splitlines()
    assert lines[0].split()[:3] == ["workload", "planner", "max/mean"]
    assert len(lines) == 1 + len(PLANNERS)


def test_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["echo", "simulate", *SMALL, "--workload", "bursts", "--num_spare_slots", "4"]) == 0
    out = capsys.readouterr().out
    assert "4 ranks, 16 experts, top-2" in out
    assert "4 spare slots per rank" in out
    balanced = next(line for line in out.splitlines() if " balanced " in line)
    assert "100%" in balanced  # four slots for four experts per rank: guaranteed


def test_command_prints_json_for_all_workloads(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(["echo", "simulate", *SMALL, "--json", "--model", "mixtral", "--domain-size", "2"])
        == 0
    )
    described = json.loads(capsys.readouterr().out)
    assert described["num_spare_slots"] == 2
    assert described["domain_size"] == 2
    assert {row["workload"] for row in described["results"]} == {
        "zipf",
        "lognormal",
        "drift",
        "bursts",
    }
    assert [row["planner"] for row in described["results"]] == list(PLANNERS) * 4


def test_model_gives_the_sizes(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--ep", "4", "--tokens", "8", "--steps", "1", "--workload", "zipf"]
    assert main(["echo", "simulate", *options, "--model", "mixtral"]) == 0
    assert "8 experts, top-2" in capsys.readouterr().out


@pytest.mark.parametrize("shape", [(4, 8), (3, 4, 8)])
def test_command_replays_recorded_counts(
    shape: tuple[int, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "counts.npy"
    np.save(path, np.random.default_rng(0).integers(0, 100, shape))
    assert main(["echo", "simulate", "--counts", str(path)]) == 0
    steps = 1 if len(shape) == 2 else 3
    assert f"counts.npy: 4 ranks, 8 experts, {steps} steps" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ep", "7"], "256 experts do not divide over 7 ranks; nearest: 4 or 8"),
        ([*SMALL, "--steps", "0"], "--steps must be at least 1, got 0"),
        ([*SMALL, "--steps", "1.5"], "--steps: expected a whole number, but got '1.5'"),
        ([*SMALL, "--tokens", "1e3"], "--tokens: expected a whole number, but got '1e3'"),
        ([*SMALL, "--tokens", "0"], "--tokens must be at least 1, got 0"),
        ([*SMALL, "--seed", "-1"], "--seed must be at least 0, got -1"),
        ([*SMALL, "--skew", "nan"], "--skew must be from 0 to 10, got nan"),
        ([*SMALL, "--skew", "wide"], "--skew: expected a number, but got 'wide'"),
        ([*SMALL, "--tolerance", "2"], "tolerance is 2.0"),
        ([*SMALL, "--num-spare-slots", "-1"], "num_spare_slots must be in [0, 1024], got -1"),
        ([*SMALL, "--domain-size", "3"], "must divide the number of ranks, 4"),
        (["--workload", "zip"], "invalid choice: 'zip'"),
        (["--counts", "nowhere.npy"], "cannot read nowhere.npy"),
        (
            ["--num-spare-slot", "2"],
            "unknown option --num-spare-slot; did you mean --num-spare-slots",
        ),
    ],
)
def test_mistakes_end_with_one_sentence(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["echo", "simulate", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in captured.err
    assert captured.err.count("\n") == 1


def test_recorded_files_that_hold_something_else_are_explained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "x.npy"
    np.save(path, np.ones((2, 4)))
    assert main(["echo", "simulate", "--counts", str(path)]) == 2
    assert "holds float64 (2, 4)" in capsys.readouterr().err
    for content in (b"not numpy", b""):
        path.write_bytes(content)
        assert main(["echo", "simulate", "--counts", str(path)]) == 2
        told = f"cannot read {path} as a .npy file of counts: numpy.save wrote no such file"
        assert told in capsys.readouterr().err


def test_choices_of_the_command_are_those_of_the_library() -> None:
    from megatrain.cli import echo
    from megatrain.echo_study import workloads

    assert echo.WORKLOADS == workloads.WORKLOADS
    assert set(echo.MODELS) == set(workloads.MODEL_SHAPES)
