"""What ``megacore schedule`` says about mistakes."""

from __future__ import annotations

import pytest

from megacore.cli import main


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["1F1B"], "unknown schedule '1F1B'; did you mean '1f1b'?"),
        (["Interleaved-1F1B"], "did you mean 'interleaved_1f1b'?"),
        (["--compare", "zbv"], "unknown schedule 'zbv'; did you mean 'zb_v'?"),
        (["--compare", "auto"], "--compare shows the schedules with a generator, 'auto' searches"),
        ([], "dualpipe, auto) or give --from-csv FILE"),
        (["1f1b", "--pp", "x"], "argument --pp: expected a whole number, but got 'x'; see"),
        (
            ["1f1b", "--costs", "F=1,2"],
            "--costs F has 2 entries; give one for all stages or 4, one per stage",
        ),
        (["auto", "--memory-limit=1" + 25 * "0"], "the largest is 9223372036854775807"),
        (["auto", "--costs", "I=1,2"], "--costs I has 2 entries; give one for all stages or 4"),
    ],
)
def test_a_mistake_is_told_in_the_words_of_the_command_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(["schedule", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert sentence in captured.err
    assert captured.err.count("\n") == 1
