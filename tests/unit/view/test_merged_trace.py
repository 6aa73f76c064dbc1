"""Profiles of several ranks in one trace, on the clock of the first."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import MegacoreError
from megatrain.cli import main
from megatrain.view.merged_trace import CLOCK_KEY, merge_profiles

BASE_NS = 1_790_857_026_000_000_000


def profile(
    path: Path, *, rank: int, ts: float, offset_us: float = 0.0, base: int = BASE_NS
) -> Path:
    """A profile in which every rank has the same process numbers and arrows."""
    at: dict[str, Any] = {"pid": 4242, "tid": 7}
    events = [
        {"ph": "M", "name": "process_name", "ts": ts, **at, "args": {"name": "python"}},
        {"ph": "M", "name": "process_labels", "ts": ts, **at, "args": {"labels": "CPU"}},
        {"ph": "M", "name": "thread_name", "ts": ts, **at, "args": {"name": "main"}},
        {"ph": "X", "name": "pipeline 0F0", "ts": ts, "dur": 5.0, **at},
        {"ph": "X", "name": "kernel", "ts": ts + 2, "dur": 1.0, "pid": 0, "tid": 20},
        {"ph": "s", "id": 1, "name": "fwdbwd", "cat": "fwdbwd", "ts": ts, **at},
        {"ph": "f", "id": 1, "name": "fwdbwd", "cat": "fwdbwd", "ts": ts + 1, **at},
        {"ph": "X", "name": "PyTorch Profiler (0)", "pid": "Spans", "tid": "", "ts": ts, "dur": 9},
    ]
    clock = {"rank": rank, "host": "h", "offset_us": offset_us}
    document = {"baseTimeNanoseconds": base, CLOCK_KEY: clock, "traceEvents": events}
    with gzip.open(path, "wt") as file:
        json.dump(document, file)
    return path


def merged(tmp_path: Path, paths: list[Path]) -> list[dict[str, Any]]:
    out = tmp_path / "all.json"
    ranks, events = merge_profiles(paths, out)
    found: list[dict[str, Any]] = json.loads(out.read_text())["traceEvents"]
    assert (ranks, events) == (len(paths), len(found))
    return found


def test_ranks_share_no_process_and_no_arrow(tmp_path: Path) -> None:
    paths = [profile(tmp_path / f"rank_{r}.json.gz", rank=r, ts=100.0) for r in range(3)]
    events = merged(tmp_path, paths)
    names = {
        event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"
    }
    assert sorted(names.values()) == sorted(f"rank {r}, CPU" for r in (0, 0, 1, 1, 2, 2))
    passes = [event for event in events if event["name"] == "pipeline 0F0"]
    assert [names[event["pid"]] for event in passes] == [f"rank {r}, CPU" for r in range(3)]
    arrows = [(event["ph"], event["id"], event["pid"]) for event in events if "id" in event]
    assert len(set(arrows)) == 6
    assert len({number for _, number, _ in arrows}) == 3
    assert not any(isinstance(event["pid"], str) for event in events)


@given(
    moment=st.integers(0, 10**9),
    offset=st.integers(-(10**7), 10**7),
    base_s=st.integers(-1000, 1000),
)
def test_one_moment_is_one_time(
    moment: int, offset: int, base_s: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The second rank's clock is ahead by the offset, and its times count from another base."""
    folder = tmp_path_factory.mktemp("trace")
    first = profile(folder / "rank_0.json.gz", rank=0, ts=moment)
    base = BASE_NS + base_s * 10**9
    ts = moment + offset - base_s * 10**6
    second = profile(folder / "rank_1.json.gz", rank=1, ts=ts, offset_us=offset, base=base)
    times = [
        event["ts"] for event in merged(folder, [first, second]) if event["name"] == "pipeline 0F0"
    ]
    assert times[0] == pytest.approx(times[1], abs=1e-3)


def test_bad_input_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["trace", "merge", str(tmp_path)]) == 2
    assert "debug.profile_steps" in capsys.readouterr().err
    folder = tmp_path / "profile"
    folder.mkdir()
    whole = profile(folder / "rank_0.json.gz", rank=0, ts=1.0).read_bytes()
    contents = [
        whole[:50],
        b"",
        b"text",
        gzip.compress(b"[]"),
        gzip.compress(b'{"traceEvents": []}'),
    ]
    for content in contents:
        (folder / "rank_1.json.gz").write_bytes(content)
        assert main(["trace", "merge", str(tmp_path)]) == 2
        error = capsys.readouterr().err
        assert error.count("\n") == 1
        assert "rank_1.json.gz must be the profile of a rank" in error
    with pytest.raises(MegacoreError):
        merge_profiles([folder / "rank_9.json.gz"], tmp_path / "out.json")
    assert not (folder / "all_ranks.json.gz").exists()


def test_missing_ranks_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "profile").mkdir()
    for rank in (0, 2):
        profile(tmp_path / "profile" / f"rank_{rank}.json.gz", rank=rank, ts=1.0)
    assert main(["trace", "merge", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "2 ranks" in out
    assert "without ranks 1" in out
