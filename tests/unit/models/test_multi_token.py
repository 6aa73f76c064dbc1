from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from megacore.parallel import ProcessGroups
from megacore.parallel.batch import Microbatch
from megatrain.config import ModelConfig, MoEConfig
from megatrain.generation.decoding import Sampling, generate
from megatrain.models.gpt import GPTChunk
from megatrain.models.size import count_parameters
from tests.support.models import (
    params_by_name,
    plain_layer,
    plain_norm,
    random_batch,
    tiny_config,
    whole_model,
)

DEPTHS = 2


def config(**changes: object) -> ModelConfig:
    fields = {"num_mtp_layers": DEPTHS, "mtp_loss_coef": 0.3, "seq_length": 8}
    return tiny_config(**{**fields, **changes})


def plain_losses(config: ModelConfig, params: dict[str, Tensor], batch: Microbatch) -> list[Tensor]:
    """Sums of the losses of all predicted tokens: of the next one, then of each depth.

    Token by token, from whole sequences that are one token longer than the input.
    """
    text = torch.cat((batch.tokens, batch.labels[:, -1:]), dim=1)
    head = params["embedding" if config.tie_embeddings else "head"][: config.vocab_size]
    x = params["embedding"][batch.tokens]
    for layer in range(config.num_layers):
        x = plain_layer(config, params, layer, x)
    x = plain_norm(x, params["final_norm"], config.norm_eps)
    length, losses = batch.shape[1], []
    for depth in range(config.num_mtp_layers + 1):
        if depth > 0:
            layer = config.num_layers + depth - 1
            name = f"layers.{layer}.mtp"
            # Only positions that have something to predict; causal attention never misses others.
            hidden = plain_norm(
                x[:, : length - depth], params[f"{name}.hidden_norm"], config.norm_eps
            )
            tokens = plain_norm(
                params["embedding"][text[:, depth:length]],
                params[f"{name}.embedding_norm"],
                config.norm_eps,
            )
            x = torch.cat((hidden, tokens), dim=-1) @ params[f"{name}.projection"].T
            x = plain_layer(config, params, layer, x)
            x = plain_norm(x, params[f"{name}.final_norm"], config.norm_eps)
        logits, labels = x @ head.T, text[:, depth + 1 :]
        losses.append(cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"))
    return losses


@pytest.mark.parametrize("tie", [True, False])
def test_losses_and_gradients_are_those_of_the_paper(tie: bool) -> None:
    model_config = config(tie_embeddings=tie)
    model = whole_model(model_config, dtype=torch.float64)
    batch = random_batch(model_config)
    weights = params_by_name(model)
    plain = {name: weight.detach().clone().requires_grad_() for name, weight in weights.items()}
    main, *further = plain_losses(model_config, plain, batch)
    num_tokens = batch.tokens.numel()
    (main / num_tokens + 0.3 / DEPTHS * sum(further) / num_tokens).backward()
    loss = model(None, batch)
    loss.backward()
    assert loss.item() == pytest.approx(main.item() / num_tokens, rel=1e-6)
    for depth, sums in enumerate(further):
        num_predicted = batch.shape[0] * (batch.shape[1] - depth - 1)
        assert model.mtp_sums[:, depth].tolist() == pytest.approx([sums.item(), num_predicted])
    for name, weight in weights.items():
        error = (weight.grad - plain[name].grad).norm() / plain[name].grad.norm()
        assert error < 1e-6, name


def test_they_get_the_factor_of_the_loss() -> None:
    model = whole_model(config())
    batch = random_batch(config())
    grads = []
    for factor in (1.0, torch.tensor(0.25)):
        model.zero_grad()
        (model(None, replace(batch, loss_factor=factor)) * factor).backward()
        grads.append(params_by_name(model)["layers.3.mtp.projection"].grad.clone())
    torch.testing.assert_close(grads[1], grads[0] * 0.25)


def test_masked_labels_do_not_count_in_any_depth() -> None:
    model, batch = whole_model(config()), random_batch(config())
    labels = batch.labels.clone()
    labels[0, 3:] = -1
    model(None, replace(batch, labels=labels))
    assert model.mtp_sums[1].tolist() == [2 * 7 + 2, 2 * 6 + 1]


def test_a_sequence_shorter_than_the_depth_has_nothing_to_predict() -> None:
    model, batch = whole_model(config()), random_batch(config(), sequence=1)
    loss = model(None, batch)
    loss.backward()
    assert torch.isfinite(loss)
    assert model.mtp_sums[1].tolist() == [0, 0]


def test_evaluation_and_generation_leave_them_out() -> None:
    batch = random_batch(config())
    model, without = whole_model(config()), whole_model(config(num_mtp_layers=0))
    model.eval()
    assert torch.equal(model(None, batch), without(None, batch))
    assert model.mtp_sums.sum() == 0
    prompt = batch.tokens[:, :3]
    texts = [
        generate(m, prompt, max_new_tokens=3, sampling=Sampling(temperature=0.0))
        for m in (model, without)
    ]
    assert torch.equal(*texts)


def test_no_weight_of_the_model_changes() -> None:
    weights = params_by_name(whole_model(config()))
    for name, weight in params_by_name(whole_model(config(num_mtp_layers=0))).items():
        assert torch.equal(weights[name], weight), name


def test_chunks_compute_what_the_whole_model_does() -> None:
    """Layers for multi-token prediction on a stage of their own, and an empty stage behind it."""
    model_config, batch = config(dropout=0.1), random_batch(config())
    expected = whole_model(model_config)
    expected(None, batch).backward()
    common = {"groups": ProcessGroups.single(), "has_embedding": False, "has_head": False}
    none = range(0)
    first = GPTChunk(model_config, layers=range(2), **{**common, "has_embedding": True})
    weight = first.embedding_weight
    chunks = [
        first,
        GPTChunk(
            model_config,
            layers=none,
            mtp_layers=model_config.mtp_layers,
            tied_weight=weight,
            **common,
        ),
        GPTChunk(model_config, layers=none, **common),
        GPTChunk(
            model_config,
            layers=none,
            mtp_layers=none,
            tied_weight=weight,
            **{**common, "has_head": True},
        ),
    ]
    hidden = None
    for chunk in chunks:
        hidden = chunk(hidden, batch)
    hidden.backward()
    assert torch.equal(hidden, expected(None, batch))
    for name, weight in params_by_name(expected).items():
        torch.testing.assert_close(params_by_name(*chunks)[name].grad, weight.grad)


def test_copies_of_the_embedding_are_known_as_such() -> None:
    def shared(**changes: object) -> list[tuple[str, str | None, bool]]:
        arguments = {
            "layers": range(0),
            "groups": ProcessGroups.single(),
            "has_embedding": False,
            "has_head": False,
        }
        chunk = GPTChunk(config(tie_embeddings=False), **{**arguments, **changes})
        return [
            (info.name, info.shared, info.is_shared_copy)
            for info, _ in chunk.param_infos()
            if info.name in ("embedding", "head")
        ]

    assert shared(has_embedding=True) == [("embedding", "embedding", False)]
    further = {"mtp_layers": config().mtp_layers}
    assert shared(**further) == [("embedding", "embedding", True)]
    assert shared(has_head=True, **further) == [
        ("embedding", "embedding", True),
        ("head", None, False),
    ]
    assert shared(has_head=True, mtp_layers=range(0)) == [("head", None, False)]


def test_their_size_is_counted() -> None:
    moe = MoEConfig(num_experts=4, top_k=2, ffn_hidden_size=16, layer_pattern="de")
    for section in (None, moe):
        model = whole_model(config(), moe=section)
        count = count_parameters(config(), section)
        assert count.total == sum(weight.numel() for weight in params_by_name(model).values())
