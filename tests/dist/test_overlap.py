"""Overlapping communication with computation changes no bit, and stale weights cannot be used."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from megacore.buffers import StaleWeightsError, make_buffers
from megacore.buffers.options import BufferOptions
from megacore.optim import DistributedOptimizer
from megacore.optim.options import OptimizerOptions
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.param_info import ParamInfo
from megatrain.train.trainer import build_trainer
from tests.dist.test_invariance import make_config
from tests.support.campaigns import representatives
from tests.support.distributed import RankFailed, run_ranks

pytestmark = pytest.mark.dist

STEPS = 4
OVERLAP = {"optimizer.overlap": "all"}
SMALL_BUCKETS = {"optimizer.bucket_numel": 2000}

INTERLEAVED = {
    "parallel.pp": 2,
    "pipeline.schedule": "interleaved_1f1b",
    "pipeline.num_chunks": 2,
}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "dp1": (1, {}),
    "dp2": (2, {}),
    "dp2 not sharded": (2, {"optimizer.distributed": False}),
    "dp3 bfloat16": (3, {"train.dtype": "bfloat16", "train.global_batch_size": 12}),
    "dp4": (4, {}),
    "tp2 dp2 sequence parallel": (4, {"parallel.tp": 2, "parallel.sequence_parallel": True}),
    "pp2 dp2, 2 chunks": (4, INTERLEAVED),
    "dp4, 2 instances": (4, {"optimizer.num_instances": 2}),
    "pp2 dp2 untied": (4, {"parallel.pp": 2, "model.tie_embeddings": False}),
}


def train(_rank: int, world_size: int, changes: dict[str, Any]) -> tuple[list[Any], int]:
    """Losses and norms, with a validation in between, and how many buckets were reduced early."""
    config = make_config(world_size, {**SMALL_BUCKETS, **changes})
    trainer = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
    optimizer, numbers, early = trainer.optimizer, [], 0
    for step in range(STEPS):
        optimizer_step = optimizer.step

        def counted(**arguments: Any) -> Any:
            nonlocal early
            reducer = optimizer._reducer
            if reducer is not None:
                early += len(reducer._pending) + len(reducer._transferred)
            return optimizer_step(**arguments)  # noqa: B023

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer, "step", counted)
            metrics = trainer.train_step(step)
        numbers += [metrics.loss, metrics.grad_norm]
        if step == 1:
            numbers.append(trainer.mean_validation_loss(trainer.evaluate()))
    return [*numbers, trainer.mean_validation_loss(trainer.evaluate())], early


@pytest.mark.parametrize(
    "layout",
    representatives(
        LAYOUTS,
        ["tp2 dp2 sequence parallel", "pp2 dp2, 2 chunks", "dp4, 2 instances", "dp2 not sharded"],
    ),
)
def test_overlap_changes_no_bit(layout: str) -> None:
    world_size, changes = LAYOUTS[layout]
    plain = run_ranks(world_size, train, world_size, changes, timeout_s=120)
    overlapped = run_ranks(world_size, train, world_size, {**changes, **OVERLAP}, timeout_s=120)
    for (numbers, early), (expected, none) in zip(overlapped, plain, strict=True):
        assert numbers == expected
        assert none == 0
        assert early >= (STEPS - 1) * 2, "no bucket was reduced during the backward pass"


@pytest.mark.parametrize("part", ["grads", "params"])
def test_each_overlap_alone_changes_no_bit(part: str) -> None:
    plain = run_ranks(2, train, 2, {}, timeout_s=120)
    overlapped = run_ranks(2, train, 2, {"optimizer.overlap": part}, timeout_s=120)
    assert [numbers for numbers, _ in overlapped] == [numbers for numbers, _ in plain]


class TwoLayers(nn.Module):
    """May go around the second layer's own forward, as some models do."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first = nn.Linear(8, 8, bias=False)
        self.second = nn.Linear(8, 8, bias=False)
        self.goes_around = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        if self.goes_around:
            return nn.functional.linear(x, self.second.weight)
        result: torch.Tensor = self.second(x)
        return result


def make_optimizer(
    model: nn.Module, world_size: int, *, host_memory: bool = True, **fields: Any
) -> DistributedOptimizer:
    groups = ProcessGroups.create(Topology(world_size=world_size), host_memory=host_memory)
    params = [
        (ParamInfo(name=name, full_shape=tuple(param.shape), tp_dim=None), param)
        for name, param in model.named_parameters()
    ]
    layout = BufferOptions(bucket_numel=1, grad_dtype=fields.pop("grad_dtype", "float32"))
    buffers = make_buffers(params, groups=groups, options=layout)
    options = OptimizerOptions(**fields)
    return DistributedOptimizer(buffers, groups=groups, options=options, modules=[model])


