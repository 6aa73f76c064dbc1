"""A signal to any process of a run at any moment: all ranks stop together, saved and resumable."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megacore.calls.processes import process_state
from megatrain.cli import main
from tests.support.campaigns import representatives
from tests.support.jobs import Ended, Job, assert_gone, start_command, start_function

pytestmark = pytest.mark.dist

STEPS = 30
CONFIG = """\
[model]
hidden_size = 32
num_layers = 4
num_heads = 4
seq_length = 16
dropout = 0.1

[train]
steps = {steps}
microbatch_size = 1
global_batch_size = 8
eval_interval = 0

[data]
source = "{text}"

[run]
plain = true
"""
LAYOUTS = {
    "single": ("--nproc=1",),
    "dp2": ("--nproc=2",),
    "tp2": ("--nproc=2", "--parallel.tp=2"),
    "pp2": ("--nproc=2", "--parallel.pp=2"),
    "dp2 overlapped": (
        "--nproc=2",
        "--optimizer.overlap=all",
        "--checkpoint.async",
    ),
    "tp2pp2": ("--nproc=4", "--parallel.tp=2", "--parallel.pp=2"),
}
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
TARGETS = ("launcher", "rank")
CASES = [(layout, number, target) for layout in LAYOUTS for number in SIGNALS for target in TARGETS]
KEPT = [
    ("pp2", signal.SIGUSR1, "rank"),
    ("dp2 overlapped", signal.SIGINT, "launcher"),
]


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stopping")
    (folder / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 200)
    path = folder / "tiny.toml"
    path.write_text(CONFIG.format(text=folder / "text.txt", steps=STEPS))
    return path


@pytest.fixture(scope="module")
def undisturbed(config: Path) -> Callable[[str], dict[int, float]]:
    """Losses of a run of a layout that nothing stops."""
    known: dict[str, dict[int, float]] = {}

    def losses(layout: str) -> dict[int, float]:
        if layout not in known:
            folder = config.parent / layout.replace(" ", "-")
            ended = _start(config, folder, *LAYOUTS[layout]).finish(timeout_s=120)
            assert ended.code == 0, ended.err
            known[layout] = _losses(folder)
        return known[layout]

    return losses


def _start(config: Path, folder: Path, *settings: str) -> Job:
    arguments = ["train", str(config), f"--run.dir={folder}", *settings]
    return start_function(lambda: main(arguments), config.parent)


def _losses(folder: Path) -> dict[int, float]:
    try:
        lines = (folder / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return {}
    records = [json.loads(line) for line in lines if line.endswith("}")]
    return {record["step"] - 1: record["loss"] for record in records}


def _wait_for_step(folder: Path, step: int) -> None:
    deadline = time.monotonic() + 60
    while len(_losses(folder)) <= step:
        assert time.monotonic() < deadline, "the run did not start"
        time.sleep(0.005)


def _children(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children]


def _saved_step(folder: Path) -> int:
    return int((folder / "checkpoints" / "latest").read_text().strip().removeprefix("step_"))


@pytest.mark.parametrize(("layout", "number", "target"), representatives(CASES, KEPT))
def test_a_signal_saves_and_the_run_continues_exactly(
    config: Path,
    tmp_path: Path,
    undisturbed: Callable[[str], dict[int, float]],
    layout: str,
    number: signal.Signals,
    target: str,
) -> None:
    expected = undisturbed(layout)
    repeats = 1 if (layout, number, target) in KEPT else 2
    for repeat in range(repeats):
        seed = f"{layout}/{number}/{target}/{repeat}"
        chance = random.Random(seed)
        print("seed", seed)
        folder = tmp_path / str(repeat)
        job = _start(config, folder, *LAYOUTS[layout])
        _wait_for_step(folder, chance.randrange(STEPS - 15))
        ranks = _children(job.pid)
        pid = job.pid if target == "launcher" else chance.choice(ranks)
        time.sleep(chance.random() * 0.05)
        os.kill(pid, number)
        ended = job.finish(timeout_s=60)
        assert (ended.code, ended.err) == (75, ""), seed
        done = len(_losses(folder))
        assert f"stopped early after step {done} (" in ended.out
        if target == "rank":
            assert f"({number.name} to rank {ranks.index(pid)})" in ended.out
        assert _saved_step(folder) == done
        assert_gone(ranks)
        resumed = _start(config, folder, *LAYOUTS[layout], "--checkpoint.resume=auto").finish(
            timeout_s=120
        )
        assert (resumed.code, resumed.err) == (0, ""), seed
        assert _losses(folder) == expected, seed


def test_a_second_signal_ends_the_run_at_once(config: Path, tmp_path: Path) -> None:
    job = _start(config, tmp_path, "--nproc=2", "--train.steps=100000")
    _wait_for_step(tmp_path, 2)
    ranks = _children(job.pid)
    for rank in ranks:
        os.kill(rank, signal.SIGSTOP)  # none can finish its step
    os.kill(job.pid, signal.SIGINT)
    time.sleep(0.3)
    os.kill(job.pid, signal.SIGINT)
    ended = job.finish(timeout_s=10)
    assert (ended.code, ended.err) == (130, "megacore: interrupted; all ranks were stopped\n")
    assert_gone(ranks)


def test_a_diverged_run_ends_and_keeps_the_last_good_checkpoint(
    config: Path, tmp_path: Path
) -> None:
    settings = ("--nproc=2", "--parallel.pp=2", "--checkpoint.interval=1", "--checkpoint.keep=1")
    good = _start(config, tmp_path, *settings, "--train.steps=3").finish(timeout_s=60)
    assert good.code == 0, good.err
    broken = ("--optimizer.lr=1e37", "--optimizer.warmup=0", "--train.max_skipped_steps=4")
    resume = "--checkpoint.resume=auto"
    ended = _start(config, tmp_path, *settings, *broken, resume).finish(timeout_s=60)
    assert ended.code == 1
    [complaint] = ended.complaints()
    assert "the updates of 4 steps in a row were skipped" in complaint
    assert "the first non-finite value: rank 1, gradient of layers.3." in complaint
    kept = {path.name for path in (tmp_path / "checkpoints").glob("step_*")}
    assert "step_00000003" in kept  # from before the rate that ruined the weights
    assert len(kept) == 2
    latest = tmp_path / "checkpoints" / "step_00000003"
    again = _start(config, tmp_path, *settings, "--train.steps=5", f"--checkpoint.resume={latest}")
    assert again.finish(timeout_s=60).code == 0


def test_a_run_stops_by_itself_after_its_time(config: Path, tmp_path: Path) -> None:
    settings = ("--nproc=2", "--train.steps=100000", "--run.stop_after=2s")
    ended = _start(config, tmp_path, *settings).finish(timeout_s=60)
    assert (ended.code, ended.err) == (75, "")
    assert "(run.stop_after = 2s); continue with the same command" in ended.out
    assert _saved_step(tmp_path) == len(_losses(tmp_path))


def test_checkpoints_are_written_by_time(config: Path, tmp_path: Path) -> None:
    settings = ("--nproc=2", "--train.steps=100000", "--checkpoint.interval_time=1s")
    job = _start(config, tmp_path, *settings)
    _wait_for_step(tmp_path, 0)
    deadline = time.monotonic() + 60
    seen: set[str] = set()
    while len(seen) < 3:
        assert time.monotonic() < deadline, f"only {seen} were written"
        seen |= {path.name for path in (tmp_path / "checkpoints").glob("step_????????")}
        time.sleep(0.05)
    os.kill(job.pid, signal.SIGTERM)
    assert job.finish().code == 75


def test_a_run_without_checkpoints_says_that_nothing_was_saved(
    config: Path, tmp_path: Path
) -> None:
    job = _start(config, tmp_path, "--nproc=2", "--train.steps=100000", "--checkpoint.interval=-1")
    _wait_for_step(tmp_path, 2)
    os.kill(job.pid, signal.SIGTERM)
    ended = job.finish()
    assert (ended.code, ended.err) == (143, "")
    assert "nothing was saved, because checkpoint.interval is -1" in ended.out


# ---- torchrun and SLURM --------------------------------------------------------------------------


def _torchrun(config: Path, folder: Path, *settings: str, options: tuple[str, ...] = ()) -> Job:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = ["-m", "megacore", "train", str(config), f"--run.dir={folder}", *settings]
    return start_command([*launcher, *options, *command], config.parent)


def _finish(job: Job) -> Ended:
    return job.finish(timeout_s=90)


def _ranks_of(job: Job) -> list[int]:
    return [pid for pid in _children(job.pid) if process_state(pid) is not None]


def test_torchrun_saves_on_sigterm_and_continues(
    config: Path, tmp_path: Path, undisturbed: Callable[[str], dict[int, float]]
) -> None:
    job = _torchrun(config, tmp_path)
    _wait_for_step(tmp_path, 4)
    os.kill(job.pid, signal.SIGTERM)
    ended = _finish(job)
    assert ended.code != 0  # torchrun's own
    done = len(_losses(tmp_path))
    # torchrun signals one rank after the other; a step may end in between.
    cause = r"\((signals to 2 ranks .*|SIGTERM to rank [01])\)"
    assert re.search(rf"stopped early after step {done} {cause}", ended.out), ended.out
    assert _saved_step(tmp_path) == done
    assert (tmp_path / "stopped").exists()
    assert _finish(_torchrun(config, tmp_path, "--checkpoint.resume=auto")).code == 0
    assert not (tmp_path / "stopped").exists()
    assert _losses(tmp_path) == undisturbed("dp2")


@pytest.mark.campaign
def test_a_signal_to_one_rank_of_torchrun_is_no_failure(config: Path, tmp_path: Path) -> None:
    job = _torchrun(config, tmp_path)
    _wait_for_step(tmp_path, 4)
    os.kill(_ranks_of(job)[1], signal.SIGUSR1)
    ended = _finish(job)
    assert ended.code == 0, ended.err
    assert "(SIGUSR1 to rank " in ended.out
    assert (tmp_path / "stopped").read_text().startswith("SIGUSR1 to rank ")
    assert _saved_step(tmp_path) == len(_losses(tmp_path))


@pytest.mark.campaign
def test_torchrun_restarts_a_run_that_goes_on_by_itself(
    config: Path, tmp_path: Path, undisturbed: Callable[[str], dict[int, float]]
) -> None:
    job = _torchrun(config, tmp_path, "--checkpoint.interval=5", options=("--max-restarts=1",))
    _wait_for_step(tmp_path, 12)
    os.kill(_ranks_of(job)[1], signal.SIGKILL)
    ended = _finish(job)
    assert ended.code == 0, ended.err
    assert "resumed   " in ended.out
    assert _losses(tmp_path) == undisturbed("dp2")


@pytest.mark.campaign
def test_tasks_of_srun_train_save_and_resume_after_a_requeue(
    config: Path, tmp_path: Path, undisturbed: Callable[[str], dict[int, float]]
) -> None:
    def start(*settings: str, restarts: int) -> list[Job]:
        def task(rank: int) -> Job:
            # What srun --ntasks=2 sets, with this machine as the only node.
            env = {
                "SLURM_JOB_ID": str(os.getpid()),
                "SLURM_STEP_ID": str(restarts),
                "SLURM_PROCID": str(rank),
                "SLURM_LOCALID": str(rank),
                "SLURM_NODEID": "0",
                "SLURM_STEP_NUM_TASKS": "2",
                "SLURM_STEP_TASKS_PER_NODE": "2",
                "SLURM_STEP_NODELIST": "localhost",
                "SLURM_RESTART_COUNT": str(restarts),
            }
            command = ["-m", "megacore", "train", str(config), f"--run.dir={tmp_path}", *settings]
            return start_command([sys.executable, *command], config.parent, env=env)

        return [task(rank) for rank in range(2)]

    jobs = start(restarts=0)
    _wait_for_step(tmp_path, 4)
    for job in jobs:
        os.kill(job.pid, signal.SIGUSR1)  # as sbatch --signal=USR1@120 does
    assert [_finish(job).code for job in jobs] == [75, 75]
    first, second = (_finish(job) for job in start(restarts=1))
    assert (first.code, second.code) == (0, 0), first.err
    assert "resumed   " in first.out
    assert _losses(tmp_path) == undisturbed("dp2")


def test_a_restart_with_other_settings_is_another_run(config: Path, tmp_path: Path) -> None:
    assert _start(config, tmp_path, "--nproc=1", "--train.steps=2").finish().code == 0
    arguments = ["train", str(config), f"--run.dir={tmp_path}", "--nproc=1", "--train.seed=5"]
    command = [sys.executable, "-m", "megacore", *arguments]
    ended = _finish(start_command(command, config.parent, env={"SLURM_RESTART_COUNT": "1"}))
    assert ended.code == 0, ended.err
    where = tmp_path / "previous-1" / "checkpoints"
    assert f"to continue it, start with --checkpoint.resume={where}" in ended.out
    assert len(_losses(tmp_path)) == STEPS
