"""Dumps of torch's flight recorder: causes are found, and nothing in a file is executed.

The entries are in torch's documented format, with the states that NCCL's watchdog writes.
"""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.calls.records import remove_rings
from megacore.calls.ring import CallRing
from megatrain.cli import main
from megatrain.hang.diagnosis import Diagnosis, diagnosis_of_run
from megatrain.hang.flight import save_dump

RANKS = 4
OWN = "/home/me/loop.py"
TORCH = Path(torch.__file__).parent
GROUPS = {
    "0": ("default_pg", [0, 1, 2, 3]),
    "1": ("tp", [0, 1]),
    "2": ("tp", [2, 3]),
}


class Rank:
    """The record of one rank, as NCCL's recorder writes it."""

    def __init__(self, *, with_ranks: bool = True) -> None:
        self.entries: list[dict[str, Any]] = []
        self.numbers = dict.fromkeys(GROUPS, 0)
        self.with_ranks = with_ranks

    def call(
        self,
        group: str,
        kind: str = "all_reduce",
        size: int = 8,
        state: str = "completed",
        line: int = 10,
    ) -> None:
        self.numbers[group] += 1
        wrapper = {"name": "wrapper", "filename": f"{TORCH}/distributed/c10d_logger.py", "line": 1}
        self.entries.append(
            {
                "record_id": len(self.entries),
                "pg_id": int(group),
                "process_group": (group, GROUPS[group][0]),
                "collective_seq_id": self.numbers[group],
                "p2p_seq_id": 0,
                "op_id": self.numbers[group],
                "profiling_name": f"nccl:{kind}",
                "time_created_ns": 1_700_000_000_000_000_000 + len(self.entries),
                "input_sizes": [[size]],
                "input_dtypes": ["BFloat16"],
                "output_sizes": [[size]],
                "output_dtypes": ["BFloat16"],
                "state": state,
                "time_discovered_started_ns": None,
                "time_discovered_completed_ns": None,
                "retired": state == "completed",
                "timeout_ms": 600_000,
                "is_p2p": False,
                "frames": [
                    wrapper,
                    {"name": "train", "filename": "/home/me/loop.py", "line": line},
                ],
            }
        )

    def write(self, path: Path) -> None:
        config = {
            name: {"name": name, "desc": text, "ranks": str(ranks)}
            for name, (text, ranks) in GROUPS.items()
        }
        empty = {"": {"name": "", "desc": "", "ranks": "[]"}}
        dump = {
            "version": "2.10",
            "entries": self.entries,
            "pg_config": config if self.with_ranks else empty,
            "pg_status": {},
        }
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(pickle.dumps(dump, protocol=2))


def ranks_after_steps(*, with_ranks: bool = True) -> list[Rank]:
    ranks = [Rank(with_ranks=with_ranks) for _ in range(RANKS)]
    for _ in range(3):
        for number, rank in enumerate(ranks):
            rank.call("1" if number < 2 else "2", "all_gather", line=20)
            rank.call("0", line=30)
    return ranks


def found_in(folder: Path, ranks: list[Rank]) -> Diagnosis:
    for number, rank in enumerate(ranks):
        rank.write(folder / "calls" / f"flight_{number}")
    found = diagnosis_of_run(folder)
    assert found is not None
    return found


@pytest.mark.parametrize("with_ranks", [True, False])
def test_a_rank_that_did_not_come_is_named(tmp_path: Path, with_ranks: bool) -> None:
    ranks = ranks_after_steps(with_ranks=with_ranks)
    for number in (0, 1, 3):
        ranks[number].call("0", state="started", line=30)
    found = found_in(tmp_path, ranks)
    assert [(each.cause, each.ranks) for each in found.findings] == [("slow", (2,))]
    assert [(wait.rank, wait.missing) for wait in found.waits] == [(0, (2,)), (1, (2,)), (3, (2,))]
    assert "all_reduce [8] bfloat16 over default_pg, number 4 (me/loop.py:30 in train)" in str(
        found
    )


