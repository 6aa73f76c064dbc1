"""Samples of megatron-core's ``GPTDataset`` and ``BlendedDataset``, for ``tests/golden``.

The golden file is made with a wheel of megatron-core, which needs no GPU for this:

    pip download --no-deps --python-version 3.12 --only-binary :all: megatron-core==0.19.2
    unzip megatron_core-*.whl -d FOLDER      # and compile datasets/helpers.cpp for this Python
    python -m tests.support.megatron_samples FOLDER > tests/golden/megatron_samples.json
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys
import tempfile
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatrain.data import write_indexed

VOCAB = 1000
# Per case: source files with weights, split, seed, sequence length and sizes of the splits.
CASES: tuple[Mapping[str, Any], ...] = (
    {"paths": ["a"], "split": "1,0,0", "seed": 1, "length": 8, "sizes": [5, 0, 0]},
    {"paths": ["a"], "split": "90,10,0", "seed": 1234, "length": 16, "sizes": [40, 4, 0]},
    {"paths": ["a"], "split": "960,30,10", "seed": 7, "length": 8, "sizes": [500, 3, 0]},
    {"paths": ["b"], "split": "80,20", "seed": 3, "length": 5, "sizes": [1500, 20, 0]},
    {"paths": ["c"], "split": "1,1,1", "seed": 0, "length": 32, "sizes": [64, 64, 0]},
    {"paths": ["d"], "split": "70,30", "seed": 99, "length": 64, "sizes": [30, 9, 0]},
    {"paths": ["b"], "weights": [1.0], "split": "1,0", "seed": 5, "length": 8, "sizes": [64, 0, 0]},
    {
        "paths": ["a", "b", "c"],
        "weights": [0.7, 0.2, 0.1],
        "split": "90,10,0",
        "seed": 1234,
        "length": 16,
        "sizes": [300, 24, 0],
    },
    {
        "paths": ["a", "d"],
        "weights": [30, 70],
        "split": "95,5,0",
        "seed": 42,
        "length": 8,
        "sizes": [1000, 10, 0],
    },
    {
        "paths": ["c", "b"],
        "weights": [0.5, 0.25],
        "split": "60,30,10",
        "seed": 2,
        "length": 7,
        "sizes": [777, 33, 0],
    },
    {"paths": ["a", "b"], "split": "90,10", "seed": 11, "length": 8, "sizes": [50, 6, 0]},
    {
        "paths": ["a", "b", "c", "d"],
        "split": "80,20",
        "seed": 8,
        "length": 9,
        "sizes": [9999, 7, 0],
    },
    {
        "paths": ["d", "c", "b", "a"],
        "weights": [0.1, 0.2, 0.3, 0.4],
        "split": "1,1",
        "seed": 31337,
        "length": 12,
        "sizes": [2048, 128, 0],
    },
    {
        "paths": ["a", "c"],
        "weights": [2.0, 1.0],
        "validation": ["b", "d"],
        "seed": 17,
        "length": 10,
        "sizes": [256, 40, 0],
    },
)


def write_corpora(folder: Path) -> None:
    """Write the token files ``a`` to ``d``: many short, few long, one-token, and wide documents."""
    random = np.random.RandomState(2026)
    sizes = {
        "a": random.randint(1, 40, 200),
        "b": random.randint(1, 6, 500),
        "c": random.randint(100, 400, 12),
        "d": np.concatenate(([1, 1, 3000], random.randint(2, 90, 57))),
    }
    for name, lengths in sizes.items():
        documents = [random.randint(0, VOCAB, size) for size in lengths]
        vocab = 70_000 if name == "d" else VOCAB
        write_indexed(folder / name, documents, vocab_size=vocab)


def digest(rows: Iterator[NDArray[np.int64]]) -> dict[str, Any]:
    """Return the number of samples, a hash of all and the first tokens of some."""
    found = np.stack(list(rows)).astype("<i8")
    return {
        "num": len(found),
        "sha256": hashlib.sha256(found.tobytes()).hexdigest(),
        "first": found[:3, :6].tolist(),
    }


def _make(wheel: str) -> list[dict[str, Any]]:
    sys.path.insert(0, wheel)
    # megatron/core/__init__.py imports kernels that need a GPU.
    for name in ("megatron", "megatron.core"):
        module = types.ModuleType(name)
        module.__path__ = [str(Path(wheel, *name.split(".")))]
        sys.modules[name] = module
    importlib.import_module("megatron.core.parallel_state")  # before utils, which it needs
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig

    results = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_corpora(folder)
        for case in CASES:
            paths = [str(folder / name) for name in case["paths"]]
            blend = (paths, case.get("weights"))
            where: dict[str, Any] = {"blend": blend, "split": case.get("split")}
            if "validation" in case:
                held_out = ([str(folder / name) for name in case["validation"]], None)
                where = {
                    "blend_per_split": [blend, held_out, None],
                    "multiple_validation_sets": True,
                    "full_validation": False,
                }
            config = GPTDatasetConfig(
                random_seed=case["seed"],
                sequence_length=case["length"],
                path_to_cache=str(folder / "cache"),
                tokenizer=types.SimpleNamespace(
                    vocab_size=VOCAB, eod=0, pad=-5, unique_identifiers={}
                ),
                reset_position_ids=False,
                reset_attention_mask=False,
                eod_mask_loss=False,
                create_attention_mask=False,
                **where,
            )
            built = BlendedMegatronDatasetBuilder(
                GPTDataset, case["sizes"], lambda: True, config
            ).build()
            sets: dict[str, Any] = {"train": built[0]}
            valid = built[1]
            if isinstance(valid, list):
                sets |= dict(zip(case["validation"], valid, strict=True))
            elif valid is not None:
                sets["validation"] = valid
            results.append({name: digest(_rows(found)) for name, found in sets.items()})
    return results


def _rows(dataset: Any) -> Iterator[NDArray[np.int64]]:
    for number in range(len(dataset)):
        item = dataset[number]
        yield np.concatenate((item["tokens"].numpy(), item["labels"].numpy()[-1:]))


if __name__ == "__main__":
    lines = ",\n".join(json.dumps(case) for case in _make(sys.argv[1]))
    print(f"[\n{lines}\n]")
