"""Steps run in the manner of Megatron-LM: forward step function, loss function, reports."""

from __future__ import annotations

import gc
import re
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megacore.parallel import Group
from megacore.pipeline import (
    SCHEDULE_NAMES,
    ActivationSpec,
    build_schedule,
    get_forward_backward_func,
    megatron_api,
)

SPEC = ActivationSpec(shape=(2, 4), dtype=torch.float32, device="cpu")
NUM_TOKENS = (3, 1, 4)


class Chunk(nn.Linear):
    hidden: Tensor | None = None

    def set_input_tensor(self, hidden: Tensor | None) -> None:
        self.hidden = hidden


def make_chunks(count: int) -> list[Chunk]:
    torch.manual_seed(1)
    return [Chunk(4, 4) for _ in range(count)]


def data() -> Iterator[tuple[Tensor, int]]:
    for number, count in enumerate(NUM_TOKENS):
        yield torch.full((2, 4), number + 1.0), count


def forward_step(loss: Callable[[Tensor, int], tuple[Any, ...]]) -> Callable[..., Any]:
    def step(iterator: Iterator[tuple[Tensor, int]], chunk: Chunk) -> tuple[Tensor, Any]:
        x, count = next(iterator)
        output = torch.tanh(chunk(x if chunk.hidden is None else chunk.hidden))
        return output, lambda out: loss(out, count)

    return step


def mean_loss(output: Tensor, _count: int) -> tuple[Tensor, dict[str, float]]:
    loss = output.square().mean()
    return loss, {"loss": loss.item()}


def token_loss(output: Tensor, count: int) -> tuple[Tensor, Tensor, str]:
    return output.square().mean() * count, torch.tensor(count), f"{count} tokens"


def expected_grads(weights: list[float]) -> list[Tensor]:
    chunks = make_chunks(2)
    for (x, _), weight in zip(data(), weights, strict=True):
        hidden = torch.tanh(chunks[1](torch.tanh(chunks[0](x))))
        (hidden.square().mean() * weight).backward()
    return [p.grad for chunk in chunks for p in chunk.parameters()]


def run(loss: Any, **options: Any) -> tuple[Any, list[Tensor]]:
    step = get_forward_backward_func(
        "interleaved_1f1b", group=Group.solo(), activation=SPEC, **options
    )
    chunks = make_chunks(2)
    reports = step(
        forward_step_func=forward_step(loss),
        data_iterator=[data(), data()],
        model=chunks,
        num_microbatches=3,
    )
    again = step(
        forward_step_func=forward_step(loss),
        data_iterator=[data(), data()],
        model=chunks,
        num_microbatches=3,
        forward_only=True,
    )
    assert again == reports
    return reports, [p.grad for chunk in chunks for p in chunk.parameters()]


def require_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b)


def test_means_of_microbatches_count_equally() -> None:
    reports, grads = run(mean_loss)
    assert len(reports) == 3
    assert all(report["loss"] > 0 for report in reports)
    assert reports.num_tokens is None
    require_close(grads, expected_grads([1 / 3] * 3))


def test_losses_with_numbers_of_tokens() -> None:
    reports, grads = run(token_loss)
    assert reports == ["3 tokens", "1 tokens", "4 tokens"]
    assert reports.num_tokens.item() == 8
    require_close(grads, expected_grads([1 / 3] * 3))
    _, sums = run(token_loss, per_token=True)
    require_close(sums, expected_grads([3.0, 1.0, 4.0]))


def test_a_schedule_is_made_once_for_each_number_of_microbatches(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[int] = []

    def build(name: str, *, num_microbatches: int, **options: Any) -> Any:
        made.append(num_microbatches)
        return build_schedule(name, num_microbatches=num_microbatches, **options)

    monkeypatch.setattr(megatron_api, "build_schedule", build)
    step = get_forward_backward_func("auto", group=Group.solo(), activation=SPEC)
    model = make_chunks(1)
    for num_microbatches in (2, 3, 2, 2):
        step(
            forward_step_func=forward_step(mean_loss),
            data_iterator=data(),
            model=model,
            num_microbatches=num_microbatches,
        )
    assert made == [2, 3]


def test_models_of_earlier_steps_are_not_kept() -> None:
    step = get_forward_backward_func(group=Group.solo(), activation=SPEC)

    def run_once() -> tuple[weakref.ref[Chunk], float]:
        [model] = make_chunks(1)
        reports = step(
            forward_step_func=forward_step(mean_loss),
            data_iterator=data(),
            model=model,
            num_microbatches=3,
        )
        return weakref.ref(model), reports[0]["loss"]

    first, second = run_once(), run_once()
    gc.collect()
    assert (first[0](), second[0]()) == (None, None)
    assert first[1] == second[1]


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("1f1", "did you mean '1f1b'?"),
        ("ZB-V", "did you mean 'zb_v'?"),
        ("atuo", "did you mean 'auto'?"),
        ("dual_pipe", "did you mean 'dualpipe'?"),
        ("nothing", f"choose one of {', '.join(SCHEDULE_NAMES)}, auto"),
    ],
)
def test_a_schedule_that_does_not_exist_is_refused_before_the_first_step(
    name: str, hint: str
) -> None:
    with pytest.raises(ValueError, match=re.escape(f"unknown schedule {name!r}; {hint}")):
        get_forward_backward_func(name, group=Group.solo(), activation=SPEC)


