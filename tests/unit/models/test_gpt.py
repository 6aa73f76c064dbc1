from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import ConfigError
from megacore.parallel.process_groups import ProcessGroups
from megatrain.models.gpt import GPTChunk
from megatrain.models.shape import GPTShape
from tests.support.models import (
    params_by_name,
    plain_logits,
    plain_loss,
    random_batch,
    tiny_config,
    whole_model,
)


def chunk(config: Any, layers: range, **changes: Any) -> GPTChunk:
    arguments = {"has_embedding": False, "has_head": False, **changes}
    return GPTChunk(config, layers=layers, groups=ProcessGroups.single(), **arguments)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
def test_loss_and_gradients_equal_a_plain_gpt(num_kv_heads: int, tied: bool) -> None:
    config = tiny_config(num_kv_heads=num_kv_heads, tie_embeddings=tied)
    model = whole_model(config, dtype=torch.float64)
    model.to(torch.float64)  # The rotary tables too, for an exact comparison.
    params = params_by_name(model)
    batch = random_batch(config)
    ours, theirs = model(None, batch), plain_loss(config, params, batch)
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    gradients = torch.autograd.grad(ours, list(params.values()))
    expected = torch.autograd.grad(theirs, list(params.values()))
    for name, gradient, wanted in zip(params, gradients, expected, strict=True):
        torch.testing.assert_close(
            gradient, wanted, rtol=1e-5, atol=1e-7, msg=lambda text, name=name: f"{name}: {text}"
        )


@pytest.mark.parametrize("tied", [True, False])
def test_the_padding_row_gets_no_gradient_from_the_embedding(tied: bool) -> None:
    config = tiny_config(tie_embeddings=tied)
    batch = random_batch(config)
    token = int(batch.tokens[0, 3])
    grads = []
    for padding in (None, token):
        model = whole_model(config.model_copy(update={"padding_idx": padding}))
        model(None, batch).backward()
        grads.append({name: param.grad for name, param in params_by_name(model).items()})
    for name, (plain, padded) in {key: (grads[0][key], grads[1][key]) for key in grads[0]}.items():
        others = torch.arange(len(plain)) != (token if name == "embedding" else -1)
        assert torch.equal(plain[others], padded[others]), name
    # With a tied head, the row keeps the head's gradient.
    row = grads[1]["embedding"][token]
    assert not torch.equal(row, grads[0]["embedding"][token])
    assert row.any() == tied
    with pytest.raises(ConfigError, match=r"padding_idx must be .* below .* got 50; nearest: 49"):
        GPTShape.from_config(config.model_copy(update={"padding_idx": 50}))


def test_logits_equal_a_plain_gpt_without_padding() -> None:
    config = tiny_config()
    model, batch = whole_model(config), random_batch(config, sequence=11)
    expected = plain_logits(config, params_by_name(model), batch.tokens)[..., :50]
    logits = model.logits(None, replace(batch, labels=None))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    last = model.logits(None, batch, last_only=True)
    torch.testing.assert_close(last, logits[:, -1:], rtol=1e-5, atol=1e-5)


def test_a_token_sees_only_itself_and_earlier_ones() -> None:
    config = tiny_config()
    model, batch = whole_model(config), random_batch(config)
    changed = batch.tokens.clone()
    changed[:, 9] = (changed[:, 9] + 1) % config.vocab_size
    before, after = (model.logits(None, replace(batch, tokens=t)) for t in (batch.tokens, changed))
    assert torch.equal(before[:, :9], after[:, :9])
    assert not torch.isclose(before[:, 9:], after[:, 9:]).all(-1).any()


def test_the_loss_at_initialisation_is_near_that_of_a_uniform_guess() -> None:
    config = tiny_config(init_std=0.02, hidden_size=64, vocab_size=300)
    loss = whole_model(config)(None, random_batch(config, batch=8))
    assert loss.item() == pytest.approx(math.log(300), abs=0.05)
    assert loss.dtype == torch.float32
    assert loss.shape == ()


