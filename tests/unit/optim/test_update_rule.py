"""The protocol of optimizers: several rules in one buffer, number formats, skipped steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from megacore.buffers import make_buffers
from megacore.buffers.options import BufferOptions
from megacore.ops.optim import ControlAt
from megacore.optim import (
    AdamW,
    DistributedOptimizer,
    OptimizerOptions,
    ParamGroup,
    Rates,
    StateTensor,
    UpdateRule,
)
from megacore.optim.update_rule import StateDtype
from megacore.parallel import ProcessGroups
from megacore.parallel.param_info import ParamInfo

NAMES = ("a.weight", "a.bias", "b.weight", "b.bias")


@dataclass(frozen=True, kw_only=True)
class Mean(UpdateRule):
    """Momentum that is a mean of gradients."""

    decay: float = 0.5
    dtype: StateDtype = "float32"

    @property
    def state(self) -> tuple[StateTensor, ...]:
        return (StateTensor(name="mean", dtype=self.dtype),)

    def step(self, param: Tensor, grad: Tensor, state: Mapping[str, Tensor], rates: Rates) -> None:
        mean = state["mean"].mul_(self.decay).add_(grad.mul_(1.0 - self.decay))
        param.mul_(rates.keep).sub_(mean * rates.lr)


def make(
    groups: tuple[ParamGroup, ...], dtype: torch.dtype = torch.float32, **fields: float
) -> tuple[DistributedOptimizer, dict[str, nn.Parameter]]:
    torch.manual_seed(0)
    params = {name: nn.Parameter(torch.randn(5, 3).to(dtype)) for name in NAMES}
    infos = [ParamInfo(name=name, full_shape=(5, 3), tp_dim=None) for name in NAMES]
    single = ProcessGroups.single()
    buffers = make_buffers(
        list(zip(infos, params.values(), strict=True)),
        groups=single,
        options=BufferOptions(bucket_numel=100),
    )
    options = OptimizerOptions(**{"clip_grad": 0.0, "weight_decay": 0.1, **fields})  # type: ignore[arg-type]
    return DistributedOptimizer(
        buffers, groups=single, options=options, param_groups=groups
    ), params


def backward(params: Mapping[str, nn.Parameter]) -> None:
    terms = [(p.float().square() * (i + 1)).sum() for i, p in enumerate(params.values())]
    torch.stack(terms).sum().backward()


def test_each_rule_updates_its_parameters_with_its_own_bias_corrections() -> None:
    slow = AdamW(beta1=0.8, beta2=0.99)
    groups = (ParamGroup(pattern="a.*", rule=slow), ParamGroup(pattern="b.bias", rule=Mean()))
    optimizer, ours = make(groups)
    theirs = {name: nn.Parameter(p.detach().clone()) for name, p in ours.items()}
    oracle = torch.optim.AdamW(
        [
            {"params": [theirs["a.weight"], theirs["a.bias"]], "betas": slow.decays},
            {"params": [theirs["b.weight"]], "betas": AdamW().decays},
        ],
        lr=0.1,
        weight_decay=0.1,
    )
    mean, bias = torch.zeros(5, 3), theirs["b.bias"].detach().clone()
    for _ in range(4):
        optimizer.zero_grads()
        oracle.zero_grad()
        backward(ours)
        backward(theirs)
        mean = 0.5 * mean + 0.5 * 8 * bias
        bias = bias * (1 - 0.1 * 0.1) - 0.1 * mean
        optimizer.step(lr=0.1)
        oracle.step()
    for name in NAMES[:3]:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(ours["b.bias"].detach(), bias, rtol=1e-5, atol=1e-6)
    assert optimizer.step_count == 4


def test_the_state_of_a_parameter_is_that_of_its_rule() -> None:
    optimizer, _ = make((ParamGroup(pattern="*.bias", rule=Mean(dtype="bfloat16")),))
    kinds = {piece.info.name: set(piece.tensors) for piece in optimizer.pieces()}
    adamw = {"main_param", "exp_avg", "exp_avg_sq"}
    mean = {"main_param", "mean"}
    assert kinds == dict(zip(NAMES, (adamw, mean, adamw, mean), strict=True))
    storages = {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
        for piece in optimizer.pieces()
        for kind, tensor in piece.tensors.items()
        if kind != "main_param"
    }
    assert optimizer.state_bytes == sum(storages.values()) == 2 * 15 * (4 + 4 + 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_formats_of_state_and_parameters_are_converted(dtype: torch.dtype) -> None:
    rule = Mean(dtype="bfloat16")
    optimizer, params = make((ParamGroup(pattern="*", rule=rule),), dtype)
    mains = {piece.info.name: piece.tensors["main_param"].clone() for piece in optimizer.pieces()}
    backward(params)
    buffer = optimizer.buffers[0]
    grads = {name: buffer.main_grad(i).clone() for i, name in enumerate(NAMES)}
    optimizer.step(lr=0.5)
    for piece in optimizer.pieces():
        mean = 0.5 * grads[piece.info.name].flatten()
        expected = mains[piece.info.name] * (1 - 0.5 * 0.1) - mean * 0.5
        torch.testing.assert_close(piece.tensors["main_param"], expected)
        assert torch.equal(piece.tensors["mean"], mean.bfloat16())
        found = params[piece.info.name].detach().flatten()
        assert torch.equal(found, piece.tensors["main_param"].to(dtype))


@pytest.mark.parametrize("rule", [AdamW(), Mean()])
def test_a_skipped_step_changes_nothing(rule: UpdateRule) -> None:
    optimizer, params = make((ParamGroup(pattern="*", rule=rule),))
    backward(params)
    optimizer.step(lr=0.1)
    before = [{k: t.clone() for k, t in piece.tensors.items()} for piece in optimizer.pieces()]
    optimizer.zero_grads()
    (params["a.bias"].sum() * float("nan")).backward()
    assert optimizer.step(lr=0.1).skipped
    for piece, old in zip(optimizer.pieces(), before, strict=True):
        assert all(torch.equal(tensor, old[kind]) for kind, tensor in piece.tensors.items())


def test_another_object_than_a_rule_is_refused() -> None:
    with pytest.raises(TypeError, match=r"rule must be a megacore.optim.UpdateRule, got str"):
        OptimizerOptions(rule="adamw")  # type: ignore[arg-type]


def test_a_rule_without_a_step_is_named() -> None:
    class Nothing(UpdateRule):
        state = ()

    control = torch.ones(len(ControlAt), dtype=torch.float64)
    rates = Rates.of(control, lr_scale=1.0, weight_decay=0.0)
    with pytest.raises(NotImplementedError, match="Nothing must define step, or update"):
        Nothing().step(torch.zeros(1), torch.zeros(1), {}, rates)