def test_mistakes_are_named() -> None:
    step = get_forward_backward_func(group=Group.solo(), activation=SPEC)
    with pytest.raises(ValueError, match="Linear has no set_input_tensor"):
        step(
            forward_step_func=forward_step(mean_loss),
            data_iterator=data(),
            model=nn.Linear(4, 4),
            num_microbatches=1,
        )
    schedule = build_schedule("1f1b", num_ranks=1, num_microbatches=2)
    step = get_forward_backward_func(schedule, group=Group.solo(), activation=SPEC)
    with pytest.raises(ValueError, match="is for 2 microbatches, but num_microbatches is 3"):
        step(
            forward_step_func=forward_step(mean_loss),
            data_iterator=data(),
            model=make_chunks(1),
            num_microbatches=3,
        )
    with pytest.raises(ValueError, match="but 2 model chunks were given; give one per stage"):
        step(
            forward_step_func=forward_step(mean_loss),
            data_iterator=data(),
            model=make_chunks(2),
            num_microbatches=2,
        )
    with pytest.raises(ValueError, match="1 model chunks, but 2 data iterators"):
        step(
            forward_step_func=forward_step(mean_loss),
            data_iterator=[data(), data()],
            model=make_chunks(1),
            num_microbatches=2,
        )


@pytest.mark.parametrize(
    ("returned", "shown"),
    [
        (lambda loss: loss, "a Tensor"),
        (lambda loss: torch.stack([loss, loss]), "a Tensor"),
        (lambda loss: (loss, torch.tensor(3), "report", "more"), "4 values"),
        (lambda loss: (loss.item(), "report"), "float first"),
        (lambda _: None, "a NoneType"),
    ],
)
def test_a_loss_function_returns_a_pair_or_a_triple(
    returned: Callable[[Tensor], Any], shown: str
) -> None:
    with pytest.raises(ValueError, match=f"the loss function returned {shown}; it must return"):
        run(lambda output, _: returned(output.square().mean()))


@pytest.mark.parametrize(
    ("returned", "shown"),
    [(torch.ones(2, 3), "a Tensor"), ((1, 2, 3), "3 values"), (None, "a NoneType")],
)
def test_a_forward_step_function_returns_a_pair(returned: Any, shown: str) -> None:
    step = get_forward_backward_func(group=Group.solo(), activation=SPEC)
    with pytest.raises(ValueError, match=f"function returned {shown}; it must return"):
        step(
            forward_step_func=lambda _, __: returned,
            data_iterator=data(),
            model=make_chunks(1),
            num_microbatches=1,
        )


def test_data_that_ends_too_early_is_an_error_that_no_loop_takes_for_its_end() -> None:
    step = get_forward_backward_func(group=Group.solo(), activation=SPEC)
    with pytest.raises(ValueError, match=r"ended before microbatch 3 \(of 4, from 0\)"):
        step(
            forward_step_func=forward_step(mean_loss),
            data_iterator=data(),
            model=make_chunks(1),
            num_microbatches=4,
        )


def test_chunks_are_modules_of_their_own_in_any_sequence() -> None:
    step = get_forward_backward_func("interleaved_1f1b", group=Group.solo(), activation=SPEC)
    first, second = make_chunks(2)
    for model, problem in (
        (nn.ModuleList([first, second]), None),
        ([first, first], "one module stands for several model chunks"),
    ):
        arguments: dict[str, Any] = {
            "forward_step_func": forward_step(mean_loss),
            "data_iterator": [data(), data()],
            "model": model,
            "num_microbatches": 3,
        }
        if problem is None:
            assert len(step(**arguments)) == 3
        else:
            with pytest.raises(ValueError, match=problem):
                step(**arguments)


def test_a_schedule_for_another_number_of_ranks_is_refused() -> None:
    schedule = build_schedule("1f1b", num_ranks=2, num_microbatches=2)
    with pytest.raises(ValueError, match=r"schedule 1f1b is for 2 ranks, but group .* has 1"):
        get_forward_backward_func(schedule, group=Group.solo(), activation=SPEC)


@pytest.mark.parametrize(
    ("count", "shown"), [(None, "None"), (torch.tensor([3, 1]), r"a tensor of shape \[2\]")]
)
def test_a_number_of_tokens_is_one_number(count: Any, shown: str) -> None:
    with pytest.raises(ValueError, match=f"tokens of a microbatch must be .*, got {shown}"):
        run(lambda output, _: (output.sum(), count, None))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.bool, torch.float32, int])
def test_numbers_of_tokens_of_any_dtype_are_summed_exactly(dtype: Any) -> None:
    def loss(output: Tensor, _count: int) -> tuple[Tensor, Any, None]:
        count = 201 if dtype is int else torch.tensor(201).to(dtype)
        return output.sum(), count, None

    step = get_forward_backward_func(group=Group.solo(), activation=SPEC)
    reports = step(
        forward_step_func=lambda _, chunk: (chunk(torch.ones(2, 4)), lambda out: loss(out, 201)),
        data_iterator=None,
        model=make_chunks(1),
        num_microbatches=16,
    )
    each = 201 if dtype is int else int(torch.tensor(201).to(dtype))
    assert reports.num_tokens is not None
    assert reports.num_tokens.item() == 16 * each


def test_a_loss_without_gradient_is_refused() -> None:
    def detached(output: Tensor, _count: int) -> tuple[Tensor, None]:
        return output.square().mean().detach(), None

    with pytest.raises(ValueError, match="the loss of the last stage has no gradient"):
        run(detached)
    with (
        torch.inference_mode(),
        pytest.raises(ValueError, match=r"do not train inside\s+torch.inference_mode"),
    ):
        run(mean_loss)
