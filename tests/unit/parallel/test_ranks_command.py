"""``megacore ranks`` in process: tables, JSON, pictures, mistakes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacore.parallel import Topology
from megatrain.cli import main

EXAMPLE = ["ranks", "--world-size", "16", "--tp", "4", "--pp", "2", "--etp", "1", "--ep", "4"]


def row(output: str, view: str, token: str) -> str:
    """The lines of one table row, joined."""
    section = output.split(f"{view} layers:")[1].split(" layers:")[0].splitlines()[2:]
    start = next(i for i, line in enumerate(section) if line.split()[:1] == [token])
    lines = [section[start]]
    for line in section[start + 1 :]:
        if not line.startswith(" "):
            break
        lines.append(line)
    return " ".join(" ".join(lines).split())


@pytest.mark.parametrize("columns", ["60", "80", "120", "200"])
def test_tables_show_the_worked_example_at_any_width(
    columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert main(EXAMPLE) == 0
    output = capsys.readouterr().out
    topology = Topology(world_size=16, tp=4, pp=2, ep=4, etp=1)
    for token in ("tp", "cp", "dp", "pp", "dp-cp", "tp-pp"):
        groups = " ".join(map(str, topology.dense.get_ranks(token)))
        assert row(output, "Dense", token).endswith(groups)
    for token in ("ep", "edp", "etp", "pp"):
        groups = " ".join(map(str, topology.expert.get_ranks(token)))
        assert row(output, "Expert", token).endswith(groups)
    assert all(len(line) <= max(int(columns), 80) for line in output.splitlines())


def test_both_spellings_of_a_flag_work(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", "--world_size", "8", "--gpus_per_node", "4"]) == 0
    underscores = capsys.readouterr().out
    assert main(["ranks", "--world-size", "8", "--gpus-per-node", "4"]) == 0
    assert capsys.readouterr().out == underscores


def test_dense_layouts_do_not_repeat_themselves_for_experts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["ranks", "--world-size", "8", "--tp", "2"]) == 0
    output = capsys.readouterr().out
    assert "edp" not in output
    assert "Expert layers: the same groups" in output


def test_traffic_column_follows_the_node_size(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", "--world-size", "8", "--tp", "4", "--gpus-per-node", "2"]) == 0
    assert "between nodes" in row(capsys.readouterr().out, "Dense", "tp")
    assert main(["ranks", "--world-size", "8", "--tp", "4", "--gpus-per-node", "4"]) == 0
    assert "inside a node" in row(capsys.readouterr().out, "Dense", "tp")


def test_a_million_ranks_fit_a_screen(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", "--world-size", str(1 << 20), "--tp", "8", "--pp", "16"]) == 0
    output = capsys.readouterr().out
    assert len(output.splitlines()) < 50
    assert "... 131,064 more" in row(output, "Dense", "tp")


def test_lines_zero_shows_everything(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ranks", "--world-size", "512", "--tp", "2", "--token", "tp", "--lines=0"]) == 0
    output = capsys.readouterr().out
    assert all(f"[{rank}, {rank + 1}]" in output for rank in range(0, 512, 2))


def test_json_holds_every_group(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXAMPLE, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    topology = Topology(world_size=16, tp=4, pp=2, ep=4, etp=1)
    assert result["sizes"] == {"tp": 4, "cp": 1, "dp": 2, "pp": 2, "etp": 1, "ep": 4, "edp": 2}
    for token, groups in result["dense"].items():
        assert groups == topology.dense.get_ranks(token)
    for token, groups in result["expert"].items():
        assert groups == topology.expert.get_ranks(token)
    assert list(result["expert"]) == ["ep", "edp", "etp", "pp"]


def test_token_asks_for_one_axis_set(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*EXAMPLE, "--json", "--token", "pp-tp", "--token", "etp-ep"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert list(result["dense"]) == ["pp-tp"]
    assert list(result["expert"]) == ["etp-ep"]


def test_order_is_passed_on(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--world-size", "8", "--tp", "2", "--order", "dp-tp", "--json"]
    assert main(["ranks", *arguments]) == 0
    assert json.loads(capsys.readouterr().out)["dense"]["tp"][0] == [0, 4]


def test_svg_goes_to_the_file_and_json_stays_clean(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "layout.svg"
    assert main([*EXAMPLE, "--json", "--svg", str(path)]) == 0
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert str(path) in captured.err
    assert path.read_text(encoding="utf-8").startswith("<svg ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--world-size", "12", "--tp", "2", "--pp", "4"], "tp 2 x cp 1 x pp 4 = 8"),
        (["--world-size", "8", "--token", "tp-xx"], 'unknown axis "xx"'),
        (["--world-size", "8", "--order", "tp-tp"], "names axis tp twice"),
        (
            ["--world-size", "8", "--gpus-per-node", "0"],
            "--gpus-per-node must be at least 1, got 0",
        ),
        (["--world-size", "8", "--lines", "-1"], "--lines must be at least 0, got -1"),
        (
            ["--world-size", "8", "--svg", "/nowhere/a.svg"],
            "cannot write /nowhere/a.svg: there is no folder /nowhere; make it",
        ),
        (["--world-size", "8", "--svg", "/"], "cannot write /: it is a folder; name a file in it"),
        (["--world-size", "many"], "--world-size: expected a whole number, but got 'many'"),
        (["--world-size", "8", "--tp", "1.5"], "--tp: expected a whole number, but got '1.5'"),
        (["--world-size", "8", "--tp", "0"], "--tp must be at least 1, got 0"),
        (["--world-size", "2147483648"], "2147483648 is out of range; the largest is 2147483647"),
        ([], "--world-size"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["ranks", *arguments]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert message in error
    assert len(error.splitlines()) == 1
