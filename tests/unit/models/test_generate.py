from __future__ import annotations

from typing import Any

import pytest
import torch

from megacore.models.generate import _divided, generate, nucleus
from megacore.parallel.process_groups import ProcessGroups
from tests.support.models import params_by_name, plain_logits, tiny_config, whole_model

CONFIG = tiny_config(seq_length=8)


def test_greedy_tokens_are_the_most_likely_ones_of_a_sliding_window() -> None:
    model = whole_model(CONFIG)
    tokens = torch.tensor([[1, 2, 3], [4, 5, 6]])
    result = generate(model, tokens, max_new_tokens=9, temperature=0.0)
    assert result.shape == (2, 12)
    assert torch.equal(result[:, :3], tokens)
    for end in range(3, 12):
        logits = plain_logits(CONFIG, params_by_name(model), result[:, max(0, end - 8) : end])
        assert torch.equal(result[:, end], logits[:, -1, :50].argmax(-1))


def test_draws_follow_the_seed_and_the_row_only() -> None:
    model = whole_model(tiny_config(init_std=0.05))
    tokens = torch.tensor([[1, 2, 3], [1, 2, 3]])
    first = generate(model, tokens, max_new_tokens=10, seed=5)
    assert torch.equal(first, generate(model, tokens, max_new_tokens=10, seed=5))
    assert torch.equal(first[:1], generate(model, tokens[:1], max_new_tokens=10, seed=5))
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(first, generate(model, tokens, max_new_tokens=10, seed=9))
    assert first.max() < 50  # never a padding token


def test_a_low_temperature_approaches_the_greedy_choice() -> None:
    model, tokens = whole_model(CONFIG), torch.tensor([[1, 2, 3]])
    greedy = generate(model, tokens, max_new_tokens=6, temperature=0.0)
    assert torch.equal(generate(model, tokens, max_new_tokens=6, temperature=1e-4), greedy)
    assert torch.equal(generate(model, tokens, max_new_tokens=6, top_p=1e-6), greedy)


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-310])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_the_lowest_temperatures_take_the_greedy_choice(temperature: float, top_p: float) -> None:
    model, tokens = whole_model(CONFIG), torch.tensor([[1, 2, 3], [4, 5, 6]])
    greedy = generate(model, tokens, max_new_tokens=6, temperature=0.0)
    drawn = generate(model, tokens, max_new_tokens=6, temperature=temperature, top_p=top_p)
    assert torch.equal(drawn, greedy)


def test_only_rows_that_overflow_are_shifted() -> None:
    logits_BV = torch.tensor([[1.0, 3.0, 3.0], [1e-20, 0.0, -2e-20], [-5.0, -7.0, -9.0]])
    divided_BV = _divided(logits_BV, 1e-38)
    assert divided_BV.softmax(-1)[0].tolist() == [0.0, 0.5, 0.5]
    assert torch.equal(divided_BV[1], logits_BV[1] / 1e-38)
    assert divided_BV.softmax(-1)[2].tolist() == [1.0, 0.0, 0.0]
    assert torch.equal(_divided(logits_BV, 0.7), logits_BV / 0.7)


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.5, [1]), (0.51, [1, 2]), (0.75, [1, 2]), (0.8, [0, 1, 2]), (1.0, range(4))],
)
def test_the_nucleus_is_the_smallest_set_that_reaches_top_p(top_p: float, kept: Any) -> None:
    probs = torch.tensor([[0.15, 0.5, 0.25, 0.1]])
    nonzero = nucleus(probs, top_p).nonzero()[:, 1].tolist()
    assert nonzero == list(kept)


@pytest.mark.parametrize("training", [True, False])
def test_generation_is_without_dropout_and_leaves_the_mode_alone(training: bool) -> None:
    tokens = torch.tensor([[1, 2, 3]])
    model = whole_model(tiny_config(dropout=0.5)).train(training)
    plain = whole_model(tiny_config())
    assert torch.equal(
        generate(model, tokens, max_new_tokens=5, temperature=0.0),
        generate(plain, tokens, max_new_tokens=5, temperature=0.0),
    )
    assert model.training is training


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0"),
        ({"temperature": float("nan")}, "temperature = nan is not a finite number"),
        ({"temperature": float("inf")}, "temperature = inf is not a finite number"),
        ({"seed": 10**22}, "seed = 10000000000000000000000 is not in 0"),
        ({"seed": -1}, "seed = -1 is not in 0"),
        ({"top_p": 0.0}, "top_p = 0.0"),
        ({"top_p": 1.5}, "top_p = 1.5"),
        ({"max_new_tokens": -1}, "max_new_tokens = -1"),
    ],
)
def test_arguments_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    arguments = {"max_new_tokens": 1, **changes}
    with pytest.raises(ValueError, match=message):
        generate(whole_model(CONFIG), torch.tensor([[1]]), **arguments)


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        (torch.zeros(0, 3, dtype=torch.int64), r"shape \(0, 3\); expected .* least one prompt"),
        (torch.zeros(1, 0, dtype=torch.int64), r"shape \(1, 0\); expected .* at least one token"),
        (torch.tensor([1, 2]), r"shape \(2,\); expected \(batch, sequence\)"),
        (torch.tensor([[1.5]]), r"dtype torch.float32; token ids are integers"),
        (torch.tensor([[True]]), r"dtype torch.bool; token ids are integers"),
        (torch.tensor([[3, 50]]), "token id 50; the model's ids are 0 to 49, the nearest is 49"),
        (torch.tensor([[3], [200]]), "token id 200; the model's ids are 0 to 49"),
        (torch.tensor([[-2, 3]]), "token id -2; the model's ids are 0 to 49, the nearest is 0"),
    ],
)
def test_prompts_that_are_no_token_ids_are_refused(tokens: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        generate(whole_model(CONFIG), tokens, max_new_tokens=1)


def test_prompts_may_have_any_integer_type() -> None:
    model = whole_model(CONFIG)
    expected = generate(model, torch.tensor([[1, 49]]), max_new_tokens=2, temperature=0.0)
    for dtype in (torch.uint8, torch.int16, torch.int32):
        tokens = torch.tensor([[1, 49]], dtype=dtype)
        result = generate(model, tokens, max_new_tokens=2, temperature=0.0)
        assert result.dtype == torch.int64
        assert torch.equal(result, expected)


def test_an_empty_prompt_and_a_part_of_a_model_are_refused() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        generate(whole_model(CONFIG), torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=1)
    part = whole_model(CONFIG, has_embedding=False, groups=ProcessGroups.single())
    with pytest.raises(ValueError, match="whole model"):
        generate(part, torch.tensor([[1]]), max_new_tokens=1)
