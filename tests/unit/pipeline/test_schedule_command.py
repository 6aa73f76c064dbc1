"""``megacore schedule`` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megacore.pipeline import Schedule, Timeline, build_schedule
from megatrain.cli import main


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["schedule", *arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_prints_the_grid_the_bubble_and_the_ranks(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = run(capsys, "1f1b", "--pp", "2", "--microbatches", "3")
    assert code == 0
    assert "makespan 12, bubble 25.0% (25.0% without a barrier between steps)" in out
    assert "at most 2 microbatch activations in flight on one rank" in out
    assert "rank 0  0F0 0F1         0B0---- 0F2 0B1----     0B2----" in out
    assert "rank 1      1F0 1B0---- 1F1 1B1---- 1F2 1B2----" in out
    assert "in flight at most" in out


GOLDEN = """\
interleaved_1f1b: 4 ranks, 2 chunks each, 8 stages, 4 microbatches
makespan 33, bubble 27.3% (27.3% without a barrier between steps), at most 8 microbatch activations in flight on one rank
this order is optimal: none is faster than 33 with this memory (the work of one rank, from its first start to its shortest tail)

time    0   1   2   3   4   5   6   7   8   9   10  11  12  13  14  15  16  17  18  19  20  21  22  23  24  25  26  27  28  29  30  31  32
rank 0  0F0 0F1 0F2 0F3 4F0 4F1 4F2 4F3                         4B0----     4B1----     4B2----     4B3---- 0B0---- 0B1---- 0B2---- 0B3----
rank 1      1F0 1F1 1F2 1F3 5F0 5F1 5F2 5F3             5B0----     5B1----     5B2----     5B3---- 1B0---- 1B1---- 1B2---- 1B3----
rank 2          2F0 2F1 2F2 2F3 6F0 6F1 6F2     6B0---- 6F3 6B1----     6B2----     6B3---- 2B0---- 2B1---- 2B2---- 2B3----
rank 3              3F0 3F1 3F2 3F3 7F0 7B0---- 7F1 7B1---- 7F2 7B2---- 7F3 7B3---- 3B0---- 3B1---- 3B2---- 3B3----
"""  # noqa: E501


def test_the_whole_text_of_a_small_case(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    _, out, _ = run(capsys, "interleaved_1f1b", "--pp=4", "--chunks=2", "--microbatches=4")
    assert out.startswith(GOLDEN)


def test_the_text_says_which_stages_hold_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "dualpipe", "--pp=4", "--microbatches=8")
    assert "2 copies of the model: stage s + 4 holds the layers of stage s;" in out
    _, out, _ = run(capsys, "dualpipe_v", "--pp=4", "--microbatches=8")
    assert "copies of the model" not in out


COMPARED = """\
4 ranks, 8 microbatches; all layers of a rank take 1 forward, 2 backward (1 of it for the weights), a message 0

    schedule            makespan   bubble    span   in flight   bound    gap   with
────────────────────────────────────────────────────────────────────────────────────────────
*   interleaved_zb          25.5     5.9%    5.9%           4    25.5   0.0%   v 2, G 4
    zb_v                    25.5     5.9%    0.0%           4    25.5   0.0%   v 2
    dualpipe                  26     7.7%    7.7%           5      25   4.0%   v 1, copies 2
*   v_half                  26.5     9.4%    9.4%           3    26.5   0.0%   v 2
    zb_h1                     27    11.1%   11.1%           4      27   0.0%   v 1
    dualpipe_v                27    11.1%   11.1%         4.5    25.5   5.9%   v 2
    zb_h2                     27    11.1%    0.0%           7      27   0.0%   v 1
    group_interleaved         28    14.3%   14.3%           3      28   0.0%   v 2, G 2
>   interleaved_1f1b        28.5    15.8%   15.8%         5.5    28.5   0.0%   v 2, G 4, k 2
    looped_bfs              28.5    15.8%   15.8%           8    28.5   0.0%   v 2
*   v_min                   29.5    18.6%   18.6%           2    29.5   0.0%   v 2
    1f1b_v                  31.5    23.8%   23.8%           3    31.5   0.0%   v 2
    1f1b                      33    27.3%   27.3%           4      33   0.0%   v 1
    gpipe                     33    27.3%   27.3%           8      33   0.0%   v 1
