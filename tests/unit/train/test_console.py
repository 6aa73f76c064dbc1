from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path

import pytest

from megacore.report import RunInfo
from megacore.train.console import Console, EvaluationConsole, RunSummary, sparkline
from megacore.train.metrics import StepRecord

INFO = RunInfo(
    name="[demo]",
    started_at="",
    wall_time_s=None,
    layout={},
    model="GPT, 4 layers",
    num_parameters=885_000,
    data="79 topics",
    num_tokens=442_960,
    unigram_entropy=3.26,
    schedule="1f1b, 8 microbatches",
)
SUMMARY = RunSummary(
    loss=2.0,
    validation_loss=2.5,
    unigram_entropy=3.26,
    tokens_per_s=12_000.0,
    wall_time_s=99.0,
    num_skipped=1,
    files={"report": Path("runs/demo/report.html")},
)


def _start(console: Console, info: RunInfo = INFO) -> None:
    console.start(
        info,
        layout="4 ranks = tp 2 x pp 2",
        folder=Path("runs/demo"),
        notes=("passed over step_00000003",),
    )


def _record(step: int, **changes: float | None) -> StepRecord:
    values = {
        "step": step + 1,
        "loss": 5.0 - step / 20,
        "grad_norm": 0.5,
        "lr": 3e-3,
        "tokens_per_s": 12_345.0,
        "step_time_s": 0.1,
        "num_skipped": 0,
        "samples": 0,
    }
    return StepRecord(**(values | changes))


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def _plain(**options: object) -> tuple[Console, io.StringIO]:
    file = io.StringIO()
    return Console(steps=40, file=file, **options), file


def test_a_file_gets_plain_lines_without_control_characters() -> None:
    console, file = _plain(every=10)
    assert not console.is_live
    with console:
        _start(console)
        for step in range(40):
            console.step(_record(step))
        console.finish(SUMMARY)
    text = file.getvalue()
    assert "\x1b" not in text
    steps = [line.split()[1] for line in text.splitlines() if line.startswith("step ")]
    assert steps == ["1/40", "10/40", "20/40", "30/40", "40/40"]
    assert "step 10/40  loss 4.5500  lr 3.00e-03  grad 0.50  12,345 tok/s  " in text


def test_an_evaluation_prints_about_twenty_lines_to_a_file() -> None:
    file = io.StringIO()
    with EvaluationConsole(num_batches=400, num_tokens=51_200, silent=False, file=file) as console:
        for _ in range(400):
            console.batch()
    first, *lines = file.getvalue().splitlines()
    assert first == "evaluating 51,200 tokens"
    assert [line.split()[1] for line in lines] == [
        "1/400",
        *(f"{k}/400" for k in range(20, 401, 20)),
    ]
    assert all(" tok/s" in line for line in lines)
    assert [" left" in line for line in lines] == [True] * 20 + [False]


def test_an_evaluation_is_silent_on_other_ranks_and_shows_a_bar_on_a_terminal() -> None:
    quiet, terminal = io.StringIO(), Terminal()
    for silent, file in ((True, quiet), (False, terminal)):
        with EvaluationConsole(num_batches=2, num_tokens=64, silent=silent, file=file) as console:
            console.batch()
            console.batch()
    assert quiet.getvalue() == ""
    assert "2/2" in terminal.getvalue()
    assert "batch " not in terminal.getvalue()


def test_a_diverged_run_says_since_when() -> None:
    console, file = _plain(first_step=10)
    with console:
        for step in range(10, 20):
            console.step(_record(step, loss=math.nan if step in (11, 17, 18, 19) else 4.0))
        console.finish(replace(SUMMARY, loss=math.nan, validation_loss=math.inf))
    summary = file.getvalue().rpartition("\n\n")[2]
    assert "loss        not finite since step 18" in summary
    assert "validation  loss not finite" in summary
    assert "nan" not in summary
    assert "above" not in summary


def test_steps_without_labels_are_not_a_divergence() -> None:
    console, file = _plain(first_step=10)
    with console:
        console.step(_record(10, loss=None, grad_norm=None))
        console.step(_record(11, loss=4.0))
        console.step(_record(12, loss=None, grad_norm=None))
        console.finish(replace(SUMMARY, loss=4.0))
    assert "not finite" not in file.getvalue()
    assert "nan" not in file.getvalue()
    assert "loss        4.0000 nats per token" in file.getvalue()


