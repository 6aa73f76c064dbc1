"""``megacore eval``: the losses of the trainer and of `transformers`, in any layout."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import MegacoreError
from megatrain.cli import main
from megatrain.cli.train import resolve_for_training
from megatrain.train.evaluate import evaluate, open_source
from megatrain.train.loop import train
from tests.support.configs import FOUR_LAYERS, changed_config, rank_context
from tests.support.distributed import run_ranks
from tests.support.hf_models import save_theirs

pytestmark = pytest.mark.dist

LENGTH = 16
TEXT = "The quick brown fox jumps over the lazy dog, and the dog does not care much. " * 9


def found(rank: int, world_size: int, folder: Path, settings: Any, data: Any) -> dict[str, Any]:
    source = open_source(folder, settings, data=data)
    config = resolve_for_training(source.config, world_size, launcher="--nproc")
    return evaluate(source, config, rank_context(rank, world_size))


@pytest.mark.parametrize(
    ("family", "world_size", "layout"),
    [
        ("llama", 1, {}),
        ("qwen2-moe", 4, {"parallel.tp": "2", "parallel.etp": "1", "parallel.ep": "2"}),
    ],
)
def test_a_hugging_face_folder_has_the_loss_of_transformers(
    family: str, world_size: int, layout: dict[str, str], tmp_path: Path
) -> None:
    theirs = save_theirs(family, tmp_path / "model")
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    tokens = torch.tensor(list(TEXT.encode()))
    # Every window once: their number is no multiple of the batch.
    number = (len(tokens) - 1) // LENGTH
    assert number % 32
    windows = torch.stack([tokens[i * LENGTH : i * LENGTH + LENGTH + 1] for i in range(number)])
    with torch.no_grad():
        logits = theirs(input_ids=windows[:, :-1], use_cache=False).logits
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
    settings = [("data.tokenizer", "bytes"), ("model.seq_length", str(LENGTH)), *layout.items()]
    arguments = (world_size, tmp_path / "model", settings, str(text))
    got = found(0, *arguments) if world_size == 1 else run_ranks(world_size, found, *arguments)[0]
    assert got["sets"]["text.txt"]["tokens"] == number * LENGTH
    assert got["loss"] == pytest.approx(expected.item(), rel=1e-5)
    assert got["perplexity"] == pytest.approx(math.exp(expected.item()), rel=1e-4)
    assert got["step"] is None
    # As transformers counts: without the padding of the vocabulary.
    assert got["parameters"] == sum(param.numel() for param in theirs.parameters())


def test_a_run_has_the_validation_losses_of_its_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = []
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(f"{name} " + TEXT)
        sets.append({"path": str(tmp_path / f"{name}.txt"), "weight": ord(name)})
    base: dict[str, dict[str, Any]] = {
        "model": dict(FOUR_LAYERS),
        "moe": {
            **{"num_experts": 4, "ffn_hidden_size": 16, "expert_bias": True},
            **{"dispatcher": "static", "static_transport": "collective"},
        },
        "train": {"steps": 3, "global_batch_size": 8, "microbatch_size": 2, "eval_interval": 3},
        "data": {"source": str(tmp_path / "a.txt"), "validation": sets},
        "run": {"dir": str(tmp_path / "run"), "plain": True},
        "debug": {"trace_step": -1},
    }
    assert train(changed_config(1, base, {}), rank_context(0, 1)) == 0
    capsys.readouterr()
    trained = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    got = found(0, 1, tmp_path / "run", [], None)
    assert "batch 8/8" in capsys.readouterr().err
    assert got["loss"] == trained["validation_loss"]
    losses = {name: one["loss"] for name, one in got["sets"].items()}
    assert losses == trained["validation_losses"]
    assert got["step"] == 3
    split = [("parallel.tp", "2"), ("parallel.ep", "2"), ("parallel.etp", "1")]
    split.append(("moe.dispatcher", "alltoall"))
    other = run_ranks(2, found, 2, tmp_path / "run" / "checkpoints", split, None)[0]
    assert other["loss"] == pytest.approx(got["loss"], rel=1e-5)


def test_mistakes_are_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_theirs("llama", tmp_path)
    with pytest.raises(MegacoreError, match=r"has no tokenizer\.json; set --data\.tokenizer, or"):
        open_source(tmp_path)
    assert main(["eval", str(tmp_path / "nowhere")]) == 2
    assert "there is no checkpoint" in capsys.readouterr().err
    assert main(["eval", str(tmp_path), "--data.tokenizer=bytes", "--model.num_layer=2"]) == 2
    assert "did you mean model.num_layers?" in capsys.readouterr().err
