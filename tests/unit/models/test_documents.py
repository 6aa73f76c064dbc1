"""Attention inside documents, against each document alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megacore.parallel.batch import Documents, Microbatch
from megacore.parallel.process_groups import Group
from megacore.parallel.sequence import context_positions
from megatrain.models.attention import context_parallel
from megatrain.models.attention.blockwise import ScoreRule
from megatrain.models.attention.context_parallel import Masks, attend, causal_attention
from megatrain.models.gpt import GPTChunk
from tests.support.models import random_batch, tiny_config, whole_model

STARTS = [[0, 3, 4, 11], [0], [0, 8]]

MODELS: dict[str, dict[str, Any]] = {
    "grouped queries": {},
    "window": {"sliding_window": 3},
    "soft cap and window": {"sliding_window": 4, "attention_softcap": 2.0},
    "sinks and window": {"attention_sinks": True, "sliding_window": 3},
    "latent attention": {
        "num_kv_heads": 4,
        "mla": {
            "kv_rank": 12,
            "q_rank": 20,
            "nope_head_dim": 6,
            "rope_head_dim": 4,
            "v_head_dim": 10,
        },
    },
    "two predictions further": {"num_mtp_layers": 2, "mtp_loss_coef": 0.3},
}


def masked(batch: Microbatch) -> Microbatch:
    labels = batch.labels.clone()
    for row, starts in zip(labels, STARTS, strict=True):
        row[[start - 1 for start in starts[1:]]] = -1
    documents = Documents.of(STARTS, batch.shape[1])
    return Microbatch(
        tokens=batch.tokens,
        labels=labels,
        sample_ids=batch.sample_ids,
        step=0,
        documents=documents,
    )


def alone(batch: Microbatch) -> list[Microbatch]:
    pieces = []
    for sample, starts in enumerate(STARTS):
        for begin, end in zip(starts, [*starts[1:], batch.shape[1]], strict=True):
            own = slice(sample, sample + 1)
            pieces.append(
                Microbatch(
                    tokens=batch.tokens[own, begin:end],
                    labels=batch.labels[own, begin:end],
                    sample_ids=batch.sample_ids[own],
                    step=0,
                )
            )
    return pieces


def gradients(model: GPTChunk, batches: list[Microbatch]) -> tuple[float, list[Tensor]]:
    """Sum of the losses of all labels that count, and its gradients."""
    model.zero_grad(set_to_none=True)
    total = 0.0
    for batch in batches:
        count = int((batch.labels >= 0).sum())
        if count == 0:
            continue
        scaled = Microbatch(**{**vars(batch), "loss_factor": float(count)})
        loss = model(None, scaled) * count
        loss.backward()
        total += loss.item()
    grads = [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]
    return total, grads


@pytest.mark.parametrize("recompute", [frozenset(), frozenset({"layer"}), frozenset({"attention"})])
@pytest.mark.parametrize("changes", MODELS.values(), ids=MODELS)
def test_loss_and_gradients_are_those_of_each_document_alone(
    changes: dict[str, Any], recompute: frozenset[str]
) -> None:
    config = tiny_config(**changes)
    model = whole_model(config, dtype=torch.float64, recompute=recompute)
    for table in ("cos", "sin"):
        setattr(model.tables, table, getattr(model.tables, table).double())
    batch = masked(random_batch(config))
    documents = alone(batch)
    loss, grads = gradients(model, [batch])
    expected_loss, expected = gradients(model, documents)
    assert loss == pytest.approx(expected_loss, rel=1e-12)
    torch.testing.assert_close(grads, expected, rtol=2e-6, atol=1e-6)
    plain = Microbatch(**{**vars(batch), "documents": None})
    assert abs(gradients(model, [plain])[0] - loss) > 1e-3, "the mask must have an effect"


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_borders_over_any_cp_ranks_equal_a_mask(data: st.DataObject) -> None:
    cp = data.draw(st.sampled_from([1, 2, 3]))
    sequence = 2 * cp * data.draw(st.integers(1, 4))
    borders = st.sets(st.integers(1, max(1, sequence - 1)), max_size=sequence)
    starts = [sorted({0} | {b for b in data.draw(borders) if b < sequence}) for _ in range(2)]
    rule = ScoreRule(
        window=data.draw(st.none() | st.integers(1, sequence)),
        softcap=data.draw(st.none() | st.just(1.5)),
    )
    documents = Documents.of(starts, sequence)
    generator = torch.Generator().manual_seed(1)
    q, k, v = (
        torch.randn(sequence, 2, heads, 4, generator=generator, dtype=torch.float64)
        for heads in (4, 2, 2)
    )
    sinks = torch.tensor([0.5, -1.0, 2.0, 0.0]).double() if data.draw(st.booleans()) else None
    number = (documents.positions == 0).cumsum(1)
    position = torch.arange(sequence)
    distance = position[:, None] - position
    seen = (distance >= 0) & (distance < (rule.window or sequence))
    seen = seen & (number[:, :, None] == number[:, None, :])
    scores = torch.einsum("sbnd,tbnd->bnst", q, k.repeat_interleave(2, 2)) / 2.0
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks[:, None, None].expand(2, -1, sequence, 1)), -1)
    weights = scores.softmax(-1)[..., :sequence]
    expected = torch.einsum("bnst,tbnd->sbnd", weights, v.repeat_interleave(2, 2))
    for rank in range(cp):
        own = context_positions(sequence, cp_size=cp, position=rank)
        handle: Any = object() if cp > 1 else None
        group = Group(name="cp", ranks=tuple(range(cp)), position=rank, handle=handle)
        found = attend(
            q[own],
            k,
            v,
            group=group,
            grouped=True,
            masks=Masks(),
            rule=rule,
            sinks=sinks,
            documents=documents,
        )
        torch.testing.assert_close(found, expected[own])


def test_the_kernel_of_all_pieces_gets_their_borders(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.attention import varlen

    calls = []

    def fake(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_q: Tensor,
        cu_k: Tensor,
        max_q: int,
        max_k: int,
        *,
        scale: float | None,
        window_size: tuple[int, int],
        enable_gqa: bool,
    ) -> Tensor:
        calls.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k, window_size))
        pieces = [
            causal_attention(
                q[a:b, None],
                k[c:d, None],
                v[c:d, None],
                group=Group.solo(),
                grouped=enable_gqa,
                masks=Masks(),
                rule=ScoreRule(scale=scale),
            )
            for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
        ]
        return torch.cat(pieces).squeeze(1)

    documents = Documents.of(STARTS, 16)
    q, k, v = (torch.randn(16, 3, heads, 8) for heads in (4, 2, 2))
    arguments: dict[str, Any] = {
        "group": Group.solo(),
        "grouped": True,
        "masks": Masks(),
        "rule": ScoreRule(),
        "documents": documents,
    }
    expected = attend(q, k, v, **arguments)
    monkeypatch.setattr(context_parallel, "_has_kernel", lambda *_: True)
    monkeypatch.setattr(varlen, "varlen_attn", fake)
    torch.testing.assert_close(attend(q, k, v, **arguments), expected)
    borders = [0, 3, 4, 11, 16, 32, 40, 48]
    assert calls == [(borders, borders, 16, 16, (-1, 0))]


@pytest.mark.parametrize(("queries", "keys"), [([0, 3], [0, 3]), ([1, 2], [3, 0])])
def test_a_piece_without_tokens_is_an_error(queries: list[int], keys: list[int]) -> None:
    x = torch.zeros(3, 2, 4)
    with pytest.raises(ValueError, match="pieces of documents must have at least 1 token, got"):
        context_parallel._attend_pieces(
            x,
            x,
            x,
            queries,
            keys,
            grouped=False,
            masks=Masks(),
            rule=ScoreRule(),
            sinks=None,
            whole=3,
        )
