"""Runs with adapters: their checkpoints, their base, and what goes on from them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import MegacoreError
from megatrain.checkpoint import load_full_weights, read_index, resolve_checkpoint
from megatrain.checkpoint.base_weights import BaseWeights
from megatrain.cli import main
from megatrain.hf.export_checkpoint import export_checkpoint
from megatrain.train.loop import train
from tests.support.configs import changed_config, rank_context
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

SECTIONS: dict[str, dict[str, Any]] = {
    "model": {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "seq_length": 16},
    "train": {"microbatch_size": 1, "global_batch_size": 4, "eval_interval": 4, "steps": 4},
    "optimizer": {"lr": 5e-3, "schedule": "constant"},
    "checkpoint": {"interval": 1, "keep": 9},
}
LORA = {"lora.rank": 2, "lora.alpha": 4.0}
TRAINED = {"lora_a", "lora_b", "lora_magnitude"}


def run_folder(rank: int, world_size: int, folder: Path, changes: dict[str, Any]) -> None:
    data = {"source": str(folder / "text.txt"), "tokenizer": "bytes"}
    config = changed_config(world_size, {**SECTIONS, "data": data}, changes)
    assert train(config, rank_context(rank, world_size)) == 0


def records(run: Path, key: str = "loss") -> list[float]:
    lines = (run / "metrics.jsonl").read_text().splitlines()
    return [record[key] for record in map(json.loads, lines) if record.get(key) is not None]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a text and a trained base."""
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    run_folder(0, 1, tmp_path, {"run.dir": str(tmp_path / "base"), "train.steps": 2})
    return tmp_path


def adapted(folder: Path, name: str = "run", **more: Any) -> dict[str, Any]:
    """Changes of a run with adapters of the base."""
    changes = {"run.dir": str(folder / name), "checkpoint.load_weights": str(folder / "base")}
    return {**LORA, **changes, **{key.replace("__", "."): value for key, value in more.items()}}


def test_checkpoints_hold_adapters_and_name_their_base(folder: Path) -> None:
    run_folder(0, 1, folder, adapted(folder, lora__modules_to_save=["final_norm"]))
    stored, weights = load_full_weights(folder / "run")
    assert stored["lora"]["rank"] == 2
    assert {name.rpartition(".")[2] for name in weights} == {"lora_a", "lora_b", "final_norm"}
    assert all(value.dtype == torch.float32 for value in weights.values())
    state = read_index(resolve_checkpoint(folder / "run")).state
    assert state.base == BaseWeights.of(folder / "base").as_state()
    assert state.base["path"] == str(folder / "base" / "checkpoints" / "step_00000002")
    moments = read_index(resolve_checkpoint(folder / "run")).files
    size = sum(each.num_bytes for each in moments.values())
    whole = read_index(resolve_checkpoint(folder / "base")).files
    assert size < 0.5 * sum(each.num_bytes for each in whole.values())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_run_with_adapters_goes_on_exactly(folder: Path, dtype: str) -> None:
    more = {"train.dtype": dtype}
    run_folder(0, 1, folder, {**adapted(folder, "whole"), **more})
    parts = {**adapted(folder, "parts"), **more, "checkpoint.resume": "auto"}
    run_folder(0, 1, folder, {**parts, "train.steps": 2})
    run_folder(0, 1, folder, parts)
    assert records(folder / "parts") == records(folder / "whole")
    before, after = (load_full_weights(folder / name)[1] for name in ("whole", "parts"))
    assert all(torch.equal(value, after[name]) for name, value in before.items())
    # Its own record of the base is enough.
    rest = {key: value for key, value in parts.items() if key != "checkpoint.load_weights"}
    run_folder(0, 1, folder, {**rest, "train.steps": 5})


def test_a_run_with_adapters_goes_on_in_other_layouts(folder: Path) -> None:
    run_folder(0, 1, folder, adapted(folder, "whole"))
    parts = {**adapted(folder, "parts"), "checkpoint.resume": "auto"}
    run_ranks(2, run_folder, 2, folder, {**parts, "train.steps": 1, "parallel.pp": 2})
    run_ranks(2, run_folder, 2, folder, {**parts, "train.steps": 2, "parallel.tp": 2})
    run_folder(0, 1, folder, parts)
    assert records(folder / "parts") == pytest.approx(records(folder / "whole"), rel=1e-5)


def test_adapters_start_anew_from_those_of_a_run(folder: Path) -> None:
    run_folder(0, 1, folder, adapted(folder))
    second = adapted(folder, "second", train__steps=1, optimizer__lr=0.0)
    second["checkpoint.load_weights"] = str(folder / "run")
    run_folder(0, 1, folder, second)
    first, last = (load_full_weights(folder / name)[1] for name in ("run", "second"))
    assert all(torch.equal(value, last[name]) for name, value in first.items())
    bases = [read_index(resolve_checkpoint(folder / name)).state.base for name in ("run", "second")]
    assert bases[0] == bases[1]
    third = adapted(folder, "third", train__steps=1)
    run_folder(0, 1, folder, third)
    assert records(folder / "third") != records(folder / "second")


def test_checkpoints_hold_frozen_adapters_too(folder: Path) -> None:
    run_folder(0, 1, folder, adapted(folder, train__steps=1))
    group = {"pattern": "*.lora_a", "optimizer": "none"}
    changes = {**adapted(folder), "optimizer.groups": [group], "checkpoint.resume": "auto"}
    run_folder(0, 1, folder, {**changes, "train.steps": 2})
    run_folder(0, 1, folder, {**changes, "train.steps": 3})
    first, last = (
        load_full_weights(folder / "run" / "checkpoints" / f"step_0000000{n}")[1] for n in (1, 3)
    )
    assert first.keys() == last.keys()
    for name, value in last.items():
        assert torch.equal(value, first[name]) == name.endswith("lora_a"), name
    assert main(["eval", str(folder / "run")]) == 0