def one_step(model: nn.Module, optimizer: DistributedOptimizer, *, is_last: bool = True) -> None:
    optimizer.zero_grads()
    loss = model(torch.ones(2, 8)).square().mean()
    optimizer.before_backward(is_last=is_last)
    loss.backward()
    optimizer.step(lr=0.1)


def stale(_rank: int) -> None:
    model = TwoLayers()
    optimizer = make_optimizer(model, 2, overlap="params")
    one_step(model, optimizer)
    model.goes_around = True
    one_step(model, optimizer, is_last=False)


def test_a_forward_with_stale_weights_is_an_error_that_names_the_parameter() -> None:
    with pytest.raises(RankFailed, match=r"StaleWeightsError: second\.weight .* stale weights"):
        run_ranks(2, stale)


def completed(_rank: int) -> bool:
    model = TwoLayers()
    optimizer = make_optimizer(model, 2, overlap="params")
    one_step(model, optimizer)
    model.goes_around = True
    optimizer.finish_param_gather()
    one_step(model, optimizer)
    return True


def test_weights_may_be_read_in_any_way_once_all_are_gathered() -> None:
    assert all(run_ranks(2, completed))


def late(_rank: int) -> None:
    model = TwoLayers()
    optimizer = make_optimizer(model, 2, overlap="grads")
    one_step(model, optimizer)
    optimizer.zero_grads()
    for _ in range(2):
        optimizer.before_backward(is_last=True)
        model(torch.ones(2, 8)).square().mean().backward()


def test_a_gradient_after_its_bucket_was_reduced_is_an_error_that_names_the_parameter() -> None:
    with pytest.raises(RankFailed, match=r"second\.weight receives a gradient after its bucket"):
        run_ranks(2, late)


def uneven(rank: int) -> tuple[list[str], list[list[float]]]:
    """Rank 1 never uses the second layer in later steps: collectives must still match."""
    model = TwoLayers()
    optimizer = make_optimizer(model, 2, overlap="grads", clip_grad=0.0)
    one_step(model, optimizer)
    optimizer.zero_grads()
    x = torch.full((2, 8), 1.0 + rank)
    output = model.first(x) if rank == 1 else model(x)
    optimizer.before_backward(is_last=True)
    output.square().mean().backward()
    optimizer.step(lr=0.1)
    return optimizer.missing_grads(), [p.flatten().tolist() for p in model.parameters()]


def test_a_rank_without_some_gradients_names_them_and_keeps_the_order_of_collectives() -> None:
    (none, params), (missing, others) = run_ranks(2, uneven)
    assert (none, missing) == ([], ["second.weight"])
    assert params == others


def repeated(rank: int, host_memory: bool) -> list[list[float]]:
    """A step is begun anew when rank 1 has started the reduction of fewer buckets than rank 0."""
    model = TwoLayers()
    optimizer = make_optimizer(model, 2, host_memory=host_memory, overlap="grads", clip_grad=0.0)
    one_step(model, optimizer)
    for is_repeated in (True, False):
        x = torch.full((2, 8), 1.0 + rank)
        output = model.first(x) if rank == 1 and is_repeated else model(x)
        optimizer.zero_grads()
        optimizer.before_backward(is_last=True)
        output.square().mean().backward()
    optimizer.step(lr=0.1)
    one_step(model, optimizer)
    return [param.flatten().tolist() for param in model.parameters()]


def test_a_step_may_be_begun_anew_though_ranks_have_reduced_different_buckets() -> None:
    results = [run_ranks(2, repeated, host_memory) for host_memory in (True, False)]
    assert results[0][0] == results[0][1] == results[1][0] == results[1][1]


def test_a_parameter_outside_the_model_is_refused() -> None:
    model, other = TwoLayers(), nn.Linear(2, 2, bias=False)
    info = ParamInfo(name="lonely", full_shape=(2, 2), tp_dim=None)
    groups = ProcessGroups.single()
    options = OptimizerOptions(overlap="params")
    buffers = make_buffers([(info, other.weight)], groups=groups)
    with pytest.raises(ValueError, match="lonely belongs to no module"):
        DistributedOptimizer(buffers, groups=groups, options=options, modules=[model])
    assert issubclass(StaleWeightsError, RuntimeError)