@pytest.mark.parametrize("state", ["started", "scheduled"])
def test_another_shape_is_named_although_all_ranks_came(tmp_path: Path, state: str) -> None:
    ranks = ranks_after_steps()
    for number, rank in enumerate(ranks):
        rank.call("0", size=9 if number == 1 else 8, state=state, line=30)
        rank.call("0", state="scheduled", line=31)
    found = found_in(tmp_path, ranks)
    assert [(each.cause, each.ranks) for each in found.findings] == [("shape", (1,))]


def test_a_call_that_was_left_out_is_named(tmp_path: Path) -> None:
    ranks = ranks_after_steps()
    for number in (0, 1, 2):
        ranks[number].call("1" if number < 2 else "2", "all_gather", line=20)
    for rank in ranks:
        rank.call("0", state="scheduled", line=30)
    ranks[2].entries[-2] |= {"state": "started", "retired": False}
    ranks[2].entries.pop()
    found = found_in(tmp_path, ranks)
    assert [(each.cause, each.ranks) for each in found.findings] == [("order", (3,))]


def test_parts_of_a_coalesced_call_count_once_and_messages_not_at_all(tmp_path: Path) -> None:
    ranks = ranks_after_steps()
    for rank in ranks:
        rank.call("0", "all_gather", state="scheduled")
        rank.call("0", "coalesced")
        rank.entries[-1]["collective_seq_id"] -= 1
        rank.call("0", "send 0->1", state="scheduled")
        rank.entries[-1]["is_p2p"] = True
    found = found_in(tmp_path, ranks)
    assert (found.findings, found.waits) == ((), ())


def test_the_dump_of_one_rank_does_not_hide_complete_rings(tmp_path: Path) -> None:
    rings = [CallRing.create(tmp_path, rank=rank, world_size=RANKS, run="a") for rank in range(4)]
    for ring in rings:
        assert ring is not None
        ring.group("world", range(RANKS)).begin("all_reduce", (8,), "float32")
    rank = Rank()
    rank.call("0", state="started")
    rank.write(tmp_path / "calls" / "flight_0")
    found = diagnosis_of_run(tmp_path)
    remove_rings(tmp_path)
    assert found is not None
    assert found.findings == ()
    assert (found.num_read, len(found.waits)) == (RANKS, RANKS)


def test_a_record_is_written_to_the_place_of_the_user(tmp_path: Path) -> None:
    environ = {"TORCH_FR_BUFFER_SIZE": "10", "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/mine_"}
    save_dump(tmp_path / "run", 3, "gloo", environ)
    assert [path.name for path in tmp_path.iterdir()] == ["mine_3"]


def test_an_overwritten_buffer_proves_nothing(tmp_path: Path) -> None:
    ranks = ranks_after_steps()
    ranks[0].call("1", "all_gather", state="started", line=20)
    ranks[1].entries = [entry for entry in ranks[1].entries[1:] if entry["pg_id"] == 0]
    assert found_in(tmp_path, ranks).findings == ()


class Attack:
    """Runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.mkdir, (str(self.mark),)


def test_a_prepared_or_damaged_file_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ranks = ranks_after_steps()
    ranks[1].entries.append(Attack(tmp_path / "executed"))  # type: ignore[arg-type]
    ranks[2].entries[0]["collective_seq_id"] = None
    for rank in (0, 3):
        ranks[rank].call("0", state="started")
    ranks[0].entries[0]["frames"][0]["name"] = "\x1b[2Jtrain"
    for number, rank in enumerate(ranks):
        rank.write(tmp_path / "elsewhere" / f"trace_{number}")
    (tmp_path / "elsewhere" / "trace_4").write_bytes(b"\x80\x05\x96" + b"\xff" * 8)
    (tmp_path / "elsewhere" / "trace_5").write_bytes(b"")
    prefix = tmp_path / "elsewhere" / "trace_"
    assert main(["why-hung", str(tmp_path), f"--flight-recorder={prefix}"]) == 0
    output = capsys.readouterr().out
    assert "the cause is with ranks 1, 2, whose calls cannot be read here" in output
    assert "\x1b" not in output
    assert not (tmp_path / "executed").exists()
