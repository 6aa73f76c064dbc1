from __future__ import annotations

import dataclasses
import os
import signal
import time

from megacore.calls.processes import Identity, describe_exit, is_dead, local_state, process_state


def child() -> int:
    """A process that waits to be killed."""
    pid = os.fork()
    if pid == 0:
        signal.pause()
        os._exit(0)
    return pid


def identity_of(pid: int) -> Identity:
    state = process_state(pid)
    assert state is not None
    return dataclasses.replace(Identity.mine(3), pid=pid, start=state.start)


def test_identity_survives_its_text_form_and_reads_well() -> None:
    mine = Identity.mine(2)
    assert Identity.from_json(mine.to_json()) == mine
    assert str(mine) == f"rank 2 (pid {os.getpid()} on host {mine.host})"


def test_a_killed_process_is_dead_before_and_after_it_is_reaped() -> None:
    pid = child()
    identity = identity_of(pid)
    assert not is_dead(identity)
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 5
    while not is_dead(identity):
        assert time.monotonic() < deadline
    assert process_state(pid).code == "Z"  # type: ignore[union-attr]
    os.waitpid(pid, 0)
    assert is_dead(identity)
    assert local_state(identity) is None


def test_a_stopped_process_is_alive_and_seen_as_stopped() -> None:
    pid = child()
    identity = identity_of(pid)
    try:
        os.kill(pid, signal.SIGSTOP)
        deadline = time.monotonic() + 5
        while (state := local_state(identity)) is not None and state.code != "T":
            assert time.monotonic() < deadline
        assert not is_dead(identity)
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def test_a_reused_process_id_is_another_process() -> None:
    mine = Identity.mine(0)
    assert not is_dead(mine)
    assert is_dead(dataclasses.replace(mine, start=mine.start - 1))


def test_nothing_is_said_about_processes_of_other_machines() -> None:
    elsewhere = dataclasses.replace(Identity.mine(0), pid=1 << 30, space="another")
    assert not is_dead(elsewhere)
    assert local_state(elsewhere) is None


def test_exit_codes_in_words() -> None:
    assert describe_exit(-11) == "killed by signal 11 (SIGSEGV)"
    assert "memory ran out" in describe_exit(-9)
    assert describe_exit(1) == "ended with exit code 1 and no message"
    assert describe_exit(-99) == "killed by signal 99"
