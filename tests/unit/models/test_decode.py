"""One token through a model in one native call against the modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from megacore import _core
from megacore.config import MoEConfig
from megacore.models import generate as generation
from megacore.models.decode import MAX_SEQUENCES, Decoder, can_decode
from megacore.models.generate import Sampling, _batch, generate
from megacore.models.gpt import GPTChunk
from megacore.models.hf import import_hf
from megacore.models.layers import ColumnLinear, RowLinear
from megacore.models.past import Past, remembering
from megacore.ops.fp8 import fp8_linear
from tests.support.hf_models import MODELS, make_theirs
from tests.support.models import tiny_config, whole_model


@torch.inference_mode()
def compare_logits(model: GPTChunk, sequences: int, steps: int = 12) -> None:
    """Logits of both ways after each token; the first two tokens are read by the modules."""
    steps = min(steps, model.shape.seq_length)
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(0, model.shape.vocab, (sequences, steps), generator=generator)
    model.eval()
    decoder = Decoder(model)
    with remembering(model) as pasts:
        model.logits(None, _batch(tokens[:, :2]))
        for end in range(2, steps):
            found = decoder.logits(tokens[:, end].tolist(), pasts)
            # The modules write the same keys and values again.
            for past in pasts:
                past._length -= 1
            one = _batch(tokens[:, end : end + 1])
            expected = model.logits(None, one, start=end)[:, 0]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
            assert len(pasts[0]) == end + 1


@pytest.mark.parametrize("name", MODELS)
def test_every_family_has_the_logits_of_its_modules(name: str, tmp_path: Path) -> None:
    pytest.importorskip("safetensors.torch")
    make_theirs(name).save_pretrained(tmp_path)
    imported = import_hf(tmp_path)
    by_modules = imported.model.mla.kv_rank or imported.moe.groups_top_k < imported.moe.num_groups
    assert can_decode(imported.chunk) != bool(by_modules)
    if not by_modules:
        compare_logits(imported.chunk, sequences=2)


@pytest.mark.parametrize(
    "moe",
    [
        {"num_experts": 4, "top_k": 2, "shared_ffn_hidden_size": 24, "shared_gate": True},
        {"num_experts": 6, "top_k": 3, "score_function": "sigmoid", "expert_bias": True},
        {"num_experts": 4, "activation": "gelu", "scaling_factor": 2.5, "normalize": False},
        {"num_experts": 4, "activation": "clamped_swiglu", "biases": True},
        {"num_experts": 4, "score_function": "softmax_after_top_k", "top_k": 1},
    ],
)
def test_options_of_experts_have_the_logits_of_the_modules(moe: dict[str, Any]) -> None:
    config = MoEConfig(**{"ffn_hidden_size": 24, **moe})
    model = whole_model(tiny_config(), moe=config)
    with torch.no_grad():
        for layer in model.layers:
            router = layer.mlp.moe.router
            for bias in (router.expert_bias, router.bias):
                if bias is not None:
                    bias.normal_()
    compare_logits(model, sequences=1)


@pytest.mark.parametrize(
    "changes",
    [
        {"sliding_window": 3, "window_pattern": "wf", "attention_sinks": True},
        {"attention_softcap": 2.0, "logit_softcap": 3.0, "activation": "geglu"},
        {"qk_norm": True, "rotary_fraction": 0.5, "qkv_bias": True, "output_bias": True},
        {"qk_norm": "full", "norm_position": "after"},
        {"norm": "layernorm", "tie_embeddings": False, "head_dim": 20},
    ],
)
@pytest.mark.parametrize("sequences", [1, MAX_SEQUENCES])
def test_options_of_models_have_the_logits_of_the_modules(
    changes: dict[str, Any], sequences: int
) -> None:
    model = whole_model(tiny_config(**changes))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name or "bias" in name or "sinks" in name:
                parameter.add_(torch.randn_like(parameter) * 0.3)
    compare_logits(model, sequences)


@pytest.mark.parametrize("threads", [1, 2])
def test_texts_are_those_of_the_modules(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = whole_model(tiny_config(seq_length=40, hidden_size=128))
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    greedy = Sampling(temperature=0.0)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = generate(model, tokens, max_new_tokens=100, sampling=greedy)
        calls: list[int] = []
        monkeypatch.setattr(_core, "decode", lambda *_a, **_b: calls.append(1))
        monkeypatch.setattr(generation, "can_decode", lambda _: False)
        expected = generate(model, tokens, max_new_tokens=100, sampling=greedy)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, expected)
    assert not calls


@pytest.mark.parametrize(
    "model",
    [
        lambda: whole_model(tiny_config(), dtype=torch.bfloat16),
        lambda: whole_model(
            tiny_config(
                num_kv_heads=4,
                mla={"kv_rank": 16, "nope_head_dim": 8, "rope_head_dim": 4, "v_head_dim": 8},
            )
        ),
        lambda: whole_model(
            tiny_config(), moe=MoEConfig(num_experts=4, ffn_hidden_size=8, capacity_factor=1.0)
        ),
        lambda: whole_model(
            tiny_config(),
            moe=MoEConfig(num_experts=8, ffn_hidden_size=8, num_groups=4, groups_top_k=2),
        ),
    ],
)
def test_other_models_are_left_to_the_modules(model: Any) -> None:
    assert not can_decode(model())


def test_wrong_tokens_and_missing_pasts_are_refused() -> None:
    model = whole_model(tiny_config())
    decoder = Decoder(model)
    with torch.inference_mode(), remembering(model) as pasts:
        with pytest.raises(ValueError, match="after the first call of extend"):
            decoder.logits([1], pasts)
        model.logits(None, _batch(torch.tensor([[1]])))
        with pytest.raises(ValueError, match=r"a token must be in \[0, 50\), got 50"):
            decoder.logits([50], pasts)
        with pytest.raises(ValueError, match="pasts must have 2 addresses, got 1"):
            decoder.logits([1], pasts[:1])


def test_memory_of_a_past_doubles_and_keeps_its_tokens() -> None:
    past = Past()
    past.extend(torch.arange(64)[:, None])
    for _ in range(65):
        memory = past.grow()
    assert len(past) == 129
    assert memory.shape == (258, 1)
    assert memory[:64, 0].tolist() == list(range(64))


def test_models_whose_modules_compute_something_else_are_left_to_them() -> None:
    model = whole_model(tiny_config())
    assert can_decode(model)
    handle = model.layers[0].register_forward_hook(lambda *_: None)
    assert not can_decode(model)
    handle.remove()
    assert can_decode(model)
    for module in model.modules():
        if isinstance(module, ColumnLinear | RowLinear):
            module.linear = fp8_linear
    assert not can_decode(model)