def run_chain(chunks: list[GPTChunk], batch: Any) -> tuple[Tensor, dict[str, Tensor]]:
    hidden = None
    for part in chunks:
        hidden = part(hidden, batch)
    hidden.backward()
    gradients: dict[str, Tensor] = {}
    for part in chunks:
        for info, parameter in part.param_infos():
            total = gradients.get(info.name)
            gradients[info.name] = parameter.grad if total is None else total + parameter.grad
    return hidden.detach(), gradients


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.2])
@pytest.mark.parametrize("cuts", [(1,), (0, 2), (0, 1, 1, 3)])
def test_chunks_in_a_row_equal_the_whole_model_exactly(
    cuts: tuple[int, ...], dropout: float, tied: bool
) -> None:
    config = tiny_config(num_layers=3, dropout=dropout, tie_embeddings=tied)
    bounds = [0, *cuts, 3]
    chunks = [
        chunk(
            config,
            range(bounds[i], bounds[i + 1]),
            has_embedding=i == 0,
            has_head=i == len(cuts),
        )
        for i in range(len(cuts) + 1)
    ]
    batch = random_batch(config, step=3)
    loss, gradients = run_chain(chunks, batch)
    whole_loss, whole_gradients = run_chain([whole_model(config)], batch)
    assert torch.equal(loss, whole_loss)
    assert gradients.keys() == whole_gradients.keys()
    for name, gradient in gradients.items():
        assert torch.equal(gradient, whole_gradients[name]), name


def test_padding_changes_neither_loss_nor_gradients() -> None:
    config = tiny_config(vocab_pad_multiple=1)
    batch = random_batch(config)
    loss, gradients = run_chain([whole_model(config)], batch)
    padded_config = tiny_config(vocab_pad_multiple=64)
    padded_loss, padded = run_chain([whole_model(padded_config)], batch)
    assert torch.equal(loss, padded_loss)
    for name, gradient in gradients.items():
        assert torch.equal(padded[name][: gradient.shape[0]], gradient), name
    assert (padded["embedding"][50:] == 0).all()


def test_samples_of_a_batch_do_not_meet() -> None:
    config = tiny_config(dropout=0.1)
    model, batch = whole_model(config), random_batch(config, batch=3)
    alone = [
        model(
            None,
            replace(
                batch,
                tokens=batch.tokens[i : i + 1],
                labels=batch.labels[i : i + 1],
                sample_ids=batch.sample_ids[i : i + 1],
            ),
        )
        for i in range(3)
    ]
    torch.testing.assert_close(model(None, batch), torch.stack(alone).mean())


def test_tied_embeddings_are_one_parameter_or_a_marked_copy() -> None:
    config = tiny_config()
    whole = whole_model(config)
    assert [info.shared for info, _ in whole.param_infos() if info.name == "embedding"] == [None]
    assert whole.head.weight is whole.embedding.words.weight
    first = chunk(config, range(1), has_embedding=True)
    last = chunk(config, range(1, 2), has_head=True)
    (info,) = [info for info, _ in first.param_infos() if info.shared]
    (copy,) = [info for info, _ in last.param_infos() if info.shared]
    assert info.shared == copy.shared == "embedding"
    assert (info.is_shared_copy, copy.is_shared_copy) == (False, True)
    assert torch.equal(params_by_name(first)["embedding"], params_by_name(last)["embedding"])
    assert "head" not in params_by_name(whole)


