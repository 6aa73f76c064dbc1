"""``megacore plan`` of a Hugging Face model, with or without its weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatrain.cli import main
from megatrain.config import load_config
from tests.support.hf_models import EACH, save_theirs

WIDE = {"hidden_size": 64, "intermediate_size": 256, "max_position_embeddings": 64}


def out_of(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[Any, str]:
    code = main(["plan", *arguments, "--json"])
    said = capsys.readouterr()
    assert code == 0, said.err
    return json.loads(said.out), said.err


@pytest.mark.parametrize("name", EACH)
def test_the_plan_is_that_of_the_imported_model(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "theirs"
    save_theirs(name, folder)
    assert main(["import-hf", str(folder), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    settings = ("--train.global_batch_size=4", "--train.microbatch_size=2", "--world-size=2")
    wanted, _ = out_of(capsys, str(tmp_path / "ours" / "config.toml"), *settings)
    found, notes = out_of(capsys, str(folder), *settings)
    assert found == wanted
    longest = load_config(tmp_path / "ours" / "config.toml").model.seq_length
    assert notes == (
        f"note: chosen for this plan: model.seq_length = {longest}, train.dtype = float32; "
        "--model.seq_length=... sets another value\n"
    )
    (folder / "model.safetensors").unlink()
    for source in (folder, folder / "config.json"):
        assert out_of(capsys, str(source), *settings) == (wanted, notes)


def test_predictions_and_searches_need_no_weights(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_theirs("qwen3-moe", tmp_path, **WIDE)
    (tmp_path / "model.safetensors").unlink()
    found, notes = out_of(capsys, str(tmp_path), "--gpus=8", "--parallel.ep=2")
    assert (found["gpus"], found["verdict"]) == (8, "fits")
    assert "train.global_batch_size = 32, train.microbatch_size = 1" in notes
    best = tmp_path / "best.toml"
    search = ("--gpus=8", "--search", "--model.seq_length=32", f"--write={best}")
    found, notes = out_of(capsys, str(tmp_path / "config.json"), *search)
    assert main(["plan", str(tmp_path), *search]) == 0
    capsys.readouterr()
    written = load_config(best)
    assert (written.model.hidden_size, written.moe.num_experts) == (64, 6)
    assert written.model.seq_length == 32
    again, notes = out_of(capsys, str(best), "--gpus=8")
    assert again["step_s"] == found[0]["step_s"]
    assert notes == ""


def test_a_batch_that_was_chosen_fits_every_number_of_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_theirs("llama", tmp_path, **WIDE)
    assert main(["plan", str(tmp_path), "--gpus=6,8"]) == 0
    assert "train.global_batch_size = 96" in capsys.readouterr().err
    found, notes = out_of(capsys, str(tmp_path), "--world-size=64")
    assert (found["world_size"], found["num_microbatches"]) == (64, 4)
    assert "train.global_batch_size = 256" in notes


def test_the_number_format_is_that_of_the_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_theirs("llama", tmp_path)
    file = tmp_path / "config.json"
    content = json.loads(file.read_text())
    param_bytes = {}
    for entries in ({"dtype": "float32"}, {"torch_dtype": "float16"}, {}):
        kept = {key: value for key, value in content.items() if key != "dtype"}
        file.write_text(json.dumps(kept | entries))
        found, _ = out_of(capsys, str(file), "--world-size=1")
        param_bytes[str(entries)] = found["ranks"][0]["param_bytes"]
    whole, half, missing = param_bytes.values()
    assert (half, missing) == (whole // 2, whole // 2)


def test_mistakes_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_theirs("llama", tmp_path)
    file = tmp_path / "config.json"
    assert main(["plan", str(file), "--gpus=8", "--parallel.pp=2"]) == 2
    assert f"model.num_layers = 3 ({file}) cannot be dealt" in capsys.readouterr().err
    file.write_text(json.dumps({"model_type": "bert"}))
    assert main(["plan", str(tmp_path), "--gpus=8"]) == 2
    assert "model_type must be one of llama" in capsys.readouterr().err
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    assert main(["plan", str(tmp_path), "--gpus=8"]) == 2
    assert "is a LoRA adapter of an unknown model; import it" in capsys.readouterr().err
    assert main(["plan", str(tmp_path.parent), "--gpus=8"]) == 2
    assert "is a folder, not a TOML file" in capsys.readouterr().err
