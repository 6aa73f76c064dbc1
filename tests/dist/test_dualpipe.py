"""Training with two copies of the model in one pipeline equals one process; copies are equal."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.parallel.batch import Microbatch
from megatrain.data import microbatch
from megatrain.train.trainer import Trainer, build_trainer
from tests.dist.test_moe_invariance import own_gradients, whole_gradients
from tests.support.campaigns import representatives
from tests.support.configs import FOUR_LAYERS, changed_config
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

STEPS = 5
BASE: dict[str, Any] = {
    "model": {**FOUR_LAYERS, "dropout": 0.1},
    "train": {
        "steps": 8,  # those of the learning rate; what follows the first ones shows nothing new
        "microbatch_size": 1,
        "global_batch_size": 8,
        "eval_interval": 8,
        "eval_steps": 1,
    },
    "optimizer": {"lr": 5e-3, "warmup": 2},
}
EXPERTS = {
    "moe.num_experts": 4,
    "moe.top_k": 2,
    "moe.ffn_hidden_size": 16,
    "moe.layer_pattern": "d(e)",
    "moe.shared_ffn_hidden_size": 16,
    "moe.aux_loss_coef": 1e-2,
    "moe.z_loss_coef": 1e-3,
    "moe.expert_bias": True,
}
TWO_MORE_TOKENS = {"model.num_mtp_layers": 2, "model.mtp_loss_coef": 0.5}
PER_TOKEN = {"train.loss_normalization": "token"}
UNTIED = {"model.tie_embeddings": False, "optimizer.clip_grad": 0.0}
CLONES = {"moe.num_experts": 8, "moe.echo.num_spare_slots": 2, "moe.echo.tolerance": 0.0}
PP2 = {"pipeline.schedule": "dualpipe", "parallel.pp": 2}
PP4 = {"pipeline.schedule": "dualpipe", "parallel.pp": 4}
EP2 = {"parallel.ep": 2}
OVERLAPS = {
    "optimizer.overlap": "all",
    "optimizer.bucket_numel": 3000,
}
GRAPHS = {"graphs.warmup_steps": 1}
Changes = dict[str, Any]


def make_trainer(world_size: int, changes: Changes) -> Trainer:
    config = changed_config(world_size, BASE, changes)
    return build_trainer(config, world_size=world_size, device=torch.device("cpu"))


def weights(trainer: Trainer) -> dict[str, Tensor]:
    """All parameters and biases of experts of this rank."""
    trainer.optimizer.finish_param_gather()
    named = [pair for chunk in trainer.chunks for pair in chunk.param_infos()]
    biases = [pair for chunk in trainer.chunks for pair in chunk.buffer_infos()]
    return {info.name: value.detach().clone() for info, value in (*named, *biases)}


def train(_rank: int, world_size: int, changes: Changes) -> dict[str, Any]:
    trainer = make_trainer(world_size, changes)
    metrics = [trainer.train_step(0)]
    gradients = own_gradients(trainer)
    metrics += [trainer.train_step(step) for step in range(1, STEPS)]
    experts = [step.experts for step in metrics if step.experts is not None]
    return {
        "losses": [step.loss for step in metrics]
        + [trainer.mean_validation_loss(trainer.evaluate())],
        "norms": [step.grad_norm for step in metrics],
        "further": [loss for step in metrics for loss in step.mtp_losses],
        "balance": [value for step in experts for value in (step.aux_loss, step.z_loss)],
        "loads": [step.load for step in experts],
        "clones": sum(counts.num_clones for step in experts for counts in step.echo.values()),
        "gradients": gradients,
        "weights": weights(trainer),
        "holders": trainer.groups.holders.ranks,
    }


def assert_copies_are_equal(results: list[dict[str, Any]]) -> None:
    """To the bit, on all ranks that hold the same dense parameters."""
    for rank, result in enumerate(results):
        assert rank in result["holders"]
        for name, value in result["weights"].items():
            for other in result["holders"]:
                theirs = results[other]["weights"][name]
                if ".experts." not in name:  # else other experts may lie there
                    assert torch.equal(theirs, value), (name, rank, other)


# Model; ranks and layout. Each model is trained once by one process.
LAYOUTS: dict[str, tuple[Changes, int, Changes]] = {
    "pp4, both overlaps": ({}, 4, {**PP4, **OVERLAPS}),
    "pp2 dp2, an instance per rank": ({}, 4, {**PP2, **OVERLAPS, "optimizer.num_instances": 4}),
    "pp2 tp2, sequence parallel, replicated state": (
        {},
        4,
        {
            **PP2,
            "parallel.tp": 2,
            "parallel.sequence_parallel": True,
            "optimizer.distributed": False,
        },
    ),
    "pp2 cp2, mean over tokens": (PER_TOKEN, 4, {**PP2, "parallel.cp": 2}),
    "pp4, three users of the embedding": (
        TWO_MORE_TOKENS,
        4,
        {**PP4, "pipeline.layout": "Ett|t|tmm|L", "train.recompute": ["full"]},
    ),
    "pp2 ep2, experts": (
        EXPERTS,
        4,
        {**PP2, **EP2, **OVERLAPS, "pipeline.overlap_moe": True},
    ),
    "pp2 edp2, experts": (EXPERTS, 4, PP2),
    "pp2 ep2, clones": ({**EXPERTS, **CLONES}, 4, {**PP2, **EP2}),
}


@pytest.fixture(scope="module")
def one_process() -> Callable[[Changes], dict[str, Any]]:
    known: dict[str, dict[str, Any]] = {}

    def of(changes: Changes) -> dict[str, Any]:
        key = repr(changes)
        if key not in known:
            known[key] = train(0, 1, changes)
        return known[key]

    return of


@pytest.mark.parametrize(
    "layout",
    representatives(
        LAYOUTS,
        ["pp2 ep2, clones", "pp2 tp2, sequence parallel, replicated state", "pp4, both overlaps"],
    ),
)
def test_two_copies_train_as_one_process_does(
    layout: str, one_process: Callable[[Changes], dict[str, Any]]
) -> None:
    model, world_size, changes = LAYOUTS[layout]
    expected = one_process(model)
    results = run_ranks(world_size, train, world_size, {**model, **changes}, timeout_s=120)
    found = results[0]
    for key in ("losses", "norms", "loads"):
        assert all(result[key] == found[key] for result in results), "ranks report different runs"
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert found["further"] == pytest.approx(expected["further"], rel=1e-6)
    assert found["balance"] == pytest.approx(expected["balance"], rel=1e-5)
    assert found["loads"][:1] == expected["loads"][:1]
    assert (found["clones"] > 0) == ("clones" in layout)
    gradients = whole_gradients([result["gradients"] for result in results])
    reference = whole_gradients([expected["gradients"]])
    assert gradients.keys() == reference.keys()
    # What is clipped is divided by its norm, which all parameters share.
    for name, gradient in reference.items():
        assert (gradients[name] - gradient).norm() < 1e-6 * gradient.norm() + 1e-12, name
    assert_copies_are_equal(results)
    assert found["losses"][STEPS - 1] < found["losses"][0] - 0.3, "it must have learnt something"


def train_variants(_rank: int, variants: list[Changes]) -> list[Any]:
    found = []
    for variant in variants:
        # Buckets of one size: the shards of others add up the norm in another order. And as few
        # layers and microbatches as the schedule takes.
        sized = {"optimizer.bucket_numel": OVERLAPS["optimizer.bucket_numel"]}
        sized |= {"model.num_layers": 2, "train.global_batch_size": 4}
        trainer = make_trainer(2, {**PP2, **sized, **variant})
        metrics = [trainer.train_step(step) for step in range(4)]
        numbers = [(step.loss, step.grad_norm) for step in metrics]
        found.append((numbers, trainer.mean_validation_loss(trainer.evaluate()), weights(trainer)))
    return found


def test_sharding_overlap_and_graphs_change_no_bit() -> None:
    variants: list[Changes] = [
        {},
        {"optimizer.distributed": False},
        {**OVERLAPS, "debug.check_messages": True},
        {"optimizer.average_in_collective": False},
        {**OVERLAPS, **GRAPHS, "graphs.mode": "partial", "graphs.scopes": ["attn", "mlp"]},
        {**OVERLAPS, **GRAPHS, "graphs.mode": "full_step"},
    ]
    for plain, *others in run_ranks(2, train_variants, variants, timeout_s=120):
        for variant, (numbers, validation, values) in zip(variants[1:], others, strict=True):
            assert (numbers, validation) == plain[:2], variant
            for name, value in plain[2].items():
                assert torch.equal(values[name], value), (variant, name)


def in_halves(trainer: Trainer, rank: int) -> Callable[[int, int], Microbatch]:
    """The microbatches of one of the two copies, for a data-parallel rank."""
    config = trainer.config.train

    def batches(step: int, number: int) -> Microbatch:
        return microbatch(
            trainer.data.train,
            step=step,
            microbatch=number + rank * trainer.config.num_microbatches(2),
            dp_position=0,
            dp_size=1,
            microbatch_size=config.microbatch_size,
            global_batch_size=config.global_batch_size,
            sample_offset=0,
        )

    return batches


def train_both(rank: int) -> list[Any]:
    copies, ranks = make_trainer(2, {**PP2, **UNTIED}), make_trainer(2, UNTIED)
    found = [[], []]
    for step in range(STEPS):
        lr = ranks.learning_rate(step)
        metrics = copies.train_step(step), ranks.step.train(step, in_halves(ranks, rank), lr=lr)
        for losses, one in zip(found, metrics, strict=True):
            losses.append(one.loss)
    return [*found, weights(copies), weights(ranks)]


def test_the_copies_are_two_data_parallel_ranks_to_the_bit() -> None:
    # Powers of two, so that the mean over ranks rounds as the sum over copies does. Not a tied
    # embedding or a norm, whose sums have another order in a pipeline.
    for losses, expected, values, expected_values in run_ranks(2, train_both, timeout_s=60):
        assert losses == expected
        assert values.keys() == expected_values.keys()
        for name, value in expected_values.items():
            assert torch.equal(values[name], value), name


def train_with_a_nan(rank: int, world_size: int, bad_step: int) -> Any:
    trainer = make_trainer(world_size, {**(PP2 if world_size > 1 else {}), **OVERLAPS})
    found = []
    for step in range(STEPS):
        # The output layer of the copy that ends here: the other copy's gradients are sound.
        norm = next(chunk.final_norm for chunk in trainer.chunks if chunk.final_norm is not None)
        handle = None
        if step == bad_step and rank == world_size - 1:
            handle = norm.weight.register_hook(lambda grad: grad * math.nan)
        before = weights(trainer)
        metrics = trainer.train_step(step)
        if handle is not None:
            handle.remove()
        after = weights(trainer)
        stays = all(torch.equal(after[name], value) for name, value in before.items())
        found.append((metrics.loss, metrics.skipped, stays))
    return found, trainer.optimizer.num_skipped, trainer.optimizer.step_count, weights(trainer)


def test_a_nan_in_one_copy_makes_both_skip_the_step_and_count_it() -> None:
    bad_step = 3
    expected = train_with_a_nan(0, 1, bad_step)
    results = run_ranks(2, train_with_a_nan, 2, bad_step, timeout_s=60)
    for found, num_skipped, step_count, _ in results:
        assert [loss for loss, _, _ in found] == pytest.approx(
            [loss for loss, _, _ in expected[0]], rel=1e-6
        )
        assert [skipped for _, skipped, _ in found] == [s == bad_step for s in range(STEPS)]
        # The first learning rate is that of the first warm-up step, above 0.
        assert [stays for _, _, stays in found] == [s == bad_step for s in range(STEPS)]
        assert (num_skipped, step_count) == (1, STEPS - 1)
    for name, value in results[0][3].items():
        assert torch.equal(results[1][3][name], value), name