def test_a_head_can_use_the_embedding_of_another_chunk_on_its_rank() -> None:
    config = tiny_config()
    first = chunk(config, range(1), has_embedding=True)
    weight = params_by_name(first)["embedding"]
    last = chunk(config, range(1, 2), has_head=True, tied_weight=weight)
    batch = random_batch(config)
    loss, gradients = run_chain([first, last], batch)
    whole_loss, expected = run_chain([whole_model(config)], batch)
    assert torch.equal(loss, whole_loss)
    assert "embedding" not in params_by_name(last)
    assert torch.equal(gradients["embedding"], expected["embedding"])


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_parameters_say_how_they_are_split_and_treated(sequence_parallel: bool) -> None:
    config = tiny_config(tie_embeddings=False)
    infos = {
        info.name: info
        for info, _ in whole_model(config, sequence_parallel=sequence_parallel).param_infos()
    }
    assert {name: (info.full_shape, info.tp_dim) for name, info in infos.items()} == {
        "embedding": ((64, 32), 0),
        **{
            f"layers.{i}.{name}": layout
            for i in range(2)
            for name, layout in {
                "attention.norm": ((32,), None),
                "attention.qkv": ((2, 32, 32), 0),
                "attention.output": ((32, 32), 1),
                "mlp.norm": ((32,), None),
                "mlp.gate_up": ((2, 48, 32), 1),
                "mlp.down": ((32, 48), 1),
            }.items()
        },
        "final_norm": ((32,), None),
        "head": ((64, 32), 0),
    }
    norms = {name for name in infos if name.endswith("norm")}
    assert {name for name, info in infos.items() if not info.weight_decay} == norms
    replicated = norms if sequence_parallel else set()
    assert {name for name, info in infos.items() if info.sequence_parallel} == replicated


def test_bfloat16_follows_float32() -> None:
    config = tiny_config(init_std=0.02)
    batch = random_batch(config)
    model = whole_model(config, dtype=torch.bfloat16)
    loss = model(None, batch)
    loss.backward()
    wide = whole_model(config)(None, batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(wide.item(), rel=2e-3)
    grads = [parameter.grad for _, parameter in model.param_infos()]
    assert all(g is not None and g.dtype == torch.bfloat16 and g.isfinite().all() for g in grads)


def test_a_few_steps_of_training_learn_one_batch_by_heart() -> None:
    config = tiny_config(init_std=0.02, dropout=0.0)
    model, batch = whole_model(config), random_batch(config)
    optimizer = torch.optim.AdamW([p for _, p in model.param_infos()], lr=1e-2)
    for _ in range(60):
        loss = model(None, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1


def test_inputs_that_do_not_belong_to_the_chunk_are_refused() -> None:
    config = tiny_config()
    batch = random_batch(config)
    hidden = torch.zeros(16, 3, 32)
    with pytest.raises(ValueError, match="takes tokens only"):
        whole_model(config)(hidden, batch)
    with pytest.raises(ValueError, match="output of the chunk before"):
        chunk(config, range(1))(None, batch)
    with pytest.raises(ValueError, match="no labels"):
        whole_model(config)(None, replace(batch, labels=None))
    with pytest.raises(ValueError, match="only the chunk with the head"):
        chunk(config, range(1)).logits(hidden, batch)
    with pytest.raises(ValueError, match=r"17 tokens .* seq_length = 16"):
        whole_model(config)(None, random_batch(config, sequence=17))


def test_a_tensor_parallel_size_that_does_not_divide_names_every_size_and_the_nearest() -> None:
    shape = GPTShape.from_config(tiny_config())
    shape.check_layout(tp=2, sequence_parallel=True)
    with pytest.raises(ConfigError) as caught:
        shape.check_layout(tp=3, sequence_parallel=True)
    message = str(caught.value)
    assert "parallel.tp = 3" in message
    assert "model.num_heads = 4 (nearest tp: 2 or 4)" in message
    assert "model.num_kv_heads = 2 (nearest tp: 2)" in message
    assert "the padded vocabulary = 64 (nearest tp: 2 or 4)" in message
    assert "model.seq_length = 16" in message
    assert "ffn" not in message  # 3 divides 48
    with pytest.raises(ConfigError) as caught:
        shape.check_layout(tp=3, sequence_parallel=False)
    assert "seq_length" not in str(caught.value)
