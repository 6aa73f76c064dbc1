"""Windows and soft caps of attention, against a loop over queries."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.parallel.batch import Documents
from megacore.parallel.process_groups import Group
from megatrain.config import ModelConfig
from megatrain.models.attention.blockwise import ScoreRule
from megatrain.models.attention.context_parallel import Masks, causal_attention
from tests.support.models import params_by_name, random_batch, tiny_config, whole_model


def by_hand(q: Tensor, k: Tensor, v: Tensor, rule: ScoreRule) -> Tensor:
    """`(S, B, N, D)` from each query's own keys."""
    result = torch.empty(*q.shape[:3], v.shape[3], dtype=q.dtype)
    repeats = q.shape[2] // k.shape[2]
    for position in range(q.shape[0]):
        first = 0 if rule.window is None else max(0, position - rule.window + 1)
        for head in range(q.shape[2]):
            keys, values = (x[first : position + 1, :, head // repeats] for x in (k, v))
            scores = (q[position, None, :, head] * keys).sum(-1)
            scores = scores * (rule.scale or q.shape[3] ** -0.5)
            if rule.softcap is not None:
                scores = rule.softcap * torch.tanh(scores / rule.softcap)
            result[position, :, head] = (scores.softmax(0)[..., None] * values).sum(0)
    return result


@pytest.mark.parametrize("num_kv_heads", [1, 4])
@pytest.mark.parametrize(
    "rule",
    [
        ScoreRule(),
        ScoreRule(scale=0.7),
        ScoreRule(window=1),
        ScoreRule(window=3),
        ScoreRule(window=50),
        ScoreRule(softcap=1.5),
        ScoreRule(window=3, softcap=1.5, scale=2.0),
    ],
    ids=str,
)
def test_attention_is_that_of_each_query_and_its_keys(rule: ScoreRule, num_kv_heads: int) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [
        torch.randn(9, 2, heads, 6, generator=generator, dtype=torch.float64).requires_grad_()
        for heads in (4, num_kv_heads, num_kv_heads)
    ]
    ours = causal_attention(
        *inputs, group=Group.solo(), grouped=num_kv_heads < 4, masks=Masks(), rule=rule
    )
    expected = by_hand(*inputs, rule)
    torch.testing.assert_close(ours, expected)
    grad = torch.randn(ours.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        torch.autograd.grad(ours, inputs, grad), torch.autograd.grad(expected, inputs, grad)
    )


@pytest.mark.parametrize("length", [1, 3, 50])
@pytest.mark.parametrize("starts", [None, [[0, 4], [0]]])
def test_attention_in_chunks_is_that_of_each_chunk(
    length: int, starts: list[list[int]] | None
) -> None:
    generator = torch.Generator().manual_seed(1)
    inputs = [torch.randn(9, 2, heads, 6, generator=generator) for heads in (4, 2, 2)]
    kept: dict[str, Any] = {"group": Group.solo(), "grouped": True, "masks": Masks()}
    documents = None if starts is None else Documents.of(starts, 9)
    ours = causal_attention(*inputs, **kept, rule=ScoreRule(), documents=documents, chunk=length)
    for sample, row in enumerate(starts or [[0], [0]]):
        for begin, end in pairwise((*row, 9)):
            for first in range(begin, end, length):
                part = [x[first : min(first + length, end), sample : sample + 1] for x in inputs]
                found = ours[first : min(first + length, end), sample : sample + 1]
                torch.testing.assert_close(found, by_hand(*part, ScoreRule()))


def test_attention_in_chunks_goes_on_from_kept_keys() -> None:
    q, k, v = (torch.randn(9, 2, 4, 6) for _ in range(3))
    kept: dict[str, Any] = {"group": Group.solo(), "grouped": False, "masks": Masks()}
    whole = causal_attention(q, k, v, **kept, rule=ScoreRule(), chunk=4)
    for first in range(9):
        later = causal_attention(q[first:], k, v, **kept, rule=ScoreRule(), chunk=4)
        torch.testing.assert_close(later, whole[first:])


def test_logits_are_capped_in_the_loss_and_in_generation() -> None:
    config = tiny_config(logit_softcap=0.5)
    model, batch = whole_model(config), random_batch(config)
    logits = model.logits(None, batch)
    assert logits.abs().max() < 0.5
    expected = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())
    torch.testing.assert_close(model(None, batch), expected)
    plain = whole_model(tiny_config()).logits(None, batch)
    torch.testing.assert_close(logits, 0.5 * torch.tanh(plain / 0.5))


def test_layer_norm_has_a_bias_and_removes_the_mean() -> None:
    config = tiny_config(norm="layernorm")
    model = whole_model(config)
    params = params_by_name(model)
    assert params["layers.0.attention.norm_bias"].shape == (32,)
    x = torch.randn(3, 2, 32) + 5.0
    norm = model.layers[0].attention_norm
    with torch.no_grad():
        params["layers.0.attention.norm"].fill_(2.0)
        params["layers.0.attention.norm_bias"].fill_(1.0)
    mean, variance = x.mean(-1, keepdim=True), x.var(-1, keepdim=True, unbiased=False)
    expected = (x - mean) / (variance + config.norm_eps).sqrt() * 2.0 + 1.0
    torch.testing.assert_close(norm(x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"attention_sinks": True, "mla": {"kv_rank": 8}},
            "attention_sinks = True has no meaning with mla.kv_rank = 8",
        ),
    ],
)
def test_settings_that_do_not_combine_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ModelConfig(**fields)
