"""Log-probs of all tokens that ``megacore eval --logprobs`` writes: those of transformers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import MegacoreError
from megatrain.config import resolve
from megatrain.models import gpt
from megatrain.train.evaluate import evaluate, open_source
from tests.support.configs import rank_context
from tests.support.distributed import run_ranks
from tests.support.hf_models import save_theirs

LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one process": (1, {}),
    "tp2 sequence parallel": (2, {"parallel.tp": 2, "parallel.sequence_parallel": "true"}),
    "cp2": (2, {"parallel.cp": 2}),
    "pp2 cp2": (4, {"parallel.pp": 2, "parallel.cp": 2, "pipeline.layout": "Ett|tL"}),
    "dp2": (2, {"train.microbatch_size": 1, "train.global_batch_size": 4}),
}


def write_logprobs(
    rank: int, world_size: int, folder: Path, changes: dict[str, Any], columns: int | None
) -> float:
    if columns is not None:
        gpt.block_columns = lambda *_: columns  # this process ends with the call
    settings = [(name, str(value)) for name, value in changes.items()]
    source = open_source(folder / "theirs", settings, data=str(folder / "held.txt"))
    config = resolve(source.config, world_size, vocab_size=260, cuda=False)
    context = rank_context(rank, world_size)
    return float(evaluate(source, config, context, logprobs=folder / "out.jsonl")["loss"])


def their_logprobs(theirs: Any, line: dict[str, Any]) -> torch.Tensor:
    """Log-probs of the labels, each document by itself."""
    tokens, labels = torch.tensor(line["tokens"]), torch.tensor(line["labels"])
    starts = [*line.get("document_starts", [0]), len(tokens)]
    parts = []
    for begin, end in itertools.pairwise(starts):
        logits = theirs(input_ids=tokens[None, begin:end], use_cache=False).logits[0]
        own = labels[begin:end].clamp(min=0)[:, None]
        parts.append(logits.log_softmax(-1).gather(-1, own)[:, 0])
    return torch.cat(parts)


@pytest.mark.dist
@pytest.mark.parametrize("layout", LAYOUTS)
@torch.no_grad()
def test_logprobs_are_those_of_transformers_in_every_layout(layout: str, tmp_path: Path) -> None:
    theirs = save_theirs("llama", tmp_path / "theirs").eval()
    words = ["one two three", "", "a much longer line than the others, to be cut in pieces", "end"]
    (tmp_path / "held.txt").write_text("\n".join(words * 3))
    world_size, changes = LAYOUTS[layout]
    changes = {"model.seq_length": 16, "data.tokenizer": "bytes", **changes}
    columns = 100 if "tp2" in layout else None
    losses = run_ranks(world_size, write_logprobs, world_size, tmp_path, changes, columns)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [line["sample"] for line in lines] == list(range(len(lines))), "each sample once"
    total, count = 0.0, 0
    for line in lines:
        expected = their_logprobs(theirs, line)
        for value, label, other in zip(line["logprobs"], line["labels"], expected, strict=True):
            assert (value is None) == (label < 0)
            if value is not None:
                assert value == pytest.approx(other.item(), abs=2e-5)
                total, count = total - value, count + 1
    assert count == 16 * len(lines)
    assert losses[0] == pytest.approx(total / count, rel=1e-6)
    assert not (tmp_path / "out.jsonl.partial").exists()


@pytest.mark.dist
def test_documents_have_the_logprobs_they_have_alone(tmp_path: Path) -> None:
    theirs = save_theirs("llama", tmp_path / "theirs").eval()
    rows = [{"prompt": "2+2=", "completion": "4"}, {"prompt": "abc", "completion": "defg"}] * 4
    path = tmp_path / "held.txt"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        **{"model.seq_length": 16, "data.tokenizer": "bytes", "data.field": "prompt,completion"},
        **{"data.document_mask": "true", "data.packing": "best_fit", "parallel.cp": 2},
        "data.cache": tmp_path / "cache",
    }
    run_ranks(2, write_logprobs, 2, tmp_path, changes, None)
    lines = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert any("document_starts" in line for line in lines)
    found = 0
    for line in lines:
        with torch.no_grad():
            expected = their_logprobs(theirs, line)
        for value, other in zip(line["logprobs"], expected, strict=True):
            if value is not None:
                assert value == pytest.approx(other.item(), abs=2e-5)
                found += 1
    # Answers and the empty line after each, of bytes.
    assert found == 4 * (1 + 4 + 2 + 2)


def fail_to_write(rank: int, folder: Path) -> str:
    (folder / "out.jsonl.partial").mkdir(exist_ok=True)
    with pytest.raises(MegacoreError) as failed:
        write_logprobs(rank, 2, folder, {"data.tokenizer": "bytes"}, None)
    return str(failed.value)


@pytest.mark.dist
def test_a_file_that_cannot_be_written_is_an_error_on_every_rank(tmp_path: Path) -> None:
    save_theirs("llama", tmp_path / "theirs")
    (tmp_path / "held.txt").write_text("one two three " * 9)
    for message in run_ranks(2, fail_to_write, tmp_path):
        assert f"cannot write {tmp_path}/out.jsonl: " in message
