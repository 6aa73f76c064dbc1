"""Commands from end to end: train with real ranks, generate from what they saved, mistakes."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from megacore.errors import CheckpointError
from megatrain.checkpoint import publish
from megatrain.cli import main
from megatrain.config import load_config
from tests.support.jobs import Ended, Job, assert_gone, start_function

pytestmark = pytest.mark.dist

TINY = """\
[model]
hidden_size = 32
num_layers = 2
num_heads = 2
seq_length = 16

[train]
steps = 4
microbatch_size = 2
global_batch_size = 8
eval_interval = 0

[data]
source = "{text}"

[run]
dir = "{folder}"
plain = true
"""


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    text = tmp_path / "text.txt"
    text.write_text("The quick brown fox jumps over the lazy dog. " * 50)
    config = tmp_path / "tiny.toml"
    config.write_text(TINY.format(text=text, folder=tmp_path / "run"))
    return config


def start(folder: Path, *arguments: str) -> Job:
    return start_function(lambda: main(list(arguments)), folder)


def run(folder: Path, *arguments: str) -> Ended:
    return start(folder, *arguments).finish(timeout_s=60)


def test_a_trained_model_continues_a_text(tiny: Path, tmp_path: Path) -> None:
    ended = run(tmp_path, "train", str(tiny), "--nproc", "2", "--parallel.pp=2")
    assert ended.code == 0, ended.err
    folder = tmp_path / "run"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    saved = load_config(folder / "config.toml")
    assert (saved.parallel.pp, saved.run.nproc, saved.model.vocab_size) == (2, 2, None)
    assert not list(folder.glob("*.err"))

    prompt = "The quick"
    options = ("--prompt", prompt, "--max-new-tokens", "8")
    greedy = run(tmp_path, "generate", str(folder), *options, "--temperature", "0")
    assert greedy.code == 0, greedy.err
    assert greedy.out.startswith(prompt)
    assert len(greedy.out.removeprefix(prompt)) > 1
    drawn = [
        run(tmp_path, "generate", str(folder / "checkpoints"), *options, f"--seed={seed}").out
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_saved_config_trains_again_elsewhere_and_in_another_layout(
    tiny: Path, tmp_path: Path
) -> None:
    assert run(tmp_path, "train", str(tiny), "--nproc=2", "--parallel.tp=2").code == 0
    saved = tmp_path / "run" / "config.toml"
    before = sorted((tmp_path / "run").rglob("*"))
    other = tmp_path / "other"
    ended = run(tmp_path, "train", str(saved), f"--run.dir={other}", "--parallel.tp=1")
    assert ended.code == 0, ended.err
    assert (other / "checkpoints" / "latest").exists()
    assert sorted((tmp_path / "run").rglob("*")) == before


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        ("--data.source=nowhere.txt", "data source nowhere.txt does not exist"),
        ("--data.tokenizer=nowhere.json", "tokenizer file nowhere.json does not exist"),
        ("--checkpoint.resume=nowhere", "there is no checkpoint nowhere"),
        ("--model.seq_length=4000", "4,001"),
        ("--checkpoint.dir=/proc/none", "cannot write checkpoints to /proc/none (checkpoint.dir)"),
        ("--run.dir=/proc/none", "cannot write to run.dir /proc/none"),
    ],
)
def test_a_mistake_that_ranks_find_is_one_sentence_and_leaves_nobody(
    tiny: Path, tmp_path: Path, setting: str, expected: str
) -> None:
    ended = run(tmp_path, "train", str(tiny), "--nproc=2", setting)
    assert ended.code == 2
    [complaint] = ended.err.splitlines()
    assert complaint.startswith("megacore: ")
    assert expected in complaint


def test_generating_from_a_damaged_checkpoint_is_one_sentence(tiny: Path, tmp_path: Path) -> None:
    assert run(tmp_path, "train", str(tiny), "--nproc=1", "--train.steps=1").code == 0
    [weights] = (tmp_path / "run" / "checkpoints").glob("step_*/*.distcp")
    weights.write_bytes(weights.read_bytes()[:100])
    ended = run(tmp_path, "generate", str(tmp_path / "run"), "--prompt", "x")
    assert ended.code == 2
    assert len(ended.err.splitlines()) == 1
    assert weights.name in ended.err


def test_a_run_without_checkpoints_needs_no_folder_for_them(tiny: Path, tmp_path: Path) -> None:
    settings = ("--checkpoint.dir=/proc/none", "--checkpoint.interval=-1")
    ended = run(tmp_path, "train", str(tiny), "--nproc=1", *settings)
    assert (ended.code, ended.err) == (0, "")


def test_resuming_from_damage_only_ends_and_keeps_what_was_measured(
    tiny: Path, tmp_path: Path
) -> None:
    assert run(tmp_path, "train", str(tiny), "--nproc=2").code == 0
    [index] = (tmp_path / "run" / "checkpoints").glob("step_*/index.json")
    index.write_text("{")
    measured = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    ended = run(tmp_path, "train", str(tiny), "--nproc=2", "--checkpoint.resume=auto")
    assert ended.code == 2
    [complaint] = ended.err.splitlines()
    assert "the only checkpoint in" in complaint
    assert str(index) in complaint
    assert (tmp_path / "run" / "metrics.jsonl").read_bytes() == measured


def test_a_fresh_run_moves_the_former_one_aside_and_a_resumed_one_goes_on(
    tiny: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    former = run(tmp_path, "train", str(tiny), "--nproc=1")
    assert "note" not in former.out
    measured = (folder / "metrics.jsonl").read_bytes()
    fresh = run(tmp_path, "train", str(tiny), "--nproc=2", "--train.steps=2")
    assert (fresh.code, fresh.err) == (0, "")
    assert f"note      results of an earlier run were moved to {folder}/previous-1" in fresh.out
    assert (folder / "previous-1" / "metrics.jsonl").read_bytes() == measured
    assert (folder / "previous-1" / "checkpoints" / "step_00000004").is_dir()
    assert [path.name for path in (folder / "checkpoints").glob("step_*")] == ["step_00000002"]
    old = run(tmp_path, "generate", str(folder / "previous-1"), "--prompt=x", "--max-new-tokens=1")
    assert old.code == 0, old.err

    settings = ("--checkpoint.resume=auto", "--train.seed=5")
    resumed = run(tmp_path, "train", str(tiny), "--nproc=1", *settings)
    assert (resumed.code, resumed.err) == (0, "")
    assert "train.seed 1234 -> 5 since the checkpoint" in resumed.out
    assert len((folder / "metrics.jsonl").read_text().splitlines()) == 4
    assert not (folder / "previous-2").exists()


def test_a_second_run_in_the_same_folder_is_refused(tiny: Path, tmp_path: Path) -> None:
    first = start(tmp_path, "train", str(tiny), "--nproc=2", "--train.steps=100000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < deadline, "training did not start"
        time.sleep(0.05)
    try:
        second = run(tmp_path, "train", str(tiny), "--nproc=2")
    finally:
        os.kill(first.pid, signal.SIGTERM)
        ended = first.finish(timeout_s=30)
    assert second.code == 2
    [complaint] = second.err.splitlines()
    assert complaint.startswith("megacore: another run (pid ")
    assert f"is writing to run.dir {tmp_path / 'run'}; wait" in complaint
    assert ended.code == 75
    assert metrics.stat().st_size
    assert not (tmp_path / "run" / "previous-1").exists()


def test_killing_a_rank_of_a_training_names_it_and_ends_the_others(
    tiny: Path, tmp_path: Path
) -> None:
    job = start(tmp_path, "train", str(tiny), "--nproc=4", "--train.steps=100000")
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 60
    while not (metrics.exists() and metrics.stat().st_size):
        assert time.monotonic() < deadline, "training did not start"
        time.sleep(0.05)
    children = Path(f"/proc/{job.pid}/task/{job.pid}/children").read_text().split()
    pids = [int(child) for child in children]
    os.kill(pids[2], signal.SIGKILL)
    ended = job.finish(timeout_s=30)
    assert ended.code == 1
    [complaint] = ended.err.splitlines()
    assert f"rank 2 (pid {pids[2]} on host " in complaint
    assert "killed by signal 9" in complaint
    assert_gone(pids)


def test_doctor_tells_the_facts_and_tries_two_processes(tmp_path: Path) -> None:
    ended = run(tmp_path, "doctor", "--json")
    assert ended.code == 0, ended.err
    facts = json.loads(ended.out)
    assert facts["megacore"]["native core"] == "built"
    assert facts["torch"]["gloo"] == "available"
    assert facts["two gloo processes"]["works"] == "yes"
    table = run(tmp_path, "doctor")
    assert (table.code, table.err) == (0, "")
    assert "CPU cores" in table.out


ASYNC = ("--nproc=2", "--checkpoint.async", "--checkpoint.interval=1")


def test_a_run_that_saves_in_the_background_is_complete_at_its_end(
    tiny: Path, tmp_path: Path
) -> None:
    ended = run(tmp_path, "train", str(tiny), *ASYNC)
    assert (ended.code, ended.err) == (0, "")
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step_00000003", "step_00000004"]
    assert "async = true" in (tmp_path / "run" / "config.toml").read_text()
    again = run(
        tmp_path, "train", str(tiny), "--nproc=1", "--checkpoint.resume=auto", "--train.steps=5"
    )
    assert (again.code, again.err) == (0, "")


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_failed_save_in_the_background_ends_the_run_or_is_a_note(
    tiny: Path, tmp_path: Path, policy: str
) -> None:
    def train_on_a_disk_that_fills() -> int:
        real = publish.check_room

        def check_room(directory: Path, *, num_bytes: int) -> None:
            if any(directory.glob("step_00000002")) and not any(directory.glob("step_00000003")):
                raise CheckpointError("no room for a checkpoint: it takes more")
            real(directory, num_bytes=num_bytes)

        publish.check_room = check_room  # this process ends here
        return main(["train", str(tiny), *ASYNC, f"--checkpoint.on_failure={policy}"])

    ended = start_function(train_on_a_disk_that_fills, tmp_path).finish(timeout_s=60)
    names = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert names == ["latest", "step_00000001", "step_00000002"]
    if policy == "stop":
        assert ended.code == 2
        [complaint] = ended.err.splitlines()
        assert "no room for a checkpoint" in complaint
    else:
        assert ended.code == 2
        assert "ended after step 4, but its last checkpoint was not saved: no room" in ended.err
        assert ended.out.count("a checkpoint was not saved: no room for a checkpoint") == 2


@pytest.mark.parametrize("policy", ["stop", "continue"])
def test_a_disk_that_is_full_at_the_start_ends_the_run_or_is_a_note(
    tiny: Path, tmp_path: Path, policy: str
) -> None:
    def train_on_a_full_disk() -> int:
        full = SimpleNamespace(total=1 << 40, used=1 << 40, free=0)
        shutil.disk_usage = lambda _: full  # this process ends here
        return main(["train", str(tiny), "--nproc=1", f"--checkpoint.on_failure={policy}"])

    ended = start_function(train_on_a_full_disk, tmp_path).finish(timeout_s=60)
    if policy == "stop":
        assert ended.code == 2
        [complaint] = ended.err.splitlines()
        assert "no room for a checkpoint" in complaint
        assert not (tmp_path / "run" / "metrics.jsonl").exists()
    else:
        assert ended.code == 2
        assert "but its last checkpoint was not saved: no room for a checkpoint" in ended.err
        assert "checkpoints cannot be saved now: no room for a checkpoint" in ended.out
        assert "a checkpoint was not saved: no room for a checkpoint" in ended.out
        steps = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
        assert len(steps) >= 4


def test_stopping_a_run_that_saves_in_the_background_leaves_complete_checkpoints(
    tiny: Path, tmp_path: Path
) -> None:
    job = start(tmp_path, "train", str(tiny), *ASYNC, "--train.steps=100000")
    checkpoints = tmp_path / "run" / "checkpoints"
    deadline = time.monotonic() + 60
    while not (checkpoints / "latest").exists():
        assert time.monotonic() < deadline, "nothing was saved"
        time.sleep(0.01)
    os.kill(job.pid, signal.SIGTERM)
    ended = job.finish(timeout_s=30)
    assert ended.code == 75
    resumed = run(
        tmp_path, "train", str(tiny), "--nproc=1", "--checkpoint.resume=auto", "--train.steps=1"
    )
    assert (resumed.code, resumed.err) == (0, "")
    assert "passed over" not in resumed.out


@pytest.mark.parametrize(("most", "traced"), [(20_000, {0, 1, 2, 3}), (8, {0, 2})])
def test_a_trace_of_many_ranks_is_that_of_the_pipeline_of_rank_0(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, most: int, traced: set[int]
) -> None:
    monkeypatch.setattr("megatrain.train.results.MOST_TRACED_ACTIONS", most)
    layout = ("--parallel.pp", "2", "--train.microbatch_size", "1")
    assert run(tmp_path, "train", str(tiny), "--nproc", "4", *layout).code == 0
    trace = json.loads((tmp_path / "run" / "trace.json").read_text())
    passes = [event for event in trace["traceEvents"] if event.get("cat") == "forward"]
    assert {event["pid"] for event in passes} == traced
    assert (tmp_path / "run" / "report.html").exists()
