"""Real processes: how a run ends, who is blamed, and that nothing is left behind."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
import time
from functools import partial
from pathlib import Path

import pytest
from torch.distributed import PrefixStore

from megatrain.launch.store import StoreAddress
from tests.support.jobs import (
    Ended,
    Job,
    assert_gone,
    pids_in,
    start_command,
    start_function,
    wait_for_ranks,
)
from tests.support.launch_worker import PEER_TIMEOUT_S, launch

pytestmark = pytest.mark.dist

WORKER = Path(__file__).parents[1] / "support" / "launch_worker.py"


def start(behaviour: str, folder: Path, *, ranks: int = 3) -> Job:
    return start_function(partial(launch, behaviour, ranks, folder), folder)


def run(behaviour: str, folder: Path, *, ranks: int = 3) -> Ended:
    return start(behaviour, folder, ranks=ranks).finish()


def run_torchrun(folder: Path, *arguments: str, ranks: int) -> Ended:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return start_command([*launcher, f"--nproc-per-node={ranks}", *arguments], folder).finish()


# ---- our own launcher ----------------------------------------------------------------------------


def test_ranks_of_a_good_run_agree_and_leave(tmp_path: Path) -> None:
    ended = run("ok", tmp_path, ranks=4)
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "sum 10\n" * 4
    assert len(set(pids_in(tmp_path))) == 4
    assert_gone(pids_in(tmp_path))


def test_exit_code_of_a_worker_is_kept(tmp_path: Path) -> None:
    assert run("code", tmp_path).code == 7


def launch_with_few_files(behaviour: str, folder: Path) -> int:
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 400))
    return launch(behaviour, 2, folder)


def test_ranks_may_open_as_many_files_as_the_system_lets_them(tmp_path: Path) -> None:
    assert (
        start_function(partial(launch_with_few_files, "many-files", tmp_path), tmp_path)
        .finish()
        .code
        == 0
    )
    ended = start_function(
        partial(launch_with_few_files, "too-many-files", tmp_path), tmp_path
    ).finish()
    assert ended.code == 1
    [complaint] = ended.complaints()
    assert "Too many open files" in complaint
    assert "may open 400 files (ulimit -n), and needs two per rank" in complaint


def test_error_of_one_rank_is_told_once_and_its_traceback_kept(tmp_path: Path) -> None:
    ended = run("error", tmp_path)
    assert ended.code == 1
    [complaint] = ended.complaints()
    assert complaint.startswith("megacore: rank 1 failed: ValueError: boom (at ")
    assert complaint.endswith("in misbehave); the other 2 ranks were stopped")
    assert ended.err.splitlines()[1] == f"  full traceback: {tmp_path}/rank_01.err"
    saved = (tmp_path / "rank_01.err").read_text()
    assert 'raise ValueError("boom")' in saved
    survivor = (tmp_path / "rank_00.err").read_text()
    assert f"rank 1 (pid {pids_in(tmp_path)[1]} on host " in survivor
    assert "went away: it failed with ValueError: boom" in survivor
    assert_gone(pids_in(tmp_path))


def test_mistake_of_the_user_is_one_sentence_with_exit_code_2(tmp_path: Path) -> None:
    ended = run("mistake", tmp_path)
    assert (ended.code, ended.err) == (2, "megacore: there is no data file x.txt\n")
    assert_gone(pids_in(tmp_path))


def test_mistake_of_all_ranks_is_told_once(tmp_path: Path) -> None:
    ended = run("mistake-of-all", tmp_path)
    assert (ended.code, ended.err) == (2, "megacore: no rank likes this\n")


def test_killed_rank_is_named_with_pid_and_signal(tmp_path: Path) -> None:
    ended = run("killed", tmp_path)
    assert ended.code == 1
    [complaint] = ended.complaints()
    assert f"rank 1 (pid {pids_in(tmp_path)[1]} on host " in complaint
    assert "went away: killed by signal 9 (SIGKILL" in complaint
    assert complaint.endswith("the other 2 ranks were stopped")
    for survivor in (0, 2):
        assert "killed by signal 9" in (tmp_path / f"rank_{survivor:02d}.err").read_text()
    assert_gone(pids_in(tmp_path))


def test_rank_that_leaves_without_a_word_is_named(tmp_path: Path) -> None:
    ended = run("leaves", tmp_path)
    assert ended.code == 1
    [complaint] = ended.complaints()
    assert f"rank 1 (pid {pids_in(tmp_path)[1]} on host " in complaint
    assert "went away: ended with exit code 3 and no message" in complaint


def test_silent_rank_ends_survivors_that_block_in_a_collective(tmp_path: Path) -> None:
    ended = run("silent", tmp_path)
    assert ended.code == 1
    [complaint] = ended.complaints()
    assert f"rank 1 (pid {pids_in(tmp_path)[1]} on host " in complaint
    assert "went away: silent for" in complaint
    assert "its process is stopped" in complaint
    assert_gone(pids_in(tmp_path))


def test_suspending_all_ranks_is_no_loss(tmp_path: Path) -> None:
    job = start("slow", tmp_path, ranks=2)
    wait_for_ranks(tmp_path, 2)
    os.killpg(job.pid, signal.SIGSTOP)
    time.sleep(2 * PEER_TIMEOUT_S)
    os.killpg(job.pid, signal.SIGCONT)
    ended = job.finish()
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["ctrl-c", "sigterm"]
)
def test_signal_to_the_parent_ends_all_ranks(
    tmp_path: Path, number: signal.Signals, code: int
) -> None:
    job = start("endless", tmp_path)
    pids = wait_for_ranks(tmp_path, 3)
    os.kill(job.pid, number)
    ended = job.finish(timeout_s=8)
    assert (ended.code, ended.err) == (code, "megacore: interrupted; all ranks were stopped\n")
    assert_gone(pids)


def test_terminal_interrupt_reaches_all_processes_but_is_told_once(tmp_path: Path) -> None:
    job = start("endless", tmp_path)
    pids = wait_for_ranks(tmp_path, 3)
    os.killpg(job.pid, signal.SIGINT)
    ended = job.finish(timeout_s=8)
    assert (ended.code, ended.err) == (130, "megacore: interrupted; all ranks were stopped\n")
    assert_gone(pids)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_is_told_with_its_rank(tmp_path: Path, number: signal.Signals) -> None:
    job = start("endless", tmp_path)
    pids = wait_for_ranks(tmp_path, 3)
    os.kill(pids[1], number)
    ended = job.finish(timeout_s=8)
    assert ended.code == 128 + number
    [complaint] = ended.complaints()
    assert complaint.startswith(f"megacore: rank 1 (pid {pids[1]} on host ")
    assert complaint.endswith(f"was stopped by {number.name}; the other 2 ranks were stopped")
    assert_gone(pids)


def test_the_store_of_a_run_has_no_port_and_no_file(tmp_path: Path) -> None:
    job = start("endless", tmp_path, ranks=2)
    pids = wait_for_ranks(tmp_path, 2)
    listening = {pid: _num_listening(pid) for pid in (job.pid, *pids)}
    os.kill(job.pid, signal.SIGTERM)
    job.finish(timeout_s=8)
    # Each rank's one is of gloo, for the connections of its own process group.
    assert listening == {job.pid: 0, pids[0]: 1, pids[1]: 1}


def _num_listening(pid: int) -> int:
    """Number of TCP sockets on which a process listens."""
    inodes = {
        fields[9]
        for name in ("tcp", "tcp6")
        for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
        if (fields := line.split())[3] == "0A"
    }
    links = [str(link.readlink()) for link in Path(f"/proc/{pid}/fd").iterdir()]
    return len({link for link in links if link.removeprefix("socket:").strip("[]") in inodes})


def test_ranks_die_with_their_parent(tmp_path: Path) -> None:
    job = start("endless", tmp_path, ranks=2)
    pids = wait_for_ranks(tmp_path, 2)
    os.kill(job.pid, signal.SIGKILL)
    assert job.finish().code == -signal.SIGKILL
    assert_gone(pids)


@pytest.mark.campaign
def test_spawned_ranks_agree_and_are_told_apart_like_forked_ones(tmp_path: Path) -> None:
    spawn = partial(launch, num_ranks=2, folder=tmp_path, start_method="spawn")
    good = start_function(partial(spawn, "ok"), tmp_path)
    ended = good.finish()
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "sum 3\n" * 2
    [complaint] = start_function(partial(spawn, "killed"), tmp_path).finish().complaints()
    assert f"rank 1 (pid {pids_in(tmp_path)[1]} on host " in complaint
    assert complaint.endswith("the other rank was stopped")


# ---- torchrun ------------------------------------------------------------------------------------


def test_torchrun_ranks_agree_and_leave(tmp_path: Path) -> None:
    ended = run_torchrun(tmp_path, str(WORKER), "ok", "0", str(tmp_path), ranks=2)
    assert ended.code == 0, ended.err
    assert ended.out.count("sum 3") == 2


def test_killed_rank_is_named_by_every_survivor_under_torchrun(tmp_path: Path) -> None:
    ended = run_torchrun(tmp_path, str(WORKER), "killed", "0", str(tmp_path), ranks=3)
    assert ended.code != 0
    first, second = sorted(ended.complaints())
    culprit = f"rank 1 (pid {pids_in(tmp_path)[1]} on host "
    for line, survivor in ((first, 0), (second, 2)):
        assert line.startswith(f"megacore: [rank {survivor}] {culprit}")
        assert line.endswith("went away: its process has ended")
    assert_gone(pids_in(tmp_path))


def test_mistake_of_all_ranks_is_told_once_under_torchrun(tmp_path: Path) -> None:
    ended = run_torchrun(tmp_path, str(WORKER), "mistake-of-all", "0", str(tmp_path), ranks=2)
    assert ended.code != 0
    assert ended.complaints() == ["megacore: no rank likes this"]


def test_a_bad_run_folder_is_told_once_under_torchrun(tmp_path: Path) -> None:
    (tmp_path / "demo.toml").write_text("[train]\nsteps = 1\n")
    command = ("-m", "megacore", "train", str(tmp_path / "demo.toml"), "--run.dir=/proc/none")
    ended = run_torchrun(tmp_path, *command, ranks=2)
    assert ended.code != 0
    [complaint] = ended.complaints()
    assert complaint.startswith("megacore: cannot write to run.dir /proc/none: ")
    assert "exitcode  : 2" in ended.err


def test_wrong_process_count_under_torchrun_ends_all_ranks_with_the_fix(tmp_path: Path) -> None:
    config = tmp_path / "demo.toml"
    config.write_text("[parallel]\ntp = 2\n")
    ended = run_torchrun(tmp_path, "-m", "megacore", "train", str(config), ranks=3)
    assert ended.code != 0
    [complaint] = ended.complaints()
    assert "does not fit 3 processes (torchrun, WORLD_SIZE): tp 2" in complaint
    assert "nearest: start 2 or 4 processes" in complaint
    assert "exitcode  : 2" in ended.err


# ---- ranks started by hand -----------------------------------------------------------------------


def start_by_hand(folder: Path, *, rank: int, world_size: int, port: int) -> Job:
    settings = {"RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    return start_command(
        [sys.executable, str(WORKER), "ok", "0", str(folder)],
        folder,
        env={name: str(value) for name, value in settings.items()},
    )


def test_ranks_that_disagree_on_the_world_are_told_before_any_collective(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    first = start_by_hand(tmp_path, rank=0, world_size=2, port=port)
    store = StoreAddress(host="127.0.0.1", port=port).connect(timeout_s=20)
    PrefixStore("megacore/0/shared", store).wait(["agree/the number of processes"])
    ended = start_by_hand(tmp_path, rank=1, world_size=3, port=port).finish()
    os.kill(first.pid, signal.SIGKILL)
    first.finish()
    assert ended.code == 2
    assert ended.complaints() == [
        "megacore: ranks disagree on the number of processes: rank 1 has 3, rank 0 has 2; "
        "start every rank with the same command"
    ]


def test_rank_outside_the_world_is_refused(tmp_path: Path) -> None:
    ended = start_by_hand(tmp_path, rank=2, world_size=2, port=29555).finish()
    assert ended.code == 2
    assert ended.complaints() == [
        "megacore: RANK=2 is not in [0, WORLD_SIZE=2); start 2 processes with RANK from 0 to 1"
    ]