def test_a_divergence_after_steps_without_labels_has_its_own_step() -> None:
    console, file = _plain(first_step=10)
    with console:
        for step, loss in enumerate((4.0, None, math.nan, None), start=10):
            console.step(_record(step, loss=loss))
        console.finish(replace(SUMMARY, loss=math.nan))
    number = _record(12, loss=math.nan).step
    assert f"loss        not finite since step {number}" in file.getvalue()


def test_a_run_without_any_label_has_no_loss() -> None:
    console, file = _plain(first_step=10)
    with console:
        console.step(_record(10, loss=None, grad_norm=None))
        console.finish(replace(SUMMARY, loss=None, validation_loss=None))
    assert "loss     none, because no label counted" in file.getvalue()


def test_the_start_table_says_what_will_happen() -> None:
    console, file = _plain()
    _start(console)
    text = file.getvalue()
    for part in (
        "run       [demo]",
        "layout    4 ranks = tp 2 x pp 2",
        "885k parameters",
        "443k training tokens, unigram entropy 3.260 nats",
        "1f1b, 8 microbatches",
        "1 to 40",
        "passed over step_00000003",
    ):
        assert part in text
    assert "resumed" not in text


def test_a_finished_run_says_that_nothing_is_left() -> None:
    console, file = _plain(first_step=40)
    _start(console, replace(INFO, resumed_from="runs/demo/step_00000040"))
    assert "steps     all 40 are done" in file.getvalue()
    assert "resumed   runs/demo/step_00000040" in file.getvalue()


def test_long_lines_are_not_wrapped_in_a_file() -> None:
    console, file = _plain()
    console.note("x" * 300)
    assert file.getvalue() == "x" * 300 + "\n"


def test_validation_prints_a_line_whenever_it_happens() -> None:
    console, file = _plain(every=100)
    console.step(_record(0))
    console.step(_record(6, validation_loss=2.0))
    assert "validation loss 2.0000 (perplexity 7.39)" in file.getvalue()


def test_a_skipped_step_is_reported_once() -> None:
    console, file = _plain(every=100)
    console.step(_record(0))
    console.step(_record(1, grad_norm=math.nan, num_skipped=1))
    console.step(_record(2, num_skipped=1))
    text = file.getvalue()
    assert text.count("not finite") == 1
    assert "step 2: the gradient is not finite, so the update was skipped (1 so far)" in text


def test_skips_before_a_resume_are_not_reported_again() -> None:
    console, file = _plain(every=100, first_step=20)
    console.step(_record(20, num_skipped=3))
    assert "not finite" not in file.getvalue()


def test_the_end_summary_compares_with_the_unigram_entropy() -> None:
    console, file = _plain(every=100)
    for step in range(40):
        console.step(_record(step))
    console.finish(SUMMARY)
    text = file.getvalue()
    assert "2.0000 nats per token, 1.260 below the unigram entropy" in text
    assert "1 step with a non-finite gradient" in text
    assert "runs/demo/report.html" in text
    assert "5.00 █" in text


def test_a_silent_console_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with Console(steps=40, silent=True) as console:
        _start(console)
        console.step(_record(0, grad_norm=math.nan, num_skipped=1, validation_loss=2.0))
        console.note("hello")
        console.finish(SUMMARY)
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == ""


def test_a_terminal_gets_a_bar_that_is_taken_down_on_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    file = Terminal()

    def fail() -> None:
        with Console(steps=40, file=file) as console:
            assert console.is_live
            console.step(_record(0, validation_loss=2.0))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        fail()
    text = file.getvalue()
    assert "1/40" in text
    assert "loss 5.0000" in text
    assert "step 1: validation loss 2.0000" in text
    assert text.rstrip().endswith("\x1b[?25h")  # the cursor is back


def test_plain_wins_over_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    assert not Console(steps=4, plain=True, file=Terminal()).is_live
    monkeypatch.setenv("TERM", "dumb")
    assert not Console(steps=4, file=Terminal()).is_live


def test_a_sparkline_averages_stretches_and_ignores_what_is_not_finite() -> None:
    assert sparkline([math.nan, 4.0, 4.0, 0.0, 0.0], width=2) == "█▁"
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([math.inf]) == ""
