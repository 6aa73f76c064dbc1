"""One run per folder: nothing of a former run is lost or mixed, and no two run at a time."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import ConfigError
from megacore.parallel.process_groups import ProcessGroups
from megatrain.checkpoint.changes import compare_settings
from megatrain.checkpoint.run_folder import hold_folders, move_aside
from megatrain.config.resolved import ResolvedCheckpointConfig
from tests.support.checkpoints import ThreadWorld

GROUPS = ProcessGroups.single()
RESULTS = (
    "metrics.jsonl",
    "config.toml",
    "run.json",
    "timeline.json",
    "trace.json",
    "report.html",
    "rank_01.err",
)


def _folders(
    run: Path, checkpoints: Path | None = None, *, interval: int = 0
) -> tuple[Path, ResolvedCheckpointConfig]:
    folder = str(checkpoints or run / "checkpoints")
    return run, ResolvedCheckpointConfig(dir=folder, interval=interval)


def _leave_results(run: Path, text: str = "former") -> None:
    run.mkdir(parents=True, exist_ok=True)
    for name in RESULTS:
        (run / name).write_text(text)


def _leave_checkpoint(checkpoints: Path, step: str = "step_00000007") -> Path:
    (checkpoints / step).mkdir(parents=True)
    (checkpoints / step / "index.json").write_text("{}")
    (checkpoints / "latest").write_text(step + "\n")
    return checkpoints / step


def _tree(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


# ---- what a former run left ----------------------------------------------------------------------


def test_a_new_folder_needs_no_place(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    assert move_aside(*_folders(tmp_path), None, GROUPS) == ()
    assert _tree(tmp_path) == {"notes.txt"}


def test_a_fresh_run_moves_all_of_the_former_one_and_only_that(tmp_path: Path) -> None:
    _leave_results(tmp_path)
    _leave_checkpoint(tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / "step_00000008.partial").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    further = ("tensorboard/events", "wandb/id", "profile/rank_0.json.gz")
    for name in further:
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_text("x")
    [note] = move_aside(*_folders(tmp_path), None, GROUPS)
    place = tmp_path / "previous-1"
    assert note == (
        f"results of an earlier run were moved to {place}; to continue it, start with "
        f"--checkpoint.resume={place / 'checkpoints'}"
    )
    moved = {*RESULTS, *further, "checkpoints/latest", "checkpoints/step_00000007/index.json"}
    assert _tree(tmp_path / "previous-1") == moved
    assert _tree(tmp_path) == {"notes.txt"} | {f"previous-1/{name}" for name in moved}
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_each_former_run_has_a_folder_of_its_own(tmp_path: Path) -> None:
    for text in ("first", "second"):
        _leave_results(tmp_path, text)
        move_aside(*_folders(tmp_path), None, GROUPS)
    assert (tmp_path / "previous-1" / "metrics.jsonl").read_text() == "first"
    assert (tmp_path / "previous-2" / "metrics.jsonl").read_text() == "second"


def test_an_empty_metrics_file_is_no_result(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text("")
    (tmp_path / "config.toml").write_text("")
    assert move_aside(*_folders(tmp_path), None, GROUPS) == ()


def test_checkpoints_elsewhere_stay_on_their_disk(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "big"
    _leave_results(run)
    _leave_checkpoint(elsewhere)
    [note] = move_aside(*_folders(run, elsewhere), None, GROUPS)
    assert f"{elsewhere / 'previous-1'} and {run / 'previous-1'};" in note
    assert _tree(elsewhere) == {"previous-1/latest", "previous-1/step_00000007/index.json"}


def test_a_link_to_another_disk_stays_a_link(tmp_path: Path) -> None:
    run, elsewhere = tmp_path / "run", tmp_path / "big"
    run.mkdir()
    _leave_checkpoint(elsewhere)
    (run / "checkpoints").symlink_to(elsewhere)
    move_aside(*_folders(run), None, GROUPS)
    assert (run / "checkpoints").is_symlink()
    assert _tree(elsewhere) == {"previous-1/latest", "previous-1/step_00000007/index.json"}


def test_checkpoints_elsewhere_are_left_alone_by_a_run_that_saves_none(tmp_path: Path) -> None:
    found = _leave_checkpoint(tmp_path / "big")
    assert (
        move_aside(*_folders(tmp_path / "run", tmp_path / "big", interval=-1), None, GROUPS) == ()
    )
    assert found.exists()


def test_a_folder_for_results_and_checkpoints_alike(tmp_path: Path) -> None:
    _leave_results(tmp_path)
    _leave_checkpoint(tmp_path)
    move_aside(*_folders(tmp_path, tmp_path), None, GROUPS)
    assert {path.name for path in tmp_path.iterdir()} == {"previous-1"}
    assert "step_00000007/index.json" in _tree(tmp_path / "previous-1")


def test_continuing_moves_nothing_also_with_another_checkpoint_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _leave_results(run)
    found = _leave_checkpoint(run / "checkpoints")
    for folders in (_folders(run), _folders(run, tmp_path / "another-disk")):
        assert move_aside(*folders, found, GROUPS) == ()
    assert (run / "metrics.jsonl").exists()
    outside = _leave_checkpoint(tmp_path / "big")
    assert move_aside(*_folders(run, tmp_path / "big"), outside, GROUPS) == ()


def test_starting_from_another_run_moves_what_is_here_but_not_its_source(tmp_path: Path) -> None:
    run = tmp_path / "run"
    _leave_results(run)
    source = _leave_checkpoint(tmp_path / "other" / "checkpoints")
    assert move_aside(*_folders(run), source, GROUPS) != ()
    assert source.exists()
    # One of the runs that were here before is another run, too.
    _leave_results(run)
    source = _leave_checkpoint(run / "previous-1" / "checkpoints")
    [note] = move_aside(*_folders(run), source, GROUPS)
    assert note.endswith(str(run / "previous-2"))
    assert source.exists()


# ---- the lock ------------------------------------------------------------------------------------


def test_a_second_run_in_the_folder_is_refused_until_the_first_ends(tmp_path: Path) -> None:
    message = (
        rf"another run \(pid {os.getpid()} on host .+\) is writing to run\.dir {tmp_path}; wait"
    )
    with (
        hold_folders(*_folders(tmp_path), GROUPS),
        pytest.raises(ConfigError, match=message),
        hold_folders(*_folders(tmp_path), GROUPS),
    ):
        pytest.fail("both runs are in")
    with hold_folders(*_folders(tmp_path), GROUPS):
        pass


def test_every_rank_is_told_of_the_other_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def message(groups: ProcessGroups) -> str:
        with pytest.raises(ConfigError) as caught, hold_folders(*_folders(tmp_path), groups):
            pytest.fail("both runs are in")
        return str(caught.value)

    with hold_folders(*_folders(tmp_path), GROUPS):
        [told] = set(ThreadWorld(monkeypatch, tp=1, dp=3).run(message))
    assert told.startswith("another run (pid ")


def test_two_runs_with_one_checkpoint_folder_are_refused(tmp_path: Path) -> None:
    with (
        hold_folders(*_folders(tmp_path / "a", tmp_path / "big"), GROUPS),
        pytest.raises(ConfigError, match=r"is writing to checkpoint\.dir .*/big; wait"),
        hold_folders(*_folders(tmp_path / "b", tmp_path / "big"), GROUPS),
    ):
        pytest.fail("both runs are in")
    # What the refused run held already is free again.
    with hold_folders(*_folders(tmp_path / "b"), GROUPS):
        pass


def test_a_killed_run_leaves_no_lock(tmp_path: Path) -> None:
    ready, told = os.pipe()
    child = os.fork()
    if child == 0:
        with hold_folders(*_folders(tmp_path), GROUPS):
            os.write(told, b"x")
            signal.pause()
        os._exit(1)
    os.read(ready, 1)
    with (
        pytest.raises(ConfigError, match=f"pid {child} on"),
        hold_folders(*_folders(tmp_path), GROUPS),
    ):
        pytest.fail("both runs are in")
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    with hold_folders(*_folders(tmp_path), GROUPS):
        pass


# ---- settings that changed -----------------------------------------------------------------------


def test_changed_settings_are_named_where_they_matter() -> None:
    theirs = {
        "model": {"rope_base": 10.0, "init_std": 0.1, "gone": 1},
        "data": {"source": "a.txt"},
        "train": {"seed": 1, "steps": 5, "global_batch_size": 8},
        "run": {"dir": "runs/x"},
    }
    ours = {
        "model": {"rope_base": 20.0, "init_std": 0.2},
        "data": {"source": "b.txt"},
        "train": {"seed": 2, "steps": 9, "global_batch_size": 16},
        "run": {"dir": "runs/y"},
    }
    names = [note.split(" ")[0] for note in compare_settings(theirs, ours)]
    assert names == ["model.rope_base", "data.source", "train.global_batch_size", "train.seed"]
    assert compare_settings(ours, ours) == ()


RATE: dict[str, Any] = {
    "min_lr": 3e-4,
    "schedule": "cosine",
    "schedule_unit": "steps",
    "warmup": 0,
    "warmup_from": 0.0,
    "decay_end": None,
    "tail_length": None,
    "tail_shape": "linear",
}


@pytest.mark.parametrize(
    ("theirs", "ours", "expected"),
    [
        ({}, {}, []),
        (
            {},
            {"steps": 44},
            ["learning rate 3.05e-4 -> 5.14e-4 at step 37: train.steps 36 -> 44"],
        ),
        # The curve is set, so another length of the run changes nothing.
        ({"decay_end": 50}, {"decay_end": 50, "steps": 44}, []),
        (
            {"schedule": "constant"},
            {"schedule": "wsd", "tail_length": 9, "steps": 90},
            [
                "learning rate as before at step 37, but not later: train.steps 36 -> 90, "
                "optimizer.schedule constant -> wsd, optimizer.tail_length not set -> 9"
            ],
        ),
        ({}, {"beta1": 0.8}, ["optimizer.beta1 0.9 -> 0.8 since the checkpoint"]),
        ({}, {"overlap": "all"}, []),
        ({}, {"weight_decay": 0.0}, ["optimizer.weight_decay 0.1 -> 0 since the checkpoint"]),
    ],
)
def test_changes_of_the_optimizer_are_noted_with_the_jump_they_cause(
    theirs: dict[str, Any], ours: dict[str, Any], expected: list[str]
) -> None:
    def sections(changes: dict[str, Any]) -> dict[str, Any]:
        others = {"lr": 3e-3, "beta1": 0.9, "weight_decay": 0.1, "overlap": "none"}
        values = {"steps": 36, **RATE, **others, **changes}
        return {"train": {"steps": values.pop("steps")}, "optimizer": values}

    assert list(compare_settings(sections(theirs), sections(ours), step=36)) == expected


def test_a_table_is_noted_by_its_settings_and_a_long_value_by_its_name() -> None:
    theirs = {"moe": {"echo": {"num_spare_slots": 2, "tolerance": 0.01}}, "data": {"source": "a"}}
    ours = {
        "moe": {"echo": {"num_spare_slots": 0, "tolerance": 0.01}},
        "data": {"source": "b" * 90},
    }
    assert compare_settings(theirs, ours) == (
        "moe.echo.num_spare_slots 2 -> 0 since the checkpoint",
        "data.source has changed since the checkpoint",
    )
