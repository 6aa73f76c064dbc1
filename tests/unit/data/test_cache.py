"""Cached folders: identity of their inputs, and a version of the rules that make them."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from megatrain.config import DataConfig, SourceConfig
from megatrain.data import load_data, write_indexed
from megatrain.data.cache import RULES, built_once, file_facts

# Version of the rules and hash of what they make of a small input.
GOLDEN = {
    "tokens": (1, "a13070c25af2c33f"),
    "samples": (1, "5a7c73dfdfb0e0a5"),
    "blend": (1, "693f91c8d4700238"),
    "packing": (1, "be594c4baf401356"),
}


def _config(folder: Path, kind: str) -> DataConfig:
    cache = str(folder / "cache")
    if kind == "tokens":
        (folder / "t.jsonl").write_text(
            "".join(
                json.dumps({"prompt": f"question {number}", "completion": f" answer {number % 7}"})
                + "\n"
                for number in range(20)
            )
        )
        path = str(folder / "t.jsonl")
        return DataConfig(source=path, field="prompt,completion", split="1,0", cache=cache)
    random = np.random.RandomState(0)
    for name in ("a", "b"):
        documents = [list(range(size)) for size in random.randint(1, 40, size=30)]
        write_indexed(folder / name, documents, vocab_size=256)
    if kind == "packing":
        path = str(folder / "a")
        return DataConfig(source=path, packing="best_fit", split="1,0", cache=cache)
    sources = [
        SourceConfig(path=str(folder / name), weight=weight)
        for name, weight in (("a", 0.6), ("b", 0.4))
    ]
    return DataConfig(sources=sources, order="megatron", split="1,0", cache=cache)


@pytest.mark.parametrize("kind", RULES)
def test_other_results_of_the_rules_need_another_version(tmp_path: Path, kind: str) -> None:
    load_data(_config(tmp_path, kind), seq_length=16, seed=1, num_samples=60)
    folders = [path for path in (tmp_path / "cache").glob(f"{kind}-*") if path.is_dir()]
    assert folders
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    contents = sorted(
        file.name.encode() + file.read_bytes() for file in files if file.suffix != ".json"
    )
    found = RULES[kind], hashlib.sha256(b"".join(contents)).hexdigest()[:16]
    assert found == GOLDEN[kind], (
        f"the rules of {kind} make other results: raise RULES[{kind!r}] in data/cache.py, "
        f"so that caches of users are made anew, and then set GOLDEN here to {found}"
    )


def test_another_version_of_the_rules_is_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    builds: list[Path] = []
    first = built_once(tmp_path, "tokens", {"file": 1}, builds.append)
    assert built_once(tmp_path, "tokens", {"file": 1}, builds.append) == first
    monkeypatch.setattr("megatrain.data.cache.RULES", {"tokens": RULES["tokens"] + 1})
    assert built_once(tmp_path, "tokens", {"file": 1}, builds.append) != first
    assert len(builds) == 2


def _replace(path: Path, content: bytes) -> None:
    """Replace a file by another one of the same size, with the time of the former."""
    before = path.stat()
    other = path.with_name("other")
    other.write_bytes(content)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    other.rename(path)


@pytest.mark.parametrize("place", [0.0, 0.5, 1.0])
def test_a_file_of_the_same_size_and_time_is_noticed(tmp_path: Path, place: float) -> None:
    path = tmp_path / "x.bin"
    content = bytearray(1_000_000)
    path.write_bytes(content)
    before = file_facts(path)
    assert file_facts(path) == before
    content[int(place * (len(content) - 1))] = 1
    _replace(path, bytes(content))
    assert path.stat().st_mtime_ns == before[2]
    assert file_facts(path) != before


@pytest.mark.parametrize("make_answer", [lambda number: number % 7, lambda number: number % 5])
def test_a_replaced_source_is_tokenized_again(
    tmp_path: Path, make_answer: Callable[[int], int]
) -> None:
    config = _config(tmp_path, "tokens")
    first = load_data(config, seq_length=16, seed=1).sources["t.jsonl"].tokens[:]
    path = tmp_path / "t.jsonl"
    lines = (
        json.dumps({"prompt": f"question {number}", "completion": f" answer {make_answer(number)}"})
        for number in range(20)
    )
    _replace(path, "".join(f"{line}\n" for line in lines).encode())
    second = load_data(config, seq_length=16, seed=1).sources["t.jsonl"].tokens[:]
    assert np.array_equal(first, second) == (make_answer(6) == 6)
