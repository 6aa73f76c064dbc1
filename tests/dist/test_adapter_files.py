"""Adapters of PEFT that are imported, trained on and exported, as a user does it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from megatrain.checkpoint import load_full_weights
from megatrain.cli import main
from tests.support.hf_models import save_theirs
from tests.support.lora_runs import save_lora_run

pytestmark = pytest.mark.dist
pytest.importorskip("safetensors")

WEIGHTS = "adapter_model.safetensors"
# Llama in one process, and models with experts on several.
CASES = {
    "llama": [],
    "qwen3-moe": ["--nproc=2", "--parallel.ep=2"],
    "deepseek-v3": ["--nproc=2", "--parallel.tp=2"],
}


@pytest.mark.parametrize("name", CASES)
def test_an_imported_adapter_trains_and_comes_back(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_theirs(name, tmp_path / "base")
    save_lora_run(tmp_path / "base", tmp_path / "made", rank=2, alpha=3.0, modules_to_save=["head"])
    (tmp_path / "text.txt").write_text("The quick brown fox. " * 100)
    options = [
        "--data.source=text.txt",
        "--data.tokenizer=bytes",
        "--train.steps=2",
        "--train.global_batch_size=4",
        "--train.microbatch_size=1",
        "--run.dir=run",
        *CASES[name],
    ]
    assert main(["export-hf", "made", "first", "--adapter"]) == 0
    assert main(["import-hf", "first", "in", "--seq-length=16"]) == 0
    assert main(["train", "in/config.toml", *options]) == 0
    assert main(["export-hf", "run", "second", "--adapter"]) == 0
    assert main(["import-hf", "second", "again", "--seq-length=16"]) == 0
    assert main(["export-hf", "again", "third", "--adapter"]) == 0
    before, trained, found = (load_full_weights(each)[1] for each in ("in", "run", "again"))
    assert before.keys() == trained.keys() == found.keys()
    for key, value in trained.items():
        assert torch.equal(found[key], value), key
        is_bias = key.endswith("expert_bias")
        assert torch.equal(before[key], value) == is_bias, key
    assert (tmp_path / "second" / WEIGHTS).read_bytes() == (
        tmp_path / "third" / WEIGHTS
    ).read_bytes()


def test_a_base_that_has_changed_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_theirs("llama", tmp_path / "base")
    save_lora_run(tmp_path / "base", tmp_path / "made", rank=2)
    assert main(["export-hf", "made", "adapter", "--adapter"]) == 0
    assert main(["import-hf", "adapter", "in", "--seq-length=16"]) == 0
    save_theirs("llama", tmp_path / "base", initializer_range=0.1)
    for command in (["export-hf", "in", "out", "--merge"], ["generate", "in", "--prompt=a"]):
        capsys.readouterr()
        assert main(command) == 2
        said = capsys.readouterr().err
        assert "must be the weights that the adapters of checkpoint" in said
        assert said.count("\n") == 1
