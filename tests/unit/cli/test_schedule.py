"""What ``megacore schedule`` says about mistakes."""

from __future__ import annotations

import pytest

from megacore.pipeline.compare import compared_actions
from megatrain.cli import main
from megatrain.cli.schedule_compare import MOST_ACTIONS

# Of all schedules on 500 ranks.
PER_MICROBATCH = compared_actions(num_ranks=500, num_microbatches=1, num_chunks=None)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["1F1B"], "unknown schedule '1F1B'; did you mean '1f1b'?"),
        (["Interleaved-1F1B"], "did you mean 'interleaved_1f1b'?"),
        (["--compare", "zbv"], "unknown schedule 'zbv'; did you mean 'zb_v'?"),
        (["--compare", "auto"], "--compare shows the schedules with a generator, 'auto' searches"),
        (
            ["--compare", "--pp", "500", "--microbatches", "4000"],
            f"500 ranks x 4000 microbatches are {4000 * PER_MICROBATCH:,} in all schedules; use at "
            f"most --microbatches {MOST_ACTIONS // PER_MICROBATCH}, or look at one schedule alone",
        ),
        (["--compare", "--pp", "10000000"], "20000000; use at most --pp 1024, or look at one"),
        (["--compare", "--pp", "1500", "--chunks", "1"], "use at most --pp 1024, or look at one"),
        (["--compare", "--chunks", "3000"], "use at most --chunks 512, or look at one"),
        (
            ["--compare", "--pp", "5000", "--chunks", "3000"],
            "use at most --pp 1024 with --chunks 2, or look at one",
        ),
        (
            ["--compare", "--pp", "0", "--microbatches", "9999999"],
            "num_ranks must be at least 1, got 0",
        ),
        (
            ["gpipe", "--pp", "200000000"],
            "200000000 ranks x 1 chunks x 8 microbatches need more than 268435456 actions; use "
            "fewer ranks (at most 16777216)",
        ),
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
