"""Losses of pairs: published goldens, formulas, and the sums over answers."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megacore.errors import DataError
from megacore.parallel.batch import Answers, Documents, Microbatch
from megacore.parallel.process_groups import Group
from megatrain.hf import import_hf
from megatrain.models.group_loss import AnswerLogprobs, GroupLossSum, answer_logprobs
from megatrain.models.loss import LossContext, token_losses
from megatrain.models.mappings import Region
from megatrain.models.preference import METRICS, PreferenceLoss

# V 5, logits(b, t, s)_v = c sin(1.3 v + .7 t + 2.1 b + .5 s): rows b two chosen, two rejected.
ROWS = [[1, 2, 3, 4, 0], [3, 1, 2], [1, 2, 3, 2], [3, 1, 4, 0]]
PROMPTS = [3, 2, 3, 2]
# Losses of these rows, and those that TRL 1.16 has for a small Llama (`llama_rows`).
GOLDEN = {
    "sigmoid": (0.718057, 0.705111),
    "hinge": (1.049213, 1.023649),
    "ipo": (31.815245, 25.459265),
    "sigmoid_norm": (0.725628, 0.695427),
    "apo_zero": (1.012291, 1.005911),
    "apo_down": (0.998465, 1.006824),
}
REFERENCE = [-2.520829, -2.221702, -1.160941, -2.673343]


def rows_of(s: int, scale: float) -> list[Tensor]:
    """Log-probs of the answer tokens of each row, from the logits of the formula."""
    found = []
    for b, (row, prompt) in enumerate(zip(ROWS, PROMPTS, strict=True)):
        t, v = torch.arange(len(row) - 1)[:, None], torch.arange(5)[None]
        logits = scale * torch.sin(1.3 * v + 0.7 * t + 2.1 * b + 0.5 * s)
        labels = torch.tensor(row[1:])
        logprobs = logits.log_softmax(-1).gather(1, labels[:, None])[:, 0]
        found.append(logprobs[prompt - 1 :])
    return found


LLAMA_ROWS = [[3, 4, 5, 6, 7, 2], [4, 6, 9, 2], [3, 4, 5, 8, 2], [4, 6, 3, 3, 3, 2]]


def llama_rows(folder: Path, s: float) -> list[Tensor]:
    """Log-probs of the answer tokens of each row, of a Llama whose weights are a formula.

    The i-th of its sorted parameters is 0.8 sin(j (i + 1) + s) for its j-th element; norms are 1.
    """
    transformers = pytest.importorskip("transformers")
    config = transformers.LlamaConfig(
        vocab_size=10,
        hidden_size=8,
        intermediate_size=12,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=4,
        max_position_embeddings=16,
        rms_norm_eps=1e-6,
    )
    theirs = transformers.LlamaForCausalLM(config)
    with torch.no_grad():
        for i, (name, parameter) in enumerate(sorted(theirs.named_parameters())):
            j = torch.arange(parameter.numel(), dtype=torch.float64)
            values = torch.ones_like(j) if "norm" in name else 0.8 * torch.sin(j * (i + 1) + s)
            parameter.copy_(values.view(parameter.shape))
    theirs.save_pretrained(folder)
    model, found = import_hf(folder).chunk.eval(), []
    for number, (row, prompt) in enumerate(zip(LLAMA_ROWS, PROMPTS, strict=True)):
        tokens = torch.tensor([row])
        batch = Microbatch(tokens=tokens, labels=tokens, sample_ids=torch.tensor([number]), step=0)
        with torch.no_grad():
            logits = model.logits(None, batch)[0, :-1, :10]
        found.append(logits.log_softmax(-1).gather(1, tokens[0, 1:, None])[prompt - 1 :, 0])
    return found


def answers_of(policy: list[Tensor], reference: list[Tensor] | list[float]) -> AnswerLogprobs:
    order = [0, 2, 1, 3]  # pair by pair
    sums = torch.stack([policy[row].sum() for row in order])
    counts = torch.tensor([float(len(policy[row])) for row in order])
    values = torch.tensor([[float(torch.as_tensor(reference[row]).sum())] for row in order])
    return AnswerLogprobs(logprobs=sums, num_tokens=counts, values=values)


def test_sums_of_the_golden_rows_are_the_published_ones() -> None:
    policy, reference = rows_of(0, 1.5), rows_of(1, 1.0)
    expected = [-2.550504, -3.299891, -0.667435, -3.290457]
    assert [row.sum().item() for row in policy] == pytest.approx(expected, abs=1e-5)
    assert [row.sum().item() for row in reference] == pytest.approx(REFERENCE, abs=1e-5)


@pytest.mark.parametrize("name", GOLDEN)
def test_losses_are_the_goldens(name: str) -> None:
    answers = answers_of(rows_of(0, 1.5), rows_of(1, 1.0))
    losses, _ = PreferenceLoss(name, beta=0.1)(answers)
    assert losses.mean().item() == pytest.approx(GOLDEN[name][0], rel=1e-5)


def test_losses_of_a_model_are_those_of_trl(tmp_path: Path) -> None:
    policy, reference = (llama_rows(tmp_path / f"{s}", s) for s in (0.0, 0.1))
    expected = [-6.997179, -5.998279, -5.075141, -7.957068]
    assert [row.sum().item() for row in policy] == pytest.approx(expected, rel=1e-5)
    answers = answers_of(policy, reference)
    for name, (_, expected_loss) in GOLDEN.items():
        losses, _ = PreferenceLoss(name, beta=0.1)(answers)
        assert losses.mean().item() == pytest.approx(expected_loss, rel=1e-5), name


def test_simpo_needs_no_reference() -> None:
    answers = answers_of(rows_of(0, 1.5), [0.0] * 4)
    answers = AnswerLogprobs(
        logprobs=answers.logprobs, num_tokens=answers.num_tokens, values=torch.zeros(4, 0)
    )
    losses, _ = PreferenceLoss("simpo", beta=2.0)(answers)
    assert losses.mean().item() == pytest.approx(3.320923, rel=1e-5)


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.4])
def test_smoothed_labels_follow_the_formula(smoothing: float) -> None:
    answers = answers_of(rows_of(0, 1.5), rows_of(1, 1.0))
    losses, _ = PreferenceLoss("sigmoid", beta=0.7, label_smoothing=smoothing)(answers)
    ratios = (answers.logprobs - answers.values[:, 0]).view(2, 2)
    for loss, (chosen, rejected) in zip(losses.tolist(), ratios.tolist(), strict=True):
        z = 0.7 * (chosen - rejected)
        better, worse = -math.log1p(math.exp(-z)), -math.log1p(math.exp(z))
        assert loss == pytest.approx(-(1 - smoothing) * better - smoothing * worse, rel=1e-5)


def test_metrics_are_the_published_rewards() -> None:
    answers = answers_of(rows_of(0, 1.5), rows_of(1, 1.0))
    _, metrics = PreferenceLoss("sigmoid", beta=0.1)(answers)
    found = dict(zip(METRICS, metrics.tolist(), strict=True))
    assert found["rewards/chosen"] == pytest.approx([-0.002968, -0.107819], abs=1e-6)
    assert found["rewards/rejected"] == pytest.approx([0.049351, -0.061711], abs=1e-6)
    assert found["rewards/margins"] == pytest.approx([-0.052319, -0.046108], abs=1e-6)
    assert found["rewards/accuracies"] == [0.0, 0.0]
    assert found["logps/chosen"] == pytest.approx([-2.550504, -3.299891], abs=1e-5)


def batch_of(counts: tuple[int, ...], starts: list[list[int]]) -> Microbatch:
    tokens = torch.arange(12).view(2, 6)
    labels = (tokens + 1).masked_fill(tokens % 3 == 2, -1)
    return Microbatch(
        tokens=tokens,
        labels=labels,
        sample_ids=torch.tensor([4, 5]),
        step=0,
        documents=Documents.of(starts, 6),
        answers=Answers(counts=counts, values=torch.zeros(sum(counts), 0)),
    )


CONTEXT = LossContext(
    region=Region(group=Group.solo(), sequence_parallel=False), vocab=20, first_column=0
)


def test_answers_are_summed_apart_and_padding_is_left_out() -> None:
    batch = batch_of((2, 2), [[0, 2, 5], [0, 3]])
    logits = torch.randn(6, 2, 20, generator=torch.Generator().manual_seed(1))
    losses = token_losses(logits, CONTEXT.labels(batch), first_column=0, group=Group.solo())
    found = answer_logprobs(losses, batch, CONTEXT)
    columns = losses.t()
    ranges = [(0, 0, 2), (0, 2, 5), (1, 0, 3), (1, 3, 6)]
    expected = [-columns[row, begin:end].sum().item() for row, begin, end in ranges]
    assert found.logprobs.tolist() == pytest.approx(expected, rel=1e-6)
    assert found.num_tokens.tolist() == [2.0, 2.0, 2.0, 2.0]


@pytest.mark.parametrize(
    ("counts", "starts", "message"),
    [
        ((2, 3), [[0, 2], [0, 2, 4]], "sample 5 must have whole groups of 2 answers, .* got 3"),
        ((2, 2), [[0, 2], [0]], "sample 5 must have whole groups of 2 .* got 2 answers in 1 docu"),
    ],
)
def test_groups_that_are_not_whole_are_refused(
    counts: tuple[int, ...], starts: list[list[int]], message: str
) -> None:
    loss = GroupLossSum(PreferenceLoss("simpo", beta=1.0), shown="here", device=torch.device("cpu"))
    with pytest.raises(DataError, match=message):
        loss(torch.zeros(6, 2), batch_of(counts, starts), CONTEXT)
