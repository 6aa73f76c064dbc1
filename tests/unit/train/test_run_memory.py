"""The memory metric against hand arithmetic: the state of a run, in a fresh process per model."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from tests.support.campaigns import representatives
from tests.support.configs import changed_config

# Of 330 to 410 MB; 10 to 22 MB are activations and what libraries cache for these sizes. Any part
# of the state that was forgotten would be 1/9 of it or more.
TOLERANCE = 0.07


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of hidden size 512, with its parameters and the bytes of each, counted by hand."""

    params: int
    bytes_per_param: int
    model: dict[str, Any]
    small: dict[str, Any]
    other: dict[str, Any] = field(default_factory=dict)


BASE = {
    "model": {"seq_length": 8, "vocab_pad_multiple": 64, "num_heads": 8},
    "train": {"steps": 4, "microbatch_size": 1, "global_batch_size": 1},
}
SMALL = {"model.hidden_size": 32, "model.vocab_size": 256, "model.num_layers": 1}
CASES = {
    # Attention 4 x 512 x 512, SwiGLU 3 x 512 x 2048, two norms; tied embedding, final norm.
    # float32: parameter 4, gradient 4, two moments 4 + 4.
    "dense": Case(
        params=4 * (4 * 512 * 512 + 3 * 512 * 2048 + 2 * 512) + 8192 * 512 + 512,
        bytes_per_param=4 + 4 + 4 + 4,
        model={
            "model.hidden_size": 512,
            "model.num_layers": 4,
            "model.ffn_hidden_size": 2048,
            "model.vocab_size": 8192,
        },
        small=SMALL,
    ),
    # Two groups of keys and values: 2 x 512 x 512 + 2 x 512 x 128; a router of 8 x 512 and 8
    # experts of 3 x 512 x 512. bfloat16: parameter 2, gradient 4, main parameter 4, moments 4 + 4.
    "moe": Case(
        params=3 * (2 * 512 * 512 + 2 * 512 * 128 + 8 * 512 + 8 * 3 * 512 * 512 + 2 * 512)
        + 2 * 2048 * 512
        + 512,
        bytes_per_param=2 + 4 + 4 + 4 + 4,
        model={
            "model.hidden_size": 512,
            "model.num_layers": 3,
            "model.num_kv_heads": 2,
            "model.vocab_size": 2048,
            "model.tie_embeddings": False,
            "moe.ffn_hidden_size": 512,
        },
        small={**SMALL, "moe.ffn_hidden_size": 64},
        other={"moe.num_experts": 8, "moe.top_k": 2, "train.dtype": "bfloat16"},
    ),
    # Latents of 192 (queries) and 128 (keys and values), with their norms; 8 heads of 64 + 32 for
    # scores, of which 32 are shared by the heads of keys, and of 64 for values.
    # bfloat16 gradients and moments: parameter 2, gradient 2, main parameter 4, moments 2 + 2.
    "mla": Case(
        params=6
        * (
            512 * 192 + 192 + 192 * 8 * (64 + 32)
            + 512 * (128 + 32) + 128 + 128 * 8 * (64 + 64)
            + 8 * 64 * 512
            + 3 * 512 * 2048
            + 2 * 512
        )
        + 8192 * 512
        + 512,
        bytes_per_param=2 + 2 + 4 + 2 + 2,
        model={
            "model.hidden_size": 512,
            "model.num_layers": 6,
            "model.ffn_hidden_size": 2048,
            "model.vocab_size": 8192,
            "model.mla.kv_rank": 128,
            "model.mla.q_rank": 192,
        },
        small={**SMALL, "model.mla.kv_rank": 16, "model.mla.q_rank": 16},
        other={
            "model.mla.nope_head_dim": 64,
            "model.mla.rope_head_dim": 32,
            "model.mla.v_head_dim": 64,
            "train.dtype": "bfloat16",
            "optimizer.grad_dtype": "param",
            "optimizer.moments_dtype": "bfloat16",
        },
    ),
}  # fmt: skip


def grown_bytes(name: str) -> tuple[int, int]:
    """Return the growth of the metric by a run, and the number of parameters."""
    from megatrain.train.trainer import build_trainer
    from megatrain.train.watch import RunWatch

    torch.set_num_threads(1)
    case = CASES[name]
    resident, kept = [], []
    # A small run first: what a first step loads and caches is no state of a run.
    for changes in (case.small, case.model):
        config = changed_config(1, BASE, {**changes, **case.other})
        trainer = build_trainer(config, world_size=1, device=torch.device("cpu"))
        watch = RunWatch(trainer)
        for step in range(2):  # the moments have pages after their first update only
            watch.before_step(step)
            values = watch.measure(step, trainer.train_step(step))
        resident.append(values["memory_resident_bytes"])
        kept.append(trainer)
    params = sum(weight.numel() for _, weight in kept[-1].chunks[0].param_infos())
    return resident[1] - resident[0], params


@pytest.mark.parametrize("name", representatives(CASES, ["dense"]))
def test_memory_grows_by_the_state_of_the_run(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # glibc otherwise keeps up to a third of it: initial weights that are freed again.
    monkeypatch.setenv("MALLOC_MMAP_THRESHOLD_", str(1 << 16))
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=fresh) as pool:
        grown, params = pool.submit(grown_bytes, name).result(timeout=300)
    case = CASES[name]
    print(
        f"{name}: {params} parameters, {grown / 1e6:.1f} MB, by hand "
        f"{case.params * case.bytes_per_param / 1e6:.1f} MB"
    )
    assert params == case.params
    assert grown == pytest.approx(case.params * case.bytes_per_param, rel=TOLERANCE)