def test_another_factor_on_loaded_adapters_is_told(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_folder(0, 1, folder, adapted(folder, train__steps=1))
    second = adapted(folder, "second", train__steps=1, lora__alpha=None)
    second["checkpoint.load_weights"] = str(folder / "run")
    capfd.readouterr()
    run_folder(0, 1, folder, second)
    assert "were trained with a factor of 2, and get one of 1 here" in capfd.readouterr().out
    run_folder(0, 1, folder, {**second, "run.dir": str(folder / "third"), "lora.alpha": 4.0})
    assert "were trained with a factor" not in capfd.readouterr().out


def test_adapters_of_another_base_are_refused(folder: Path) -> None:
    run_folder(0, 1, folder, adapted(folder, train__steps=1))
    run_folder(0, 1, folder, {"run.dir": str(folder / "other"), "train.seed": 7, "train.steps": 1})
    changes = {**adapted(folder), "checkpoint.load_weights": str(folder / "other")}
    message = (
        r"checkpoint\.load_weights must be the weights that the adapters of checkpoint .*run.* "
        r"were trained on, those of .*base.* with checksum \w+, got .*other.* with checksum"
    )
    with pytest.raises(MegacoreError, match=message):
        run_folder(0, 1, folder, {**changes, "checkpoint.resume": "auto"})


def test_adapters_need_a_base(folder: Path) -> None:
    changes = {"run.dir": str(folder / "run"), **LORA}
    with pytest.raises(MegacoreError, match=r"adapters need .*: set checkpoint\.load_weights"):
        run_folder(0, 1, folder, changes)
    run_folder(0, 1, folder, adapted(folder, train__steps=1))
    plain = {"run.dir": str(folder / "plain"), "checkpoint.load_weights": str(folder / "run")}
    with pytest.raises(MegacoreError, match=r"has adapters only; set \[lora\] .*--merge"):
        run_folder(0, 1, folder, plain)
    (folder / "base").rename(folder / "moved")
    with pytest.raises(MegacoreError, match=r"has adapters of the weights .*which do not exist"):
        run_folder(0, 1, folder, {**changes, "checkpoint.resume": "auto"})
    moved = {"checkpoint.resume": "auto", "checkpoint.load_weights": str(folder / "moved")}
    run_folder(0, 1, folder, {**changes, **moved})


def test_a_moved_base_is_named_by_an_option(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run_folder(0, 1, folder, adapted(folder, train__steps=1))
    run = str(folder / "run")
    ways = [
        ["eval", run, "--json", "--data", str(folder / "text.txt")],
        ["generate", run, "--prompt=The", "--temperature=0", "--max-new-tokens=4"],
    ]

    def output(*arguments: str, code: int = 0) -> str:
        capfd.readouterr()
        assert main(list(arguments)) == code
        printed = capfd.readouterr()
        return printed.err if code else printed.out

    before = [output(*way) for way in ways]
    (folder / "base").rename(folder / "moved")
    for way, expected in zip(ways, before, strict=True):
        assert "--base of eval, generate and export-hf" in output(*way, code=2)
        assert output(*way, "--base", str(folder / "moved")) == expected
        whole = [way[0], str(folder / "moved"), *way[2:], "--base", run]
        assert "--base must be left out for " in output(*whole, code=2)
    given = f"--checkpoint.load_weights={folder / 'moved'}"
    assert "--base names the base of adapters" in output(*ways[0], given, code=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora.rank": 3}, r"has shape .* lora\.rank is 2 there and 3 here"),
        ({"lora.targets": ["q", "gate"]}, r"does not use.*lora\.targets is"),
        ({"lora.rank": None, "lora.alpha": None}, r"lora\.rank is 2 there and None here"),
    ],
)
def test_other_adapters_do_not_fit(folder: Path, changes: dict[str, Any], message: str) -> None:
    run_folder(0, 1, folder, adapted(folder, train__steps=1))
    with pytest.raises(MegacoreError, match=message):
        run_folder(0, 1, folder, {**adapted(folder), "checkpoint.resume": "auto", **changes})


def test_a_hugging_face_folder_is_a_base(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    export_checkpoint(folder / "base", folder / "hf")
    changes = {**adapted(folder), "checkpoint.load_weights": str(folder / "hf")}
    run_ranks(2, run_folder, 2, folder, {**changes, "parallel.tp": 2})
    base = read_index(resolve_checkpoint(folder / "run")).state.base
    assert base["path"] == str(folder / "hf")
    run_folder(0, 1, folder, adapted(folder, "from checkpoint"))
    found, expected = (records(folder / name) for name in ("run", "from checkpoint"))
    assert found == pytest.approx(expected, rel=1e-5)
    # Imports of the same folder are the same base.
    for name in ("first", "second"):
        assert main(["import-hf", str(folder / "hf"), str(folder / name)]) == 0
    sums = [BaseWeights.of(folder / name).checksum for name in ("first", "second")]
    assert sums[0] == sums[1]
    capfd.readouterr()
    assert main(["eval", str(folder / "run"), "--json"]) == 0
    loss = json.loads(capfd.readouterr().out)["loss"]
    assert loss == pytest.approx(records(folder / "run", "validation_loss")[-1], rel=1e-5)
    assert math.isfinite(loss)
