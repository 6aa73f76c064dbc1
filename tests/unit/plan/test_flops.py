"""The one formula of operations per token: by hand for published models, and against torch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from megacore.ops.gemm_cuda import PRODUCTS
from megacore.parallel import ProcessGroups
from megatrain.config import Config, resolve
from megatrain.models.attention import context_parallel
from megatrain.models.gpt import GPTChunk
from megatrain.plan.device import load_device
from megatrain.plan.spec import ModelSpec
from megatrain.plan.spec_from_config import model_spec
from tests.support.models import random_batch


def spec_of(**sections: dict[str, Any]) -> ModelSpec:
    config = resolve(Config(**sections), 1, vocab_size=256, cuda=False)
    return model_spec(config.model, config.moe)


LLAMA_8B = {
    "hidden_size": 4096,
    "num_layers": 32,
    "num_heads": 32,
    "num_kv_heads": 8,
    "ffn_hidden_size": 14336,
    "vocab_size": 128256,
    "seq_length": 8192,
    "tie_embeddings": False,
}


def test_a_dense_model_by_hand() -> None:
    """Llama-3 8B at 8,192 tokens; Megatron-LM's formula gives 51.47 GFLOP too."""
    # Per layer: q and o 2 * 4096 * 4096 = 33,554,432; k and v 2 * 4096 * 1024 = 8,388,608;
    # SwiGLU 3 * 4096 * 14336 = 176,160,768; together 218,103,808, in 32 layers 6,979,321,856.
    # Output layer: 4096 * 128256 = 525,336,576 (already a multiple of 128).
    weights = 6_979_321_856 + 525_336_576
    # Scores and sums of values: 2 * 2 operations per pair of query and key element, 32 heads of
    # 128 elements, 4,096 keys on average: 67,108,864 forward, in 32 layers 2,147,483,648.
    expected = 6 * weights + 3 * 2_147_483_648
    assert expected == 51_470_401_536
    found = spec_of(model=LLAMA_8B).flops_per_token
    assert found == expected
    # 8,000 tokens/s on an H100: 8,000 * 51.4704 GFLOP = 411.8 TFLOP/s of 989, MFU 41.6%.
    assert 8_000 * found / load_device("h100").peak_flops("bf16") == pytest.approx(0.4163, abs=1e-4)


def test_a_model_with_experts_by_hand() -> None:
    """Qwen3-30B-A3B at 4,096 tokens: 8 of 128 experts, 32 query heads on 4."""
    model = {
        "hidden_size": 2048,
        "num_layers": 48,
        "num_heads": 32,
        "num_kv_heads": 4,
        "head_dim": 128,
        "qk_norm": "head",
        "vocab_size": 151936,
        "seq_length": 4096,
        "tie_embeddings": False,
    }
    moe = {"num_experts": 128, "top_k": 8, "ffn_hidden_size": 768}
    # Per layer: q and o 2 * 2048 * 4096 = 16,777,216; k and v 2 * 2048 * 512 = 2,097,152;
    # router 2048 * 128 = 262,144; experts 8 * 3 * 2048 * 768 = 37,748,736;
    # together 56,885,248, in 48 layers 2,730,491,904.
    # Output layer: 2048 * 151936 = 311,164,928.
    weights = 2_730_491_904 + 311_164_928
    # Attention: 2 * 2 * 32 * 128 * 2048 keys = 33,554,432 forward, in 48 layers 1,610,612,736.
    expected = 6 * weights + 3 * 1_610_612_736
    assert expected == 23_081_779_200
    found = spec_of(model=model, moe=moe).flops_per_token
    assert found == expected
    # 12,000 tokens/s on an H100: 277.0 TFLOP/s of 989, MFU 28.0%.
    peak = load_device("h100").peak_flops("bf16")
    assert 12_000 * found / peak == pytest.approx(0.2801, abs=1e-4)


def test_a_model_with_latent_attention_by_hand() -> None:
    """DeepSeek-V3 at 4,096 tokens, with its layer for multi-token prediction."""
    model = {
        "hidden_size": 7168,
        "num_layers": 61,
        "num_heads": 128,
        "ffn_hidden_size": 18432,
        "vocab_size": 129280,
        "seq_length": 4096,
        "tie_embeddings": False,
        "num_mtp_layers": 1,
        "mla": {"kv_rank": 512, "q_rank": 1536},
    }
    moe = {
        "num_experts": 256,
        "top_k": 8,
        "ffn_hidden_size": 2048,
        "shared_ffn_hidden_size": 2048,
        "layer_pattern": "ddd(e)",
    }
    # Attention of a layer: q 1536 * (7168 + 128 * 192) = 48,758,784;
    # latent of k and v 7168 * (512 + 64) = 4,128,768; from it 512 * 128 * (128 + 128) = 16,777,216;
    # output 128 * 128 * 7168 = 117,440,512; together 187,105,280, in 62 layers 11,600,527,360.
    attention = 11_600_527_360
    # Three dense layers: 3 * 3 * 7168 * 18432 = 1,189,085,184.
    # 59 layers with 8 + 1 experts: 59 * (9 * 3 * 7168 * 2048 + 256 * 7168) = 23,493,607,424.
    others = 1_189_085_184 + 23_493_607_424
    # Two output layers 2 * 129280 * 7168 = 1,853,358,080; projection of MTP 2 * 7168^2 =
    # 102,760,448.
    heads = 1_853_358_080 + 102_760_448
    # Scores 2 * 128 * 192 and values 2 * 128 * 128, times 2,048 keys: 167,772,160 forward, in 62
    # layers 10,401,873,920.
    expected = 6 * (attention + others + heads) + 3 * 10_401_873_920
    assert expected == 260_641_652_736
    found = spec_of(model=model, moe=moe).flops_per_token
    assert found == expected
    # 1,600 tokens/s on an H100 in bf16: 417.0 TFLOP/s of 989, MFU 42.2%; half of it of fp8's peak.
    h100 = load_device("h100")
    assert 1_600 * found / h100.peak_flops("bf16") == pytest.approx(0.4217, abs=1e-4)
    assert 1_600 * found / h100.peak_flops("fp8") == pytest.approx(0.2107, abs=1e-4)


