"""``megacore generate`` and ``eval`` of Hugging Face folders: the tokens of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.cli import main
from tests.support.tokenizers import save_llama_like

transformers = pytest.importorskip("transformers")
PROMPT = "the quick dog"
NEW = 12


def save_model(folder: Path, *, vocab_size: int = 420) -> Any:
    """Save a random Llama with a tokenizer that puts ``<s>`` before a text."""
    torch.manual_seed(3)
    config = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=vocab_size,
        max_position_embeddings=64,
        initializer_range=0.3,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight[3:259] = 0.0  # half a character is printed when it is whole
    model.save_pretrained(folder)
    save_llama_like(folder)
    return model


def printed(capfd: pytest.CaptureFixture[str], folder: Path, *options: str) -> str:
    capfd.readouterr()
    arguments = ["--temperature=0", f"--max-new-tokens={NEW}", *options]
    assert main(["generate", str(folder), "--prompt", PROMPT, *arguments]) == 0
    return capfd.readouterr().out


def continuation(model: Any, folder: Path, **options: Any) -> tuple[list[int], str]:
    """Return the greedy tokens of transformers, and their text after the prompt without BOS."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(PROMPT, return_tensors="pt", **options)
    ids = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)[0].tolist()
    return ids[inputs["input_ids"].shape[1] :], tokenizer.decode(ids[1:] if ids[0] == 1 else ids)


def test_a_prompt_begins_as_in_transformers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path)
    _, expected = continuation(model, tmp_path)
    _, without = continuation(model, tmp_path, add_special_tokens=False)
    assert expected != without
    assert printed(capfd, tmp_path) == expected + "\n"
    assert printed(capfd, tmp_path, "--bos=") == without + "\n"
    with_bos = printed(capfd, tmp_path, "--prompt=<s>" + PROMPT)
    assert with_bos == f"{expected}\n\n<s>{expected}\n"  # not put there twice


@pytest.mark.parametrize("file", ["generation_config.json", "config.json"])
@pytest.mark.parametrize("as_list", [False, True])
def test_a_text_ends_at_any_id_that_the_files_of_the_model_name(
    file: str, as_list: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path)
    tokens, _ = continuation(model, tmp_path)
    end = tokens[5]
    if file == "config.json":
        (tmp_path / "generation_config.json").unlink()
    path = tmp_path / file
    stated = json.loads(path.read_text()) | {"eos_token_id": [419, end] if as_list else end}
    path.write_text(json.dumps(stated))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    ended, expected = continuation(loaded, tmp_path)
    assert ended == tokens[: tokens.index(end) + 1]
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert expected.endswith(tokenizer.decode([end]).strip())
    shown = printed(capfd, tmp_path)
    ids = tokenizer(PROMPT, add_special_tokens=False)["input_ids"] + ended[:-1]
    assert shown == tokenizer.decode(ids) + "\n"


def test_the_loss_of_a_text_is_that_of_transformers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    model = save_model(tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    text = "The quick brown fox jumps over the lazy dog. " * 3
    (tmp_path / "a.txt").write_text(text)
    ids = torch.tensor(tokenizer(text)["input_ids"])
    with torch.no_grad():
        loss = model(input_ids=ids[None], labels=ids[None]).loss.item()
    length = f"--model.seq_length={len(ids) - 1}"
    command = ["eval", str(tmp_path / "model"), "--data", str(tmp_path / "a.txt"), "--json", length]
    capfd.readouterr()
    assert main(command) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["sets"]["a.txt"]["tokens"] == len(ids) - 1
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
