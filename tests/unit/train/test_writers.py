"""Writers of metrics: what is read back from their files, missing packages, full disks."""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import resource
import signal
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest

from megacore.errors import ConfigError, MegacoreError
from megatrain.cli import main
from megatrain.config import Config, RunConfig
from megatrain.train import loop as loop_module
from megatrain.train import metrics as metrics_module
from megatrain.train import writers as writers_module
from megatrain.train.meters import ExpertMetrics
from megatrain.train.metrics import METRICS, MetricsWriter, StepRecord
from megatrain.train.writers import RunFileGuard, RunWriters, check_writers
from tests.support.jobs import start_function
from tests.unit.train.test_metrics import _record


def run_of(folder: Path, *names: str) -> RunConfig:
    return RunConfig(dir=str(folder), writers=list(names))  # type: ignore[arg-type]


def write(
    run: RunConfig, records: list[StepRecord], *, first_step: int = 0, tolerant: bool = False
) -> list[str]:
    notes: list[str] = []
    guard = RunFileGuard(notes.append, tolerant=tolerant)
    settings = Config(run=run).model_dump(mode="json")
    writers = RunWriters(run, settings, first_step=first_step, guard=guard)
    for record in records:
        writers.write(record)
    writers.close(failed=False)
    return notes


def test_tensorboard_has_the_numbers_of_the_table(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run = run_of(tmp_path, "tensorboard")
    record = _record(0, mfu=0.4, validation_losses={"a": 1.0, "b": 2.0}, time_data_s=0.25)
    write(run, [record, _record(1), _record(2)])
    write(run, [_record(2, loss=9.0)], first_step=2)  # resumed: the third step again
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) >= set(record.scalars())
    assert "validation/validation_losses/b" in record.scalars()
    losses = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert losses == [(1, 3.0), (2, pytest.approx(2.9)), (3, 9.0)]
    assert [event.value for event in events.Scalars("speed/mfu")] == [pytest.approx(0.4)]


def test_weights_and_biases_works_offline(tmp_path: Path) -> None:
    pytest.importorskip("wandb")
    section = run_of(tmp_path, "wandb")

    def run() -> int:
        os.environ["WANDB_MODE"] = "offline"
        write(section, [_record(0, mfu=0.4), _record(1)])
        write(section, [_record(1)], first_step=1)
        return 0

    ended = start_function(run, tmp_path).finish()
    assert ended.code == 0, ended.err
    files = list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
    number = (tmp_path / "wandb" / "id").read_text()
    assert len(files) == 2
    assert all(number in file.name for file in files), "a resumed run has the same id"
    written = b"".join(file.read_bytes() for file in files)
    for name in _record(0, mfu=0.4).scalars():
        assert name.encode() in written


def test_weights_and_biases_without_a_key_is_one_sentence(tmp_path: Path) -> None:
    pytest.importorskip("wandb")

    def run() -> int:
        os.environ |= {"WANDB_MODE": "online", "HOME": str(tmp_path), "NETRC": "/dev/null"}
        os.environ.pop("WANDB_API_KEY", None)
        try:
            write(run_of(tmp_path, "wandb"), [])
        except MegacoreError as error:
            print(error)
            return 7
        return 0

    ended = start_function(run, tmp_path).finish()
    assert ended.code == 7, ended.err
    assert "Weights & Biases does not start" in ended.out
    assert "WANDB_MODE=offline" in ended.out


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_one_sentence(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(
        writers_module.importlib.util, "find_spec", lambda n: None if n == name else find(n)
    )
    with pytest.raises(ConfigError, match=rf'pip install "megacore\[{name}\]"'):
        check_writers([name])
    check_writers([])
    # A folder in the working directory, such as Weights & Biases makes, is no package.
    monkeypatch.setattr(
        writers_module.importlib.util, "find_spec", lambda n: ModuleSpec(n, None, is_package=True)
    )
    with pytest.raises(ConfigError):
        check_writers([name])


def test_a_full_disk_is_one_note_and_later_records_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = run_of(tmp_path)
    full = {3, 4, 5}
    original = MetricsWriter.write

    def write_unless_full(writer: MetricsWriter, record: StepRecord) -> None:
        if record.step in full:
            raise OSError(errno.ENOSPC, "No space left on device", str(writer.path))
        original(writer, record)

    monkeypatch.setattr(MetricsWriter, "write", write_unless_full)
    notes = write(run, [_record(step) for step in range(7)], tolerant=True)
    assert len(notes) == 1
    assert "metrics.jsonl cannot be written now" in notes[0]
    assert "No space left on device" in notes[0]
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 6, 7]


