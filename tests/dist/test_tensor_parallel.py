"""Tensor and sequence parallelism change nothing: loss, gradients, logits, region borders."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy as torch_cross_entropy

from megacore.parallel import Group, ProcessGroups, Topology
from megacore.parallel.collectives import all_gather_objects, all_reduce_
from megatrain.config import ModelConfig
from megatrain.generation.decoding import generate
from megatrain.models import gpt, mappings
from megatrain.models.gpt import GPTChunk
from megatrain.models.loss import cross_entropy
from tests.support.distributed import run_ranks
from tests.support.models import random_batch, tiny_config, whole_model
from tests.support.sharding import unshard

pytestmark = pytest.mark.dist

Outcome = tuple[Tensor, dict[str, Tensor]]


def four_way_config(**changes: Any) -> ModelConfig:
    """Sizes that four ranks can split; the last of them has padding of the vocabulary only."""
    return tiny_config(num_heads=8, num_kv_heads=4, vocab_size=40, **changes)


def full_gradients(chunks: list[GPTChunk], tp: Group) -> dict[str, Tensor]:
    """Gradients of the full parameters, as an optimizer that knows the infos would join them."""
    gradients: dict[str, Tensor] = {}
    for info, parameter in [pair for chunk in chunks for pair in chunk.param_infos()]:
        local = parameter.grad.clone()
        if info.sequence_parallel:
            all_reduce_(local, tp)
        parts = all_gather_objects(local, tp)
        if info.tp_dim is None:
            assert all(torch.equal(part, local) for part in parts), info.name
            parts = parts[:1] * tp.size
        full = unshard(parts, info)
        gradients[info.name] = gradients[info.name] + full if info.name in gradients else full
    return gradients


def run_model(config: ModelConfig, groups: ProcessGroups, **arguments: Any) -> Outcome:
    """Loss and gradients of two chunks in a row, so that a tied embedding has a copy."""
    middle = config.num_layers // 2
    first = whole_model(config, groups=groups, layers=range(middle), has_head=False, **arguments)
    last = whole_model(
        config,
        groups=groups,
        layers=range(middle, config.num_layers),
        has_embedding=False,
        **arguments,
    )
    batch = random_batch(config, step=2)
    hidden = first(None, batch)
    split = groups.tp.size if arguments.get("sequence_parallel") else 1
    assert hidden.shape == (config.seq_length // split, batch.shape[0], config.hidden_size)
    loss = last(hidden, batch)
    loss.backward()
    return loss.detach(), full_gradients([first, last], groups.tp)


def run_cases(rank: int, tp: int, cases: list[dict[str, Any]], sequence_parallel: bool) -> Any:
    del rank
    groups = ProcessGroups.create(Topology(world_size=tp, tp=tp))
    return [
        run_model(four_way_config(**case), groups, sequence_parallel=sequence_parallel)
        for case in cases
    ]


@pytest.mark.parametrize(
    ("tp", "sequence_parallel", "block"),
    [(2, False, None), (2, True, None), (4, False, None), (4, True, None), (4, True, 3)],
)
def test_loss_and_gradients_equal_those_of_one_process(
    tp: int, sequence_parallel: bool, block: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    cases = [
        {"tie_embeddings": tied, "dropout": dropout}
        for tied in (True, False)
        for dropout in (0, 0.2)
    ]
    with monkeypatch.context() as patch:
        patch.setattr(gpt, "block_columns", lambda *_: block)
        outcomes = run_ranks(tp, run_cases, tp, cases, sequence_parallel)
    for number, case in enumerate(cases):
        loss, gradients = run_model(four_way_config(**case), ProcessGroups.single())
        losses = [outcome[number][0] for outcome in outcomes]
        assert all(torch.equal(other, losses[0]) for other in losses)
        torch.testing.assert_close(losses[0], loss, rtol=1e-6, atol=0)
        assert outcomes[0][number][1].keys() == gradients.keys()
        for name, gradient in outcomes[0][number][1].items():
            error = (gradient - gradients[name]).norm() / gradients[name].norm()
            assert error.item() < 1e-5, f"{case}: {name}"


def run_other_formats(rank: int) -> Any:
    del rank
    groups = ProcessGroups.create(Topology(world_size=2, tp=2))
    config = four_way_config()
    exact = run_model(config, groups, sequence_parallel=True, dtype=torch.float64)
    narrow = run_model(config, groups, sequence_parallel=True, dtype=torch.bfloat16)
    model = whole_model(config, groups=groups, sequence_parallel=True)
    batch = random_batch(config)
    logits = model.logits(None, batch), model.logits(None, batch, last_only=True)
    with pytest.raises(ValueError, match="the sequence has 15 tokens"):
        model(None, random_batch(config, sequence=15))
    with pytest.raises(ValueError, match="in one process"):
        generate(model, batch.tokens, max_new_tokens=1)
    return exact, narrow, logits


def test_float64_is_exact_bfloat16_is_close_and_logits_are_whole() -> None:
    config = four_way_config()
    exact, narrow, (logits, last) = run_ranks(2, run_other_formats)[1]
    loss, gradients = run_model(config, ProcessGroups.single(), dtype=torch.float64)
    torch.testing.assert_close(exact[0], loss, rtol=1e-13, atol=0)
    for name, gradient in exact[1].items():
        torch.testing.assert_close(gradient, gradients[name], rtol=1e-9, atol=1e-12)
    narrow_loss, narrow_gradients = run_model(config, ProcessGroups.single(), dtype=torch.bfloat16)
    torch.testing.assert_close(narrow[0], narrow_loss, rtol=2e-2, atol=0)
    for name, gradient in narrow[1].items():
        reference = narrow_gradients[name].float()
        assert ((gradient.float() - reference).norm() / reference.norm()).item() < 0.1, name
    expected = whole_model(config).logits(None, random_batch(config))
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last, logits[:, -1:], rtol=1e-5, atol=1e-5)


def run_mappings(rank: int, world_size: int) -> Any:
    """Forward results and gradients of every mapping in float64, inputs drawn by rank."""
    groups = ProcessGroups.create(Topology(world_size=world_size, tp=world_size))
    results = {}
    for name in MAPPINGS:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(2 * world_size, 3, generator=generator, dtype=torch.float64)
        x.requires_grad_()
        y = getattr(mappings, name)(x, groups.tp)
        grad = torch.randn(y.shape, generator=generator, dtype=torch.float64)
        y.backward(grad)
        results[name] = (x.detach(), y.detach(), grad, x.grad)
    return results


MAPPINGS = {
    "copy_to_group": ("same", "sum"),
    "reduce_from_group": ("sum", "same"),
    "scatter_sequence": ("slice", "join"),
    "gather_sequence": ("join", "slice"),
    "all_gather_sequence": ("join", "slice of sum"),
    "reduce_scatter_sequence": ("slice of sum", "join"),
}


def applied(operation: str, inputs: list[Tensor]) -> list[Tensor]:
    """What each rank must get from the inputs of all ranks."""
    size = len(inputs)
    total = torch.stack(inputs).sum(0)
    if operation == "slice":
        return [part.chunk(size)[rank] for rank, part in enumerate(inputs)]
    if operation == "slice of sum":
        return list(total.chunk(size))
    whole = {"same": inputs, "sum": [total] * size, "join": [torch.cat(inputs)] * size}
    return whole[operation]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_each_mapping_and_its_gradient_do_what_their_table_says(world_size: int) -> None:
    ranks = run_ranks(world_size, run_mappings, world_size)
    for name, (forward, backward) in MAPPINGS.items():
        x, y, grad, x_grad = zip(*(rank[name] for rank in ranks), strict=True)
        torch.testing.assert_close(list(y), applied(forward, list(x)))
        torch.testing.assert_close(list(x_grad), applied(backward, list(grad)))


def run_loss(rank: int, columns: list[int]) -> Any:
    logits, labels = draw_logits(sum(columns))
    first = sum(columns[:rank])
    mine = logits[..., first : first + columns[rank]].clone().requires_grad_()
    groups = ProcessGroups.create(Topology(world_size=len(columns), tp=len(columns)))
    loss = cross_entropy(mine, labels, first_column=first, group=groups.tp)
    loss.backward()
    return loss.detach(), mine.grad


def draw_logits(num_columns: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = 50 * torch.randn(6, 2, num_columns, generator=generator, dtype=torch.float64)
    return logits, torch.randint(0, num_columns, (6, 2), generator=generator)


@pytest.mark.parametrize("columns", [[4, 4], [3, 3, 1, 0], [1, 0]])
def test_the_loss_of_a_split_vocabulary_equals_torch(columns: list[int]) -> None:
    logits, labels = draw_logits(sum(columns))
    logits.requires_grad_()
    expected = torch_cross_entropy(logits.flatten(0, 1), labels.flatten())
    expected.backward()
    losses, gradients = zip(*run_ranks(len(columns), run_loss, columns), strict=True)
    for loss in losses:
        torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(torch.cat(gradients, dim=-1), logits.grad)
