"""Attention inside documents: every layout has the loss of each document alone."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from megacore.parallel.batch import Documents, Microbatch
from megatrain.data import Dataset, Sample, write_indexed
from megatrain.train.trainer import Trainer, build_trainer
from tests.dist.test_moe_invariance import make_config
from tests.support.campaigns import representatives
from tests.support.distributed import run_ranks

STEPS = 3
PP2 = {"parallel.pp": 2}
LATENT: dict[str, Any] = {
    "model.num_kv_heads": None,
    "model.mla.kv_rank": 12,
    "model.mla.q_rank": 20,
    "model.mla.nope_head_dim": 6,
    "model.mla.rope_head_dim": 4,
    "model.mla.v_head_dim": 10,
    "model.sliding_window": 5,
}
MODELS: dict[str, dict[str, Any]] = {
    "windows, two predictions further": {
        "model.sliding_window": 4,
        "model.window_pattern": "wf",
        "model.num_mtp_layers": 2,
    },
    "latent attention": LATENT,
}
# Model, ranks, layout.
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "tp2 sp": (2, {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    "cp2, recomputed": (2, {"parallel.cp": 2, "train.recompute": ["full"]}),
    "pp2, weight gradients apart": (2, {**PP2, "pipeline.schedule": "zb_v"}),
    "ep2": (2, {"parallel.ep": 2}),
    "graphs of experts": (
        2,
        {
            "graphs.mode": "partial",
            "graphs.backend": "emulated",
            "graphs.warmup_steps": 1,
        },
    ),
    "tp2 cp2": (4, {"parallel.tp": 2, "parallel.cp": 2}),
    "cp4 ring": (4, {"parallel.cp": 4, "parallel.cp_comm": "ring"}),
    "pp4": (4, {"parallel.pp": 4}),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    prefix = tmp_path_factory.mktemp("corpus") / "short"
    random = np.random.RandomState(3)
    lengths = random.randint(1, 25, size=200)
    documents = [random.randint(0, 256, size=length) for length in lengths]
    write_indexed(prefix, documents, vocab_size=256)
    return str(prefix)


def train(
    _rank: int, world_size: int, runs: list[dict[str, Any]]
) -> list[list[tuple[float, float]]]:
    results = []
    for changes in runs:
        config = make_config(world_size, {"train.microbatch_size": 4, **changes})
        trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
        steps = [trainer.train_step(step) for step in range(STEPS)]
        results.append([(step.loss, step.grad_norm) for step in steps])
    return results


def loss_of_documents_alone(trainer: Trainer) -> float:
    """Mean over the counted tokens of the first step, from one forward pass per document."""
    source = trainer._batches(trainer.data.train)
    (chunk,) = trainer.chunks
    losses, count = [], 0
    for number in range(trainer.eager.num_microbatches):
        batch = source(0, number)
        assert batch.documents is not None
        for sample, starts in enumerate(batch.documents.starts):
            for begin, end in zip(starts, [*starts[1:], batch.shape[1]], strict=True):
                part: Any = lambda x: x[sample : sample + 1, begin:end]  # noqa: B023, E731
                labels = part(batch.labels)
                if (labels < 0).all():
                    continue
                alone = Microbatch(
                    tokens=part(batch.tokens),
                    labels=labels,
                    sample_ids=batch.sample_ids[sample : sample + 1],
                    step=0,
                )
                with torch.no_grad():
                    losses.append(chunk(None, alone).item() * int((labels >= 0).sum()))
                count += int((labels >= 0).sum())
    return math.fsum(losses) / count


@pytest.mark.dist
@pytest.mark.parametrize(
    ("model", "world_size"),
    representatives(
        [(model, size) for model in MODELS for size in (2, 4)],
        [("windows, two predictions further", 2), ("windows, two predictions further", 4)],
    ),
)
def test_every_layout_has_the_loss_of_each_document_alone(
    model: str, world_size: int, corpus: str
) -> None:
    changes = {"data.source": corpus, "data.document_mask": True, **MODELS[model]}
    [single] = train(0, 1, [changes])
    config = make_config(1, {"train.microbatch_size": 4, **changes})
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    assert single[0][0] == pytest.approx(loss_of_documents_alone(trainer), rel=1e-6)
    [unmasked] = train(0, 1, [{**changes, "data.document_mask": False}])
    assert abs(unmasked[0][0] - single[0][0]) > 1e-4, "the mask must have an effect"
    layouts = {name: layout for name, (size, layout) in CASES.items() if size == world_size}
    if "model.mla.kv_rank" in changes:
        layouts.pop("cp4 ring", None)  # refused
    runs = [{**changes, **layout} for layout in layouts.values()]
    for results in run_ranks(world_size, train, world_size, runs, timeout_s=200):
        for name, result in zip(layouts, results, strict=True):
            assert result[0][0] == pytest.approx(single[0][0], rel=1e-6), name
            expected = [x for step in single for x in step]
            assert [x for step in result for x in step] == pytest.approx(expected, rel=2e-5), name


def test_documents_move_with_their_batch() -> None:
    documents = Documents.of([[0, 1]], 2)
    tokens = torch.zeros(1, 2, dtype=torch.int64)
    batch = Microbatch(tokens=tokens, labels=None, sample_ids=tokens[0, :1], step=0)
    moved = replace(batch, documents=documents).to("meta")
    assert moved.documents is not None
    assert moved.documents.positions.device.type == "meta"
    assert moved.documents.starts == ((0, 1),)


READERS: dict[str, dict[str, Any]] = {
    "windows of the stream": {},
    "best fit": {"data.packing": "best_fit"},
    "order of Megatron": {"data.order": "megatron", "data.split": "1,0"},
}


@pytest.mark.dist
def test_empty_documents_change_no_loss(tmp_path: Path) -> None:
    random = np.random.RandomState(5)
    documents = [random.randint(0, 256, size=length).tolist() for length in range(1, 40)]
    empty: list[list[int]] = [[]]
    with_empty = [*empty, *(part for one in documents for part in ([one], [one, []])[len(one) % 2])]
    with_empty += empty * 3
    write_indexed(tmp_path / "full", documents, vocab_size=256)
    write_indexed(tmp_path / "empty", with_empty, vocab_size=256)
    fixed = {"data.document_mask": True, "data.cache": str(tmp_path / "cache")}

    def runs(name: str, layout: dict[str, Any], readers: list[str]) -> list[dict[str, Any]]:
        source = {"data.source": str(tmp_path / name), "data.validation": []}
        return [{**fixed, **source, **layout, **READERS[reader]} for reader in readers]

    exact = ["windows of the stream", "best fit"]
    expected = train(0, 1, runs("full", {}, exact))
    assert train(0, 1, runs("empty", {}, exact)) == expected
    # Its shuffles count empty sequences, as Megatron's do.
    assert all(math.isfinite(loss) for loss, _ in train(0, 1, runs("empty", {}, [*READERS][2:]))[0])
    layouts = {name: CASES[name][1] for name in ("tp2 sp", "cp2, recomputed")}
    layouts["cp2 ring"] = {"parallel.cp": 2, "parallel.cp_comm": "ring"}
    split = [run for layout in layouts.values() for run in runs("empty", layout, exact)]
    for results in run_ranks(2, train, 2, split, timeout_s=200):
        for index, result in enumerate(results):
            for (loss, norm), (wanted_loss, wanted_norm) in zip(
                result, expected[index % 2], strict=True
            ):
                assert loss == pytest.approx(wanted_loss, rel=1e-5), split[index]
                assert norm == pytest.approx(wanted_norm, rel=1e-4), split[index]


# Microbatches of other sizes, each with other counts of tokens, have one mean.
SPLITS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp2": (2, {"train.microbatch_size": 2}),
    "tp2": (2, {"parallel.tp": 2, "train.microbatch_size": 1}),
    "pp2": (2, {**PP2, "train.microbatch_size": 2}),
    "cp2": (2, {"parallel.cp": 2, "train.microbatch_size": 4}),
    "pp2 dp2": (4, {**PP2, "train.microbatch_size": 2}),
    "pp4": (4, {"parallel.pp": 4, "train.microbatch_size": 1}),
}


@pytest.mark.dist
@pytest.mark.parametrize("world_size", representatives([2, 4], [2]))
def test_the_mean_is_over_the_answers_of_the_global_batch(world_size: int, tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}+{n}=" * (n % 3 + 1), "completion": str(2 * n)} for n in range(60)]
    path = tmp_path / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    changes = {
        "data.source": str(path),
        "data.field": "prompt,completion",
        "data.cache": str(tmp_path / "cache"),
        "data.packing": "best_fit",
        "data.document_mask": True,
        "moe.num_experts": 0,
        "moe.shared_ffn_hidden_size": 0,
    }
    [single] = train(0, 1, [{**changes, "train.microbatch_size": 8}])
    config = make_config(1, changes)
    trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
    counts = [(trainer.data.train.sample(number).labels >= 0).sum() for number in range(STEPS * 8)]
    assert len(set(counts)) > 3, "samples must have different numbers of answers' tokens"
    layouts = {name: layout for name, (size, layout) in SPLITS.items() if size == world_size}
    runs = [{**changes, **layout} for layout in layouts.values()]
    for results in run_ranks(world_size, train, world_size, runs, timeout_s=200):
        for name, result in zip(layouts, results, strict=True):
            expected = [x for step in single for x in step]
            assert [x for step in result for x in step] == pytest.approx(expected, rel=2e-5), name


def train_counting(
    rank: int, world_size: int, changes: dict[str, Any]
) -> tuple[list[tuple[float, float]], int]:
    """Losses and norms, and how many samples the rank has read."""
    num_read = 0
    read = Dataset.sample

    def sample(self: Dataset, number: int) -> Sample:
        nonlocal num_read
        num_read += 1
        return read(self, number)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Dataset, "sample", sample)
        [metrics] = train(rank, world_size, [changes])
    return metrics, num_read


@pytest.mark.dist
def test_the_middle_of_a_pipeline_reads_nothing(corpus: str) -> None:
    changes = {"data.source": corpus, "train.microbatch_size": 1, "moe.aux_loss_coef": 0.5}
    [single] = train(0, 1, [changes])
    results = run_ranks(4, train_counting, 4, {**changes, "parallel.pp": 4}, timeout_s=200)
    for metrics, _ in results:
        expected = [x for step in single for x in step]
        assert [x for step in metrics for x in step] == pytest.approx(expected, rel=2e-5)
    first, *middle, last = [num_read for _, num_read in results]
    assert middle == [0, 0]
    assert first == last >= 8 * STEPS
