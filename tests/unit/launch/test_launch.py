from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from megacore.errors import ConfigError
from megatrain.launch.children import Rank, first_failure
from megatrain.launch.context import RankContext
from megatrain.launch.failure import Failure
from megatrain.launch.start import LaunchOptions, run_ranks_local
from megatrain.launch.store import LocalStoreAddress
from megatrain.launch.worker import Outcome, Reporter, _explain_stop, error_file


def ended(rank: int, kind: str | None, time_s: float) -> Rank:
    """A rank that ended; ``kind`` ``None`` is a death without a word."""
    blank: Any = None
    outcome = None
    if kind is not None:
        outcome = Outcome(rank=rank, kind=kind, exit_code=1, time_s=time_s)  # type: ignore[arg-type]
    return Rank(number=rank, process=blank, pipe=blank, outcome=outcome, ended_s=time_s + 1.0)


@pytest.mark.parametrize(
    ("story", "blamed"),
    [
        ([("victim", 1.0), (None, 2.0)], 1),
        ([("victim", 1.0), ("error", 2.0)], 1),
        ([("victim", 2.0), ("victim", 1.0)], 1),
        ([("error", 2.0), ("mistake", 1.0), ("stopped", 0.0)], 1),
        ([(None, 3.0), ("error", 1.0)], 1),
        ([("error", 5.0), (None, 1.0)], 1),
    ],
)
def test_blame_goes_to_the_first_rank_with_a_reason_of_its_own(
    story: list[tuple[str | None, float]], blamed: int
) -> None:
    ranks = [ended(rank, kind, time_s) for rank, (kind, time_s) in enumerate(story)]
    assert first_failure(ranks).number == blamed


def test_outcome_is_delivered_once_and_leaves_a_file(tmp_path: Path) -> None:
    delivered: list[Outcome] = []
    report = Reporter(4, delivered.append, tmp_path / "new")
    first = Outcome(rank=4, kind="error", exit_code=1, sentence="oh", traceback="Traceback: x")
    assert report(first) == 1
    assert report(Outcome(rank=4, kind="victim", exit_code=1, sentence="late")) == 1
    assert [outcome.sentence for outcome in delivered] == ["oh"]
    assert delivered[0].time_s > 0
    assert error_file(tmp_path / "new", 4).read_text() == "oh\n\nTraceback: x\n"


def test_mistakes_of_the_user_leave_no_file(tmp_path: Path) -> None:
    report = Reporter(0, lambda _: None, tmp_path)
    report(Outcome(rank=0, kind="mistake", exit_code=2, sentence="no", traceback="Traceback"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has GPUs")
def test_nccl_without_gpus_is_refused_before_anything_starts() -> None:
    with pytest.raises(ConfigError, match="need 2 GPUs, but this machine has 0"):
        run_ranks_local(2, lambda _: 0, options=LaunchOptions(backend="nccl"))


@pytest.mark.parametrize(
    ("below", "reason"),
    [("", "it is a file, not a folder"), ("run", "Not a directory")],
)
def test_a_folder_that_cannot_be_written_is_refused_before_anything_starts(
    tmp_path: Path, below: str, reason: str
) -> None:
    taken = tmp_path / "taken"
    taken.write_text("a file")
    folder = taken / below
    with pytest.raises(ConfigError, match=f"cannot write to run.dir {folder}: {reason}; choose"):
        run_ranks_local(2, lambda _: 0, options=LaunchOptions(error_dir=folder))
    assert taken.read_text() == "a file"


@pytest.mark.parametrize(
    ("culprit_rank", "is_mistake", "prints"),
    [(0, True, False), (0, False, True), (3, True, True)],
    ids=["mistake here", "loss here", "mistake on another machine"],
)
def test_a_stopped_rank_prints_the_reason_unless_a_rank_of_its_machine_did(
    culprit_rank: int, is_mistake: bool, prints: bool
) -> None:
    """torchrun stops the other ranks as soon as one has ended with a mistake."""
    context = RankContext(
        rank=1,
        world_size=4,
        local_rank=1,
        local_world_size=2,
        device=torch.device("cpu"),
        backend="gloo",
        address=LocalStoreAddress(path="unused"),
        store=HashStore(),
        launched_by="torchrun",
    )

    class Monitor:
        def culprit(self, **_limits: Any) -> Failure:
            return Failure(
                rank=culprit_rank, who="rank x", reason="bad folder", is_mistake=is_mistake
            )

    monitor: Any = Monitor()
    outcome = _explain_stop(SystemExit(143), context, monitor)
    assert (outcome.kind, outcome.exit_code, outcome.first) == ("victim", 1, prints)
    assert Failure.from_json(json.dumps(asdict(monitor.culprit()))) == monitor.culprit()
