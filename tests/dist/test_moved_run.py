"""The folder of a run can be moved: it has everything but the data."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from megatrain.cli import main
from megatrain.data import load_tokenizer
from tests.support.jobs import Ended, start_function

pytestmark = pytest.mark.dist

CONFIG = """\
[model]
hidden_size = 16
num_layers = 2
num_heads = 2
seq_length = 8

[train]
steps = 2
microbatch_size = 1
global_batch_size = 2
eval_interval = 0

[data]
source = "{folder}/text.txt"
tokenizer = "{folder}/words"

[checkpoint]
interval = 1

[run]
plain = true
"""


def _run(folder: Path, *arguments: str) -> Ended:
    return start_function(lambda: main(arguments), folder).finish(timeout_s=60)


def test_a_moved_run_is_continued_generated_from_evaluated_and_exported(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    words = {word: number for number, word in enumerate(["?", "the", "fox", "dog", "and"])}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="?"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "words").mkdir()
    made.save(str(tmp_path / "words" / "tokenizer.json"))
    (tmp_path / "words" / "tokenizer_config.json").write_text('{"unk_token": "?"}')
    (tmp_path / "text.txt").write_text("the fox and the dog " * 100)
    (tmp_path / "tiny.toml").write_text(CONFIG.format(folder=tmp_path))
    old, new = tmp_path / "old", tmp_path / "elsewhere" / "new"
    first = _run(tmp_path, "train", f"{tmp_path}/tiny.toml", "--nproc=2", f"--run.dir={old}")
    assert first.code == 0, first.err
    new.parent.mkdir()
    old.rename(new)
    shutil.rmtree(tmp_path / "words")
    assert 'tokenizer = "{here}/hf_files/tokenizer.json"' in (new / "config.toml").read_text()

    written = _run(tmp_path, "generate", str(new), "--prompt", "the fox", "--max-new-tokens=3")
    assert written.code == 0, written.err
    assert written.out.startswith("the fox ")
    measured = _run(tmp_path, "eval", str(new), "--data", f"{tmp_path}/text.txt")
    assert measured.code == 0, measured.err
    exported = _run(tmp_path, "export-hf", str(new), str(tmp_path / "hf"))
    assert exported.code == 0, exported.err
    assert (tmp_path / "hf" / "tokenizer.json").is_file()

    settings = ("--nproc=2", f"--run.dir={new}", "--checkpoint.resume=auto", "--train.steps=3")
    resumed = _run(tmp_path, "train", f"{new}/config.toml", *settings)
    assert resumed.code == 0, resumed.err
    assert "resumed" in resumed.out
    assert "data.tokenizer is" not in resumed.out
    lines = (new / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [1, 2, 3]

    fresh = _run(tmp_path, "train", f"{new}/config.toml", "--nproc=2", f"--run.dir={new}")
    assert fresh.code == 0, fresh.err
    for run in (new, new / "previous-1"):
        assert load_tokenizer(str(run / "hf_files")).vocab_size == 5
