"""A schedule from a file: facts of the pipeline, and every reason to refuse it."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from megacore.errors import ConfigError
from megacore.pipeline import Schedule, build_schedule
from megatrain.config import (
    Config,
    ResolvedConfig,
    config_to_toml,
    load_config,
    resolve,
    stages_of_ranks,
)
from megatrain.config.pipeline import SCHEDULES, schedule_info
from megatrain.config.schedule_file import COPY_NAME
from megatrain.plan.footprint import in_flight, rank_stages
from megatrain.plan.layout import train_schedule
from megatrain.plan.run_plan import check_plan
from megatrain.plan.schedules import cached_schedule, schedule_shape
from megatrain.plan.spec_from_config import run_spec

# Four ranks run eight stages at most, and two have eight microbatches.
SETTINGS = {
    "model.num_layers": "8",
    "parallel.pp": "2",
    "train.microbatch_size": "1",
    "train.global_batch_size": "8",
}
GOOD = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"


def resolved(world_size: int = 2, **changes: object) -> ResolvedConfig:
    settings = SETTINGS | {key.replace("__", "."): str(value) for key, value in changes.items()}
    config = load_config(None, list(settings.items()))
    return resolve(config, world_size, vocab_size=256, cuda=False)


def of_file(path: Path, world_size: int = 2, **changes: object) -> ResolvedConfig:
    return resolved(world_size, pipeline__schedule_file=path, **changes)


def refusal(path: Path, **changes: object) -> str:
    with pytest.raises(ConfigError) as error:
        of_file(path, **changes)
    return str(error.value)


# PyTorch's CSV has no copies of the model.
IN_CSV = [
    name for name in SCHEDULES if (info := schedule_info(name)) is None or info.name != "dualpipe"
]


@pytest.mark.parametrize("name", IN_CSV)
def test_a_file_has_all_facts_of_the_named_schedule(tmp_path: Path, name: str) -> None:
    pp = 1 if name == "no_pipelining" else 2
    sizes = {"parallel__pp": pp, "train__global_batch_size": 16}
    named = resolved(**sizes, pipeline__schedule=name)
    wanted = train_schedule(named, 2)
    wanted.to_csv(tmp_path / "own.csv")

    config = of_file(tmp_path / "own.csv", **sizes)
    check_plan(config, 2)
    assert train_schedule(config, 2) == wanted
    assert train_schedule(config, 2).name == "own"
    for fact in ("chunks", "stages_per_rank", "copies", "is_v"):
        assert getattr(config.pipeline, fact) == getattr(named.pipeline, fact), fact
    assert stages_of_ranks(config.pipeline, pp) == stages_of_ranks(named.pipeline, pp)
    spec, of_name = run_spec(config, 2), run_spec(named, 2)
    assert rank_stages(spec) == rank_stages(of_name)
    ones = [1.0] * wanted.num_stages
    assert in_flight(spec, ones, ones) == in_flight(of_name, ones, ones)
    info = schedule_info(name)
    if info is not None and pp == 2:
        assert config.pipeline.file is not None
        assert config.pipeline.file.splits_backward == info.splits_backward


@pytest.mark.parametrize("pairs", ["whole", "split"])
def test_pairs_of_a_file_can_overlap(tmp_path: Path, pairs: str) -> None:
    experts = {"moe__num_experts": 4, "parallel__ep": 2, "pipeline__overlap_moe": "true"}
    sizes = {"num_ranks": 2, "num_microbatches": 4}
    build_schedule("1f1b", **sizes, pairs=pairs).to_csv(tmp_path / "pairs.csv")
    build_schedule("1f1b", **sizes).to_csv(tmp_path / "plain.csv")
    assert of_file(tmp_path / "pairs.csv", 4, **experts).pipeline.overlap_moe is True
    message = refusal(tmp_path / "plain.csv", world_size=4, **experts)
    assert "pipeline.schedule_file = " in message
    assert "plain.csv) has none; use 1f1b" in message
    experts["pipeline__pairs"] = "split"
    message = refusal(tmp_path / "pairs.csv", world_size=4, **experts)
    assert 'change that, or set pairs = "whole"' in message


def _named(name: str, **sizes: int) -> Callable[[Path], None]:
    return lambda path: build_schedule(name, num_ranks=2, **sizes).to_csv(path)


FILES: dict[str, tuple[str | Callable[[Path], None], str]] = {
    "waits for itself": (
        "0F0,0B0,0F1,0B1\n1F0,1F1,1B1,1B0\n",
        "1F1 waits for 0F1 (rank 0, position 2)",
    ),
    "lacks a backward": ("0F0,0F1,0B0,0B1\n1F0,1B0,1F1\n", "1B1"),
    "backward before forward": ("0B0,0F0\n1F0,1B0\n", "0B0"),
    "a stage on two ranks": ("0F0,0B0\n0F1,0B1\n", "stage 0 runs on rank 0 and on rank 1"),
    "sends": ("0F0,0SEND_F0,0B0\n1F0,1B0\n", "sends and receives are added by lowering"),
    "a sentence": ("x" * 3000, f"'{'x' * 40}...' is not an action"),
    "empty": ("", "the schedule is empty"),
    "not ASCII": ("0F0,0B0 é\n", "it is not ASCII text"),
    "other ranks": (
        lambda path: build_schedule("1f1b", num_ranks=4, num_microbatches=8).to_csv(path),
        "parallel.pp = 2 (--parallel.pp=2) does not fit pipeline.schedule_file = ",
    ),
    "other microbatches": (
        _named("1f1b", num_microbatches=6),
        "train.global_batch_size = 8 (--train.global_batch_size=8) / (train.microbatch_size = 1 "
        "(--train.microbatch_size=1) x dp 1) is 8 microbatches per step, but "
        "pipeline.schedule_file = ",
    ),
    "more stages than layers": (
        _named("interleaved_1f1b", num_microbatches=8, num_chunks=5),
        "cannot fill the 10 stages",
    ),
    "uneven stages": (
        "0F0,2F0,2B0,0B0\n1F0,1B0\n",
        "has 1 to 2 stages on a rank; every rank must hold equally many",
    ),
    "forwards only": (
        lambda path: build_schedule(
            "1f1b", num_ranks=2, num_microbatches=8, forward_only=True
        ).to_csv(path),
        "has forwards only, which train nothing",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_a_file_is_refused_with_the_reason(tmp_path: Path, kind: str) -> None:
    content, expected = FILES[kind]
    path = tmp_path / "own.csv"
    if callable(content):
        content(path)
    else:
        path.write_text(content)
    message = refusal(path)
    assert f"pipeline.schedule_file = {path} (--pipeline.schedule_file={path})" in message
    assert expected in message
    assert len(message) < 800


def test_a_wrong_size_has_the_nearest_legal_value(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    build_schedule("1f1b", num_ranks=4, num_microbatches=6).to_csv(path)
    assert "which is for 4; set parallel.pp to 4, or use a file" in refusal(path)
    message = refusal(path, world_size=8, parallel__pp=4)
    assert "is for 6; set train.global_batch_size to 12, or use a file for these sizes" in message
    fits = of_file(path, 8, parallel__pp=4, train__global_batch_size=12)
    assert train_schedule(fits, 8).num_microbatches == 6
    message = refusal(path, pipeline__num_chunks=3)
    assert "pipeline.num_chunks = 3 (--pipeline.num_chunks=3) does not fit " in message
    assert "which has 1; leave num_chunks out" in message


def test_nearest_layers_keep_the_ranks_and_stages_of_the_file(tmp_path: Path) -> None:
    build_schedule("interleaved_1f1b", num_ranks=2, num_chunks=2, num_microbatches=8).to_csv(
        tmp_path / "own.csv"
    )
    message = refusal(tmp_path / "own.csv", model__num_layers=5)
    assert "--model.num_layers=4 or 8, or --pipeline.layout='Et*1|t*2|t*1|t*1L'" in message


def test_options_of_named_schedules_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    build_schedule("1f1b", num_ranks=2, num_microbatches=8).to_csv(path)
    message = refusal(path, pipeline__group_size=2, pipeline__memory_limit=3)
    assert "pipeline.group_size = 2 (--pipeline.group_size=2) needs one of " in message
    assert (
        "pipeline.memory_limit = 3 (--pipeline.memory_limit=3) is for the schedule auto" in message
    )


def test_a_missing_file_names_those_beside_it(tmp_path: Path) -> None:
    (tmp_path / "own.csv").write_text(GOOD)
    message = refusal(tmp_path / "owm.csv")
    assert f"cannot be read: No such file or directory; did you mean {tmp_path}/own.csv?" in message
    assert "cannot be read: Is a directory" in refusal(tmp_path)
    assert "cannot be read: No such file" in refusal(tmp_path / "nowhere" / "own.csv")


def test_a_missing_file_names_the_copy_of_the_run(tmp_path: Path) -> None:
    copy = tmp_path / "run" / COPY_NAME
    copy.parent.mkdir()
    copy.write_text(GOOD)
    message = refusal(tmp_path / "gone.csv", run__dir=copy.parent)
    assert message.endswith(f"{copy.parent} keeps a copy, {copy}")


def test_a_schedule_has_a_name_or_a_file(tmp_path: Path) -> None:
    file = tmp_path / "both.toml"
    file.write_text('[pipeline]\nschedule = "1f1b"\nschedule_file = "own.csv"\n')
    rule = "schedule_file = own.csv replaces schedule = 1f1b; leave one of them out"
    with pytest.raises(ConfigError, match=f"both.toml:[23]: .*{rule}"):
        load_config(file)
    with pytest.raises(ConfigError, match=rule):
        Config(pipeline={"schedule": "1f1b", "schedule_file": "own.csv"})
    kept = load_config(file, [("pipeline.schedule_file", "none")]).pipeline
    assert (kept.schedule, kept.schedule_file) == ("1f1b", None)


def test_a_path_is_relative_to_the_folder_of_the_start_or_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_schedule("1f1b", num_ranks=2, num_microbatches=8).to_csv(tmp_path / "own.csv")
    monkeypatch.chdir(tmp_path)
    assert of_file(Path("own.csv")).pipeline.file is not None
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    (tmp_path / "run.toml").write_text('[pipeline]\nschedule_file = "{here}/own.csv"\n')
    config = load_config(tmp_path / "run.toml", list(SETTINGS.items()))
    assert resolve(config, 2, vocab_size=256, cuda=False).pipeline.chunks == 1


def test_a_resolved_configuration_keeps_the_schedule_that_it_has_read(tmp_path: Path) -> None:
    path = tmp_path / "own.csv"
    wanted = build_schedule("1f1b", num_ranks=2, num_microbatches=8)
    wanted.to_csv(path)
    before = of_file(path)
    build_schedule("gpipe", num_ranks=2, num_microbatches=8).to_csv(path)
    after = of_file(path)
    path.unlink()
    assert train_schedule(before, 2) == wanted
    assert train_schedule(after, 2) == build_schedule("gpipe", num_ranks=2, num_microbatches=8)
    assert train_schedule(resolve(before, 2, cuda=False), 2) == wanted
    assert train_schedule(pickle.loads(pickle.dumps(before)), 2) == wanted
    text = config_to_toml(before)
    assert f'schedule_file = "{path}"' in text
    assert "# schedule is not set: " in text


def test_a_prediction_does_not_use_a_file_for_other_sizes(tmp_path: Path) -> None:
    build_schedule("1f1b", num_ranks=2, num_microbatches=8).to_csv(tmp_path / "own.csv")
    spec = run_spec(of_file(tmp_path / "own.csv"), 2)
    assert isinstance(cached_schedule(schedule_shape(spec, spec.microbatches)), Schedule)
    larger = replace(spec, microbatch=2)
    with pytest.raises(ValueError, match="must be for 2 ranks, 4 microbatches and 1 chunks"):
        cached_schedule(schedule_shape(larger, larger.microbatches))
