from __future__ import annotations

import argparse
import gc
import io
import subprocess
import sys
from pathlib import Path

import pytest

import megacore
import megatrain.cli
from megacore import __version__
from megatrain.cli import COMMANDS, doctor, generate, main
from megatrain.data import ByteTokenizer

DEMO = "[parallel]\ntp = 2\npp = 2\n"


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    path = tmp_path / "demo.toml"
    path.write_text(DEMO)
    return path


def complaint_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on standard error of a command that must end with 2."""
    assert main(list(arguments)) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("megacore: ")
    assert "Traceback" not in captured.err
    return captured.err


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    without = capsys.readouterr().out
    assert main(["--help"]) == 0
    assert capsys.readouterr().out == without
    for name, command in COMMANDS.items():
        assert f"{name} " in without
        assert command.help.split()[0] in without


def test_help_and_version_work_as_words(capsys: pytest.CaptureFixture[str]) -> None:
    for words, options in (
        (["help"], ["--help"]),
        (["version"], ["--version"]),
        (["help", "train"], ["train", "--help"]),
    ):
        assert main(words) == 0
        said = capsys.readouterr().out
        assert main(options) == 0
        assert capsys.readouterr().out == said


def test_train_says_on_a_terminal_that_it_starts(
    demo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["train", str(demo), "--nproc", "3"]  # 4 ranks are needed
    assert main(command) == 2
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert main(command) == 2
    assert capsys.readouterr().out == f"starting  {demo}\n"
    assert gc.isenabled()


def test_help_names_no_default_of_a_required_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--help"]) == 0
    shown = capsys.readouterr().out
    assert "None" not in shown
    assert "(default: 0.95)" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_explains_itself(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([name, "--help"]) == 0
    assert f"megacore {name}" in capsys.readouterr().out


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"megacore {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trian", "x.toml"], "unknown command 'trian'; did you mean train?"),
        (["zzz"], "unknown command 'zzz'; the commands are train, generate"),
        (["train"], "the following arguments are required: CONFIG; see megacore train --help"),
        (["train", "nowhere.toml"], "no such file: nowhere.toml"),
        (["train", "x.toml", "--lr", "3"], "unknown option --lr; did you mean --optimizer.lr?"),
        (
            ["train", "x.toml", "--tensor_model_parallel_size=2"],
            "unknown option --tensor-model-parallel-size; did you mean --parallel.tp?",
        ),
        (["train", "x.toml", "--nprox=3"], "unknown option --nprox; did you mean --nproc?"),
        (["train", "x.toml", "y.toml"], "unexpected argument 'y.toml'"),
        (["train", "x.toml", "--train.steps"], "--train.steps needs a value"),
        (["train", "x.toml", "--tp_size", "2"], "unknown option --tp-size; see megacore train"),
        (["plan", "x.toml", "--tp_size=2"], "unknown option --tp-size; see megacore plan"),
        (["ranks", "--world-size=8", "--token=foo"], 'foo: unknown axis "foo"; the axes of dense'),
        (["generate", "x"], "the following arguments are required: --prompt"),
        (["generate", "x", "--prompt=x", "--seed=y"], "--seed: expected a whole number, but got"),
        (["generate", "x", "--prompt=x", "--top-p=y"], "--top-p: expected a number, but got 'y'"),
        (["generate", "x", "--prompt=x", "--top-p=0"], "top_p = 0.0 is not in (0, 1]"),
        (["generate", "x", "--prompt=x", "--top-k=0"], "top_k = 0 must be at least 1"),
        (
            ["generate", "x", "--prompt=x", "--stop="],
            "--stop is empty; give at least one character",
        ),
        (["generate", "x", "--prompt=\udcff"], "--prompt is not valid UTF-8: character 1 is"),
        (["import-hf", "nowhere", "out"], "nowhere does not exist; name the folder that holds con"),
        (["import-hf", "x", "y", "--seq-length=z"], "--seq-length: expected a whole number, but"),
        (["plan", "x.toml", "--shard=first"], "--shard: expected a whole number, but got 'first'"),
        (["helpp"], "unknown command 'helpp'; the commands are"),
        (["doctor", "--jsn"], "unknown option --jsn; did you mean --json?"),
        (["--vrsion"], "unrecognized arguments: --vrsion; see megacore --help"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(
    arguments: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    message = complaint_of(capsys, *arguments)
    assert expected in message
    assert message.count("\n") == 1


def test_impossible_layout_is_refused_before_anything_starts(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = complaint_of(capsys, "train", str(demo), "--nproc", "3")
    assert f"tp 2 ({demo}:2) x cp 1 (default) x pp 2 ({demo}:3) = 4" in message
    assert "nearest: start 4 processes" in message


def test_process_count_is_checked_like_any_setting(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    message = complaint_of(capsys, "train", str(demo), "--nproc=four", "--parallel.tpp=1")
    assert '--nproc=four: run.nproc = "four": expected a whole number' in message
    assert "unknown key parallel.tpp; did you mean parallel.tp?" in message


def test_a_process_count_other_than_torchruns_is_refused(
    demo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("MASTER_PORT", "29500")
    message = complaint_of(capsys, "train", str(demo), "--run.nproc=4")
    assert (
        "run.nproc = 4 (--run.nproc=4), but the launcher started 8 (torchrun, WORLD_SIZE)"
        in message
    )
    message = complaint_of(capsys, "train", str(demo), "--nproc=8", "--model.num_heads=3")
    assert "the launcher started" not in message


def test_nccl_without_a_gpu_is_refused(
    demo: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    message = complaint_of(capsys, "train", str(demo), "--run.backend=nccl")
    assert "run.backend = nccl (--run.backend=nccl) needs GPUs, but torch sees none" in message


def test_underscores_and_dashes_are_the_same_in_flags(
    demo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for spelling in ("--train.global_batch_size=30", "--train.global-batch-size=30"):
        message = complaint_of(capsys, "train", str(demo), "--nproc=8", spelling)
        assert "train.global_batch_size = 30" in message


def test_debug_adds_the_traceback(demo: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--debug", "train", str(demo), "--nproc=3"]) == 2
    captured = capsys.readouterr()
    assert "Traceback" in captured.err
    assert captured.err.splitlines()[-1].startswith("megacore: the layout does not fit")


def test_interrupt_ends_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_args: argparse.Namespace) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr("megatrain.cli.doctor.run", interrupt)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err == "megacore: interrupted\n"


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (MemoryError(), "there is not enough memory for these sizes; choose smaller ones"),
        (MemoryError("1 TiB"), "there is not enough memory for these sizes (1 TiB); choose"),
        (OSError(28, "No space left on device"), "reading or writing failed: No space left on"),
        (OSError(13, "Permission denied", "x.json"), "x.json: Permission denied"),
    ],
)
def test_what_the_machine_refuses_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    error: Exception,
    sentence: str,
) -> None:
    def fail(_args: argparse.Namespace) -> int:
        raise error

    monkeypatch.setattr("megatrain.cli.doctor.run", fail)
    assert main(["doctor"]) == 1
    complaint = capsys.readouterr().err
    assert complaint.startswith(f"megacore: {sentence}")
    assert complaint.count("\n") == 1


def test_generated_text_is_printed_on_a_terminal_of_few_characters(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", narrow)
    generate._print_text("a\ufffdé")
    narrow.flush()
    assert narrow.buffer.getvalue() == b"a??"  # type: ignore[attr-defined]


def test_a_continuation_ends_before_a_stop_text_and_holds_its_beginning_back() -> None:
    text = generate.Continuation(ByteTokenizer(), list(b"Q: \nA:"), ["\nQ", "##"])
    shown = [text.take(all_of_it=False)]
    for byte in "né\n#\nQ".encode():
        assert not text.has_ended
        text.add(byte)
        shown.append(text.take(all_of_it=False))
    assert shown == ["Q: \nA:", "n", "", "é", "", "\n", "#", ""]
    assert (text.has_ended, text.num_new) == (True, 7)
    unfinished = generate.Continuation(ByteTokenizer(), [0xC3], [])
    assert unfinished.take(all_of_it=False) == ""
    assert unfinished.take(all_of_it=True) == "\ufffd"


def test_module_runs_as_a_command() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "megacore", "trian"], capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "megacore: unknown command 'trian'; did you mean train?\n"


def test_output_may_be_cut_off_by_its_reader() -> None:
    command = f"{sys.executable} -m megacore ranks --world-size 4096 --tp 2 | head -1"
    result = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command], capture_output=True, text=True, check=False
    )
    assert result.stderr == ""
    assert result.stdout.count("\n") == 1


def test_doctor_reports_a_core_that_does_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megacore._core", None)
    monkeypatch.delattr(megacore, "_core", raising=False)
    assert doctor._installation()["native core"].startswith("does not load: ")


def test_a_broken_installation_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "megatrain.cli.ranks", None)
    monkeypatch.delattr(megatrain.cli, "ranks", raising=False)
    assert main(["ranks", "--world-size=2"]) == 1
    assert capsys.readouterr().err.startswith("megacore: the installation is incomplete: ")