def test_a_full_disk_ends_the_run_by_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(writer: MetricsWriter, _: StepRecord) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(writer.path))

    monkeypatch.setattr(MetricsWriter, "write", fail)
    guard = RunFileGuard(pytest.fail, tolerant=False)
    writers = RunWriters(run_of(tmp_path), {}, first_step=0, guard=guard)
    with pytest.raises(MegacoreError, match=r"No space left.*on_failure = .continue"):
        writers.write(_record(0))
    writers.close(failed=True)


def test_a_record_that_fits_in_part_leaves_no_torn_line(tmp_path: Path) -> None:
    """A limit on the size of files cuts the third record in two."""
    path = tmp_path / "metrics.jsonl"
    length = len(_record(0).to_json()) + 1

    def run() -> int:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        with MetricsWriter(path) as writer:
            limit = 2 * length + length // 2
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            failures = 0
            for step in range(4):
                try:
                    writer.write(_record(step))
                except OSError as error:
                    failures += error.filename == str(path)
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
            writer.write(_record(4))
        return failures

    ended = start_function(run, tmp_path).finish()
    assert ended.code == 2, ended.err
    lines = path.read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 5]


def test_passes_over_many_sources_are_not_in_each_record(tmp_path: Path) -> None:
    sources = [tmp_path / f"text_{number}.txt" for number in range(17)]
    for source in sources:
        source.write_text("The quick brown fox jumps over the lazy dog. " * 20)
    blend = "".join(f'[[data.sources]]\npath = "{source}"\n' for source in sources)
    (tmp_path / "run.toml").write_text(
        "[model]\nhidden_size = 32\nseq_length = 16\n"
        "[train]\nsteps = 6\neval_interval = 0\n[debug]\nload_interval = 2\n"
        f"{blend}"
        f'[run]\ndir = "{tmp_path}/run"\nplain = true\n[checkpoint]\ninterval = 0\n'
    )
    assert main(["train", str(tmp_path / "run.toml"), "--nproc=1"]) == 0
    records = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    assert [len(record.get("epochs", {})) for record in records] == [17, 0, 17, 0, 17, 17]


@pytest.mark.parametrize("on_failure", ["stop", "continue"])
def test_a_run_on_a_full_disk(on_failure: str, tmp_path: Path) -> None:
    """Metrics and report go to a device that is always full."""
    (tmp_path / "text.txt").write_text("The quick brown fox jumps over the lazy dog. " * 100)
    (tmp_path / "run.toml").write_text(
        "[model]\nhidden_size = 32\nseq_length = 16\n"
        "[train]\nsteps = 4\neval_interval = 0\n"
        f'[data]\nsource = "{tmp_path}/text.txt"\n'
        f'[run]\ndir = "{tmp_path}/run"\nplain = true\n'
        f'[checkpoint]\non_failure = "{on_failure}"\n'
    )

    def run() -> int:
        keep = metrics_module._keep_first

        def onto_full(path: Path, step: int) -> None:
            keep(path, step)
            path.unlink()
            path.symlink_to("/dev/full")

        metrics_module._keep_first = onto_full
        loop_module.write_results = lambda *_, **__: Path("/dev/full").write_text("report")
        return main(["train", str(tmp_path / "run.toml"), "--nproc=1"])

    ended = start_function(run, tmp_path).finish()
    if on_failure == "stop":
        assert ended.code == 2, ended.err
        assert "metrics.jsonl cannot be written" in ended.err
        assert "Traceback" not in ended.err
        return
    assert ended.code == 0, ended.err
    assert ended.out.count("cannot be written now") == 2
    assert "step 4/4" in ended.out
    assert list((tmp_path / "run" / "checkpoints").glob("step_*4"))


def test_every_number_of_a_record_is_in_the_table() -> None:
    experts = ExpertMetrics(
        load={1: (3, 1)}, num_dropped=4, num_over_budget=1, aux_loss=0.5, z_loss=0.25
    )
    optional: dict[str, Any] = {
        name: 1 for name in METRICS if name in StepRecord.__dataclass_fields__
    }
    optional |= {"epochs": {"a": 1.0}, "validation_losses": {"a": 1.0}, "mtp_losses": (1.0, 2.0)}
    optional |= {"groups": {"kl": 1.0}, "validation_groups": {"a": {"kl": 2.0}}}
    record = StepRecord(step=0, experts=experts, **optional)
    assert set(record.as_dict()) - {"step"} == set(METRICS) - {"echo"}
    assert record.scalars()["train/mtp_losses/2"] == 2.0
    assert not any("expert_load" in name for name in record.scalars())
    assert record.console_texts()[0] == "loss 1.0000"