"""  # noqa: E501


def test_pairs_hide_what_they_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("interleaved_1f1b", "--pp=2", "--chunks=2", "--microbatches=4", "--json")
    makespans = []
    for pairs in (("--pairs=whole",), ("--pairs=whole", "--overlap=1"), ("--pairs=split",)):
        code, out, _ = run(capsys, *sizes, *pairs)
        assert code == 0
        makespans.append(json.loads(out)["makespan"])
    assert makespans == [27, 22, 26]


def test_compare_shows_all_schedules_fastest_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    code, out, _ = run(capsys, "interleaved_1f1b", "--compare", "--pp=4", "--microbatches=8")
    assert code == 0
    lines = [line.rstrip() for line in out.splitlines()]
    wanted = COMPARED.splitlines()
    assert lines[: len(wanted)] == wanted
    assert "  no_pipelining: num_ranks is 4; no_pipelining runs on 1 rank." in out
    monkeypatch.setenv("COLUMNS", "60")
    _, out, _ = run(capsys, "--compare", "--pp=4", "--microbatches=8")
    assert all(len(line) <= 60 for line in out.splitlines())
    assert "zb_h2                     27    11.1%           7   0.0%" in out


def test_a_narrow_terminal_cuts_time_into_panels(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "70")
    _, out, _ = run(capsys, "interleaved_1f1b", "--chunks=2", "--microbatches=8")
    assert out.count("time  ") == 4
    assert all(len(line) <= 70 for line in out.splitlines())
    _, out, _ = run(capsys, "1f1b", "--pp=40", "--microbatches=500")
    assert "more ranks" in out
    assert "of the time; --svg FILE draws all of it" in out


def test_only_what_is_shown_of_a_large_schedule_is_laid_out(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule = build_schedule("1f1b", num_ranks=40, num_microbatches=50)
    timeline = schedule.simulate()
    whole = timeline.to_text().splitlines()
    assert timeline.first_ranks(3) == [event for event in timeline.events if event.rank < 3]
    assert timeline.first_ranks(99) == timeline.events

    def forbidden(_timeline: Timeline) -> None:
        raise AssertionError("events of all ranks were made")

    monkeypatch.setattr(Timeline, "events", property(forbidden))
    monkeypatch.setenv("COLUMNS", "4000")
    code, out, _ = run(capsys, "1f1b", "--pp=40", "--microbatches=50")
    assert code == 0
    assert "... and 8 more ranks" in out
    shown = [line for line in out.splitlines() if line.startswith("rank ") and "F" in line]
    assert [line.split() for line in shown] == [line.split() for line in whole[1:33]]


def test_colour_shows_microbatches_on_shades(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in (("FORCE_COLOR", "1"), ("COLORTERM", "truecolor"), ("COLUMNS", "200")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    _, out, _ = run(capsys, "interleaved_1f1b", "--chunks", "2", "--microbatches", "4")
    backgrounds = {part.split("m")[0] for part in out.split("48;2;")[1:]}
    assert len(backgrounds) == 4  # forward and backward, two chunks
    assert "shades: model chunks of the rank" in out


def test_json_has_everything(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(
        capsys,
        "interleaved_1f1b",
        "--pp=2",
        "--chunks=2",
        "--microbatches=5",
        "--group_size=3",
        "--json",
    )
    result = json.loads(out)
    assert code == 0
    assert result["order"][0][:6] == [1, 1, 1, 2, 2, 2]
    assert result["makespan"] == 33
    assert result["peak_in_flight"] == [6, 4]
    assert result["stages"] == [[0, 2], [1, 3]]
    assert result["actions"][1][0] == "1F0"


def test_costs_and_forward_only_change_the_times(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(
        capsys, "1f1b", "--pp=2", "--microbatches=3", "--forward=2", "--backward=5", "--json"
    )
    assert json.loads(out)["makespan"] == (3 + 1) * 7
    _, out, _ = run(capsys, "1f1b", "--pp=2", "--microbatches=3", "--forward-only", "--json")
    assert json.loads(out)["makespan"] == 4
    _, out, _ = run(capsys, "gpipe", "--pp=2", "--microbatches=3", "--send=0.5", "--json")
    assert json.loads(out)["makespan"] == 12 + 2 * 0.5


def test_files_are_written_and_read_back(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    files = {name: str(tmp_path / f"schedule.{name}") for name in ("svg", "csv", "trace")}
    code, _, err = run(capsys, "1f1b", *(f"--{name}={file}" for name, file in files.items()))
    assert code == 0
    assert err.count("wrote ") == 3
    assert Schedule.from_csv(files["csv"]) == build_schedule(
        "1f1b", num_ranks=4, num_microbatches=8
    )
    assert "<svg" in Path(files["svg"]).read_text()
    assert json.loads(Path(files["trace"]).read_text())["traceEvents"]
    code, out, _ = run(capsys, "--from-csv", files["csv"], "--json")
    assert (code, json.loads(out)["makespan"]) == (0, 33)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["1fb1"], "did you mean '1f1b'"),
        ([], "name a schedule"),
        (["1f1b", "--from-csv", "x"], "one of the two"),
        (["1f1b", "--pp=0"], "num_ranks must be at least 1, got 0"),
        (["1f1b", "--chunks=2"], "use num_chunks 1"),
        (
            ["interleaved_1f1b", "--chunks=3", "--microbatches=5", "--group-size=4"],
            "Nearest legal group_size: 5",
        ),
        (["1f1b", "--backward=-1"], "--backward must be a finite number of at least 0, got -1"),
        (["1f1b", "--send=nan"], "--send must be a finite number of at least 0, got nan"),
        (["--from-csv", "/nowhere/x.csv"], "cannot read /nowhere/x.csv"),
        (
            ["1f1b", "--svg", "/nowhere/x.svg"],
            "cannot write /nowhere/x.svg: there is no folder /nowhere; make it",
        ),
        (["1f1b", "--csv", "/nowhere/x.csv"], "cannot write /nowhere/x.csv: there is no folder"),
        (["1f1b", "--trace", "/"], "cannot write /: it is a folder; name a file in it"),
        (["1f1b", "--send=often"], "--send: expected a number, but got 'often'"),
        (["1f1b", "--program", "--keep=x"], "--keep: expected a whole number, but got 'x'"),
        (["1f1b", "--microbatchs=3"], "--microbatches"),
        (["1f1b", "--overlap=2"], "--overlap is 2; it is a share, from 0 to 1"),
        (["1f1b", "--backward-weight=3"], "--backward-weight is 3, but it is a part of --backward"),
        (["1fb1", "--compare"], "unknown schedule '1fb1'; did you mean '1f1b'?"),
        (["--compare", "--svg=x.svg"], "--svg is about one; leave one of them out"),
        (["--compare", "--pp=0"], "num_ranks must be at least 1, got 0"),
        (["--compare", "--chunks=0"], "num_chunks must be at least 1, got 0"),
        (["--compare", "--pairs=whole"], "--pairs is about one; leave one of them out"),
        (["zb_v", "--pairs=whole"], "has no choice of them; leave them out"),
        (["--from-csv=x.csv", "--pairs=split"], "--pairs is to make one"),
        (["--compare", "--memory-limit=3"], "--memory-limit is about one; leave one of them out"),
        (["--compare", "--program"], "--program is about one; leave one of them out"),
        (["1f1b", "--pp=99999999999999"], "99999999999999 is out of range"),
        (["1f1b", "--pp=two"], "--pp: expected a whole number, but got 'two'"),
        (["1f1b", "--keep=0"], "--keep is for --program; add that, or leave it out"),
        (["1f1b", "--receives=in_order"], "--receives is for --program"),
        (["1f1b", "--program", "--json"], "--json is about times; leave one of them out"),
        (["1f1b", "--program", "--svg=x.svg"], "--svg is about times"),
        (["--from-csv=x.csv", "--pp=4"], "--pp is to make one; leave one of them out"),
        (["--from-csv=x.csv", "--memory-limit=4"], "--memory-limit is to make one"),
        (["1f1b", "--forward=1e308", "--send=1e308"], "choose a larger unit of time"),
    ],
)
def test_mistakes_are_one_sentence_and_exit_code_2(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert (code, out) == (2, "")
    assert sentence in err
    assert "Traceback" not in err
    assert len(err.strip().splitlines()) == 1


def test_work_that_takes_no_time_can_be_shown(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "1f1b", "--forward=0", "--backward=0")
    assert (code, err) == (0, "")
    assert "makespan 0, bubble 0.0%" in out
    assert "critical path: " in out


def test_programs_of_all_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("1f1b", "--pp=2", "--microbatches=2")
    code, out, _ = run(capsys, *arguments, "--program")
    assert code == 0
    assert out.splitlines() == [
        "rank 0: 0F0 0SEND_F0 0RECV_B0 0F1 0SEND_F1 0RECV_B1 0B0 0B1",
        "rank 1: 1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
    ]
    _, out, _ = run(capsys, *arguments, "--program", "--keep=0", "--receives=in_order")
    assert "0RECOMPUTE1 0B1" in out
    code, _, err = run(capsys, *arguments, "--program", "--keep=-1")
    assert (code, "--keep must be at least 0, got -1" in err) == (2, True)


def test_the_critical_path_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "gpipe", "--pp=2", "--microbatches=2", "--send=0.5")
    [line] = [line for line in out.splitlines() if line.startswith("critical path")]
    assert line == "critical path: 6 actions from 0F0 to 0B1, 50% on rank 0, 40% on rank 1"