TINY = {
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_hidden_size": 48,
    "vocab_size": 64,
    "vocab_pad_multiple": 64,
    "seq_length": 16,
}
LATENT = {"kv_rank": 8, "q_rank": 12, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 6}
EXPERTS = {"num_experts": 4, "top_k": 2, "ffn_hidden_size": 24}


def _grouped(rows: torch.Size, weight: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * rows[0] * weight[-1] * weight[-2]


def _product(
    a: torch.Size, b: torch.Size, _: torch.Size, product: int, *__: Any, **___: Any
) -> int:
    return 2 * a[0] * a[1] * b[1] if product == PRODUCTS["weight_grad"] else _grouped(a, b)


GROUPED: dict[Any, Any] = {
    torch.ops.megacore.grouped_gemm: _grouped,
    torch.ops.megacore.grouped_product: _product,
}


@pytest.mark.parametrize(
    ("model", "moe"),
    [
        ({}, {}),
        ({"tie_embeddings": False, "head_dim": 10}, {}),
        ({"num_kv_heads": 4, "mla": LATENT}, {}),
        ({"num_mtp_layers": 1}, {}),
        ({}, EXPERTS),
        ({"num_mtp_layers": 1}, EXPERTS | {"shared_ffn_hidden_size": 16, "shared_gate": True}),
        ({}, EXPERTS | {"activation": "gelu", "layer_pattern": "d(e)"}),
    ],
)
def test_torch_counts_the_same(
    model: dict[str, Any], moe: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every product of a training step, with attention in full, of which the formula has half."""
    monkeypatch.setattr(context_parallel, "_is_by_tiles", lambda *_: False)
    config = resolve(Config(model=TINY | model, moe=moe), 1, vocab_size=64, cuda=False)
    chunk = GPTChunk(
        config.model,
        layers=range(config.model.num_layers),
        mtp_layers=config.model.mtp_layers,
        has_embedding=True,
        has_head=True,
        groups=ProcessGroups.single(),
        moe=config.moe,
    )
    batch = random_batch(config.model)
    counter = FlopCounterMode(display=False, custom_mapping=GROUPED)
    with counter, sdpa_kernel(SDPBackend.MATH):  # torch does not count the CPU's other kernel
        chunk(None, batch).backward()
    spec = model_spec(config.model, config.moe)
    attention = spec.recomputed_flops_per_token({"attention"})
    tokens = batch.tokens.numel()
    assert counter.get_total_flops() == tokens * (spec.flops_per_token + 3 * attention)


@given(
    seq=st.integers(1, 60), windows=st.lists(st.integers(0, 70), min_size=1, max_size=4).map(tuple)
)
def test_windows_count_the_keys_in_reach(seq: int, windows: tuple[int, ...]) -> None:
    spec = ModelSpec(
        num_layers=4,
        hidden_size=8,
        ffn_hidden_size=8,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        padded_vocab_size=8,
        seq_length=seq,
        moe_layers=(False,) * 4,
        windows=windows,
    )
    reach = [windows[layer % len(windows)] or seq for layer in range(4)]
    # The token itself counts half, as in seq / 2.
    pairs = sum(min(query + 1, width) - 0.5 for width in reach for query in range(seq))
    assert spec.mean_keys == pytest.approx(pairs / (4 * seq), abs=0.5)
    full = [width >= seq for width in reach]
    if all(full):
        assert spec.mean_keys == seq / 2


@given(seq=st.integers(1, 60), chunk=st.integers(1, 70))
def test_chunks_count_the_keys_in_them(seq: int, chunk: int) -> None:
    spec = replace(spec_of(model=LLAMA_8B), seq_length=seq, windows=(chunk,), has_chunks=True)
    pairs = sum(query % chunk + 0.5 for query in range(seq))
    assert spec.mean_keys == pytest.approx(pairs / seq)


def test_recomputed_operations_are_those_of_the_parts() -> None:
    spec = spec_of(model=LLAMA_8B)
    head = 525_336_576
    everything = spec.recomputed_flops_per_token({"layer"})
    assert everything == spec.flops_per_token / 3 - 2 * head
    assert spec.recomputed_flops_per_token({"attention"}) == 2_147_483_648
    assert spec.recomputed_flops_per_token({"mlp", "norm"}) == 2 * 32 * 176_160_768
    assert spec.recomputed_flops_per_token({"norm", "activation"}) == 0
