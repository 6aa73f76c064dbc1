from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from megacore.buffers import make_buffers
from megacore.cli import main
from megacore.config import load_config, resolve
from megacore.models.build import build_chunks
from megacore.models.size import count_parameters
from megacore.parallel import ProcessGroups
from megacore.train.plan import plan_run

TOML = """\
[model]
hidden_size = 32
num_layers = 6
num_heads = 4
vocab_size = 300
[parallel]
tp = 2
pp = 2
"""


@pytest.fixture
def config(tmp_path: Path) -> Path:
    path = tmp_path / "x.toml"
    path.write_text(TOML)
    return path


def plan_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["plan", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_shows_layers_parameters_and_schedule(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(capsys, str(config), "--world-size=8")
    assert plan == plan_of(capsys, str(config), "--nproc=8")
    assert (plan["world_size"], plan["dp"], plan["num_microbatches"]) == (8, 2, 4)
    assert [rank["layers"] for rank in plan["ranks"]] == [[[0, 3]], [[3, 6]]]
    assert [rank["peak_in_flight"] for rank in plan["ranks"]] == [2, 1]
    assert plan["bubble_fraction"] == pytest.approx(1 / 5)
    resolved = resolve(load_config(config), 8, cuda=False)
    assert plan["num_params"] == count_parameters(resolved.model).total


def test_plan_names_the_fix_for_an_impossible_layout(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(config), "--world-size", "6"]) == 2
    assert "does not fit 6 processes (--world-size)" in capsys.readouterr().err


def test_plan_prints_a_table_that_no_narrow_terminal_cuts(
    config: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    settings = ("--pipeline.schedule=interleaved_1f1b", "--pipeline.num_chunks", "3")
    assert main(["plan", str(config), *settings]) == 0
    printed = capsys.readouterr().out
    assert "embed 0 | 2 | 4" in printed
    assert "1 | 3 | 5 head" in printed
    assert "…" not in printed


def test_plan_shows_what_each_rank_owns(config: Path, capsys: pytest.CaptureFixture[str]) -> None:
    numels = dict[str, int]()
    for shard in range(4):
        settings = ("--world-size=8", "--parallel.tp=1", "--optimizer.bucket_numel=5000")
        assert main(["plan", str(config), *settings, f"--shard={shard}"]) == 0
        first = capsys.readouterr().out.split("\n\n")[0]
        for line in first.splitlines()[1:]:
            ranges = [
                [int(number.replace(",", "")) for number in found]
                for found in re.findall(r"\[([\d,]+), ([\d,]+)\)", line)
            ]
            assert line.startswith(f"  rank {shard}: world [")
            assert len({end - start for start, end in ranges}) == 1
            name = line.split()[-1]
            numels[name] = numels.get(name, 0) + ranges[0][1] - ranges[0][0]
    assert numels["layers.0.attention.norm"] == 32
    assert numels["layers.0.mlp.down"] == 2 * 2048  # half of it with tp 2, see above
    for wrong in (-1, 4):
        assert main(["plan", str(config), *settings, f"--shard={wrong}"]) == 2
        assert "4 ranks share a buffer, 0 to 3" in capsys.readouterr().err


def test_planned_gradients_may_have_the_format_of_the_parameters(config: Path) -> None:
    settings = [("train.dtype", "bfloat16"), ("optimizer.grad_dtype", "param")]
    first = plan_run(resolve(load_config(config, settings), 8, cuda=False), 8).ranks[0]
    assert first.grad_bytes == first.param_bytes


def test_plan_counts_experts_where_they_are(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config.write_text(
        TOML + "[moe]\nnum_experts = 8\nfirst_dense_layers = 1\nffn_hidden_size = 24\n"
    )
    whole = plan_of(capsys, str(config), "--world-size=4")
    split = plan_of(capsys, str(config), "--world-size=8", "--parallel.ep=2", "--parallel.etp=1")
    assert split["num_params"] == whole["num_params"] > split["num_active_params"]
    all_experts = 5 * 8 * 3 * 24 * 32  # layers, experts, matrices
    idle = whole["num_params"] - whole["num_active_params"]
    assert idle == all_experts * 6 // 8
    # etp 2 holds half of each expert; etp 1 x ep 2 the whole of every second one.
    assert [r["num_params"] for r in split["ranks"]] == [r["num_params"] for r in whole["ranks"]]
    assert main(["plan", str(config), "--world-size=8", "--parallel.ep=2"]) == 0
    text = capsys.readouterr().out
    assert "etp 2 x ep 2 x edp 1 x pp 2" in text
    assert "per token" in text
    assert main(["plan", str(config), "--world-size=4", "--moe.num_groups=3"]) == 2
    assert "num_groups is 3; it must divide num_experts=8" in capsys.readouterr().err
