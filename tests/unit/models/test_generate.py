from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megacore.parallel.batch import Microbatch
from megacore.parallel.process_groups import ProcessGroups
from megatrain.generation.decoding import Sampling, _batch, _divided, generate, nucleus, stream
from tests.support.models import params_by_name, plain_logits, tiny_config, whole_model

CONFIG = tiny_config(seq_length=8)


def contexts(num_tokens: int, prompt: int, limit: int) -> list[slice]:
    """The tokens that each new one is predicted from, after the rule in `stream`."""
    found, begin = [], max(0, prompt - limit)
    for end in range(prompt, num_tokens):
        begin = end - (limit + 1) // 2 if end - begin > limit else begin
        found.append(slice(begin, end))
    return found


@pytest.mark.parametrize("length", [1, 3, 8, 11])
def test_greedy_tokens_are_the_most_likely_ones_of_their_context(length: int) -> None:
    model = whole_model(CONFIG)
    tokens = torch.arange(2 * length).view(2, length)
    result = generate(model, tokens, max_new_tokens=16, sampling=Sampling(temperature=0.0))
    assert result.shape == (2, length + 16)
    assert torch.equal(result[:, :length], tokens)
    for context in contexts(length + 16, length, limit=8):
        logits = plain_logits(CONFIG, params_by_name(model), result[:, context])
        assert torch.equal(result[:, context.stop], logits[:, -1, :50].argmax(-1))


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    temperature=st.sampled_from([0.0, 0.7]),
    top_k=st.sampled_from([None, 1, 5]),
)
@settings(deadline=None, max_examples=20)
def test_tokens_of_a_prompt_do_not_depend_on_the_others(
    lengths: list[int], temperature: float, top_k: int | None
) -> None:
    model = whole_model(tiny_config(init_std=0.05, seq_length=16))
    prompts = [[(5 * row + i) % 50 for i in range(n)] for row, n in enumerate(lengths)]
    together: list[list[int]] = [[] for _ in prompts]
    sampling = Sampling(temperature=temperature, top_k=top_k)
    for chosen in islice(stream(model, prompts, sampling), 7):
        for new, token in zip(together, chosen, strict=True):
            new += [] if token is None else [token]
    for row, (prompt, new) in enumerate(zip(prompts, together, strict=True)):
        assert len(new) == 7 - len(prompt) + min(lengths)
        # The generator of a row is seeded by its number.
        alone = stream(model, [prompt], Sampling(temperature=temperature, top_k=top_k, seed=row))
        assert [chosen[0] for chosen in islice(alone, len(new))] == new


def test_top_k_of_one_is_greedy_and_few_tokens_are_drawn() -> None:
    model, tokens = whole_model(tiny_config(init_std=0.05)), torch.tensor([[1, 2, 3]])
    greedy = generate(model, tokens, max_new_tokens=5, sampling=Sampling(temperature=0.0))
    assert torch.equal(
        generate(model, tokens, max_new_tokens=5, sampling=Sampling(top_k=1)), greedy
    )
    best = model.logits(None, _batch(tokens), last_only=True)[0, 0].topk(3).indices.tolist()
    drawn = {
        int(generate(model, tokens, max_new_tokens=1, sampling=Sampling(top_k=3, seed=i))[0, -1])
        for i in range(40)
    }
    assert drawn == set(best)


def test_draws_follow_the_seed_and_the_row_only() -> None:
    model = whole_model(tiny_config(init_std=0.05))
    tokens = torch.tensor([[1, 2, 3], [1, 2, 3]])
    first = generate(model, tokens, max_new_tokens=10, sampling=Sampling(seed=5))
    assert torch.equal(first, generate(model, tokens, max_new_tokens=10, sampling=Sampling(seed=5)))
    assert torch.equal(
        first[:1], generate(model, tokens[:1], max_new_tokens=10, sampling=Sampling(seed=5))
    )
    assert not torch.equal(first[0], first[1])
    assert not torch.equal(
        first, generate(model, tokens, max_new_tokens=10, sampling=Sampling(seed=9))
    )
    assert first.max() < 50  # never a padding token


def test_a_low_temperature_approaches_the_greedy_choice() -> None:
    model, tokens = whole_model(CONFIG), torch.tensor([[1, 2, 3]])
    greedy = generate(model, tokens, max_new_tokens=6, sampling=Sampling(temperature=0.0))
    assert torch.equal(
        generate(model, tokens, max_new_tokens=6, sampling=Sampling(temperature=1e-4)), greedy
    )
    assert torch.equal(
        generate(model, tokens, max_new_tokens=6, sampling=Sampling(top_p=1e-6)), greedy
    )


@pytest.mark.parametrize("temperature", [1e-38, 1e-45, 1e-310])
@pytest.mark.parametrize("top_p", [0.5, 1.0])
def test_the_lowest_temperatures_take_the_greedy_choice(temperature: float, top_p: float) -> None:
    model, tokens = whole_model(CONFIG), torch.tensor([[1, 2, 3], [4, 5, 6]])
    greedy = generate(model, tokens, max_new_tokens=6, sampling=Sampling(temperature=0.0))
    drawn = generate(
        model, tokens, max_new_tokens=6, sampling=Sampling(temperature=temperature, top_p=top_p)
    )
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
        generate(model, tokens, max_new_tokens=5, sampling=Sampling(temperature=0.0)),
        generate(plain, tokens, max_new_tokens=5, sampling=Sampling(temperature=0.0)),
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
        ({"top_k": 0}, "top_k = 0 must be at least 1"),
    ],
)
def test_arguments_out_of_range_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Sampling(**changes)


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


def test_a_model_trains_after_it_has_generated() -> None:
    config = tiny_config(
        sliding_window=3, rope_scaling={"type": "dynamic", "factor": 2.0, "original_seq_length": 4}
    )
    tokens = torch.arange(6)[None]
    batch = Microbatch(tokens=tokens, labels=tokens, sample_ids=torch.arange(1), step=0)
    losses = []
    for generates in (False, True):
        model = whole_model(config)
        if generates:
            generate(model, tokens, max_new_tokens=2)
        losses.append(model(None, batch))
        losses[-1].backward()
    assert torch.equal(*losses)


def test_prompts_may_have_any_integer_type() -> None:
    model = whole_model(CONFIG)
    expected = generate(
        model, torch.tensor([[1, 49]]), max_new_tokens=2, sampling=Sampling(temperature=0.0)
    )
    for dtype in (torch.uint8, torch.int16, torch.int32):
        tokens = torch.tensor([[1, 49]], dtype=dtype)
        result = generate(model, tokens, max_new_tokens=2, sampling=Sampling(temperature=0.0))
        assert result.dtype == torch.int64
        assert torch.equal(result, expected)


def test_an_empty_prompt_and_a_part_of_a_model_are_refused() -> None:
    with pytest.raises(ValueError, match="max_new_tokens = -1"):
        generate(whole_model(CONFIG), torch.tensor([[1]]), max_new_tokens=-1)
    with pytest.raises(ValueError, match="a prompt is empty"):
        stream(whole_model(CONFIG), [[1], []], Sampling())
    with pytest.raises(ValueError, match="at least one token"):
        generate(whole_model(CONFIG), torch.zeros(1, 0, dtype=torch.int64), max_new_tokens=1)
    part = whole_model(CONFIG, has_embedding=False, groups=ProcessGroups.single())
    with pytest.raises(ValueError, match="whole model"):
        generate(part, torch.tensor([[1]]), max_new_tokens=1)
