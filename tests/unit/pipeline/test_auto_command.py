"""``megacore schedule auto``: options, the certificate in text and JSON, costs per stage."""

from __future__ import annotations

import json

import pytest

from megatrain.cli import main


def run(capsys: pytest.CaptureFixture[str], command: str) -> tuple[int, str, str]:
    code = main(["schedule", *command.split()])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_it_prints_the_certificate(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--pp 8 --chunks 2 --microbatches 32 --memory-limit 16 --placement v"
    code, out, _ = run(capsys, f"auto {sizes}")
    assert code == 0
    assert "makespan 199: no order of actions is faster" in out
    assert "found by zb_v" in out
    assert "with this memory" not in out  # the certificate says it


def test_json_holds_the_certificate_and_the_costs_count(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = "--pp 2 --microbatches 3 --memory-limit 2,1 --whole-backward --effort fast --json"
    code, out, _ = run(capsys, f"auto {options} --costs F=1,2 I=0.5 send=1")
    assert code == 0
    result = json.loads(out)
    assert result["certificate"]["effort"] == "fast"
    assert result["certificate"]["makespan"] == result["makespan"]
    assert result["certificate"]["peak_memory"] == [2, 1]
    assert result["certificate"]["bound"]["by_reason"]["critical_path"] == 8.0
    assert all("W" not in action for row in result["actions"] for action in row)


def test_costs_per_stage_work_with_any_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "gpipe --pp 2 --microbatches 1 --json --costs F=1,2 I=0.5 W=1,0.25")
    assert json.loads(out)["makespan"] == 1 + 2 + 0.75 + 1.5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("auto --memory-limit many", "--memory-limit is 'many'; write a whole number"),
        ("auto --memory-limit 0", "the smallest limit that works there is 1"),
        ("auto --costs F=1,x", "--costs has F='1,x'; write a number"),
        ("auto --costs X=1", "--costs has 'X=1'; write KEY=TIME with KEY one of F, I, W, send"),
        ("auto --costs send=1,2", "--costs has 'send=1,2'; send is one number"),
        ("auto --costs F=1,2,3", "--costs F has 3 entries"),
        ("1f1b --whole-backward", "--whole-backward is for auto only, not for 1f1b; leave one of"),
        ("1f1b --memory-limit 4", "memory_limit is for schedule 'auto' only"),
        ("auto --group-size 4", "group_size is 4, but 'auto' finds its own"),
    ],
)
def test_mistakes_are_named(
    capsys: pytest.CaptureFixture[str], arguments: str, message: str
) -> None:
    code, _, err = run(capsys, arguments)
    assert code != 0
    assert message in err
