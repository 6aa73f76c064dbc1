"""Element-wise optimizers against those of torch, and Lion against that of lion-pytorch."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from megacore.buffers import make_buffers
from megacore.buffers.options import BufferOptions
from megacore.optim import (
    SGD,
    Adam,
    DistributedOptimizer,
    Lion,
    OptimizerOptions,
    TorchOptimizer,
    UpdateRule,
)
from megacore.parallel import ProcessGroups
from megacore.parallel.param_info import ParamInfo

Params = list[nn.Parameter]
LR, DECAY = 0.03, 0.2


def make(rule: UpdateRule, params: Params, **fields: float) -> DistributedOptimizer:
    named = [
        (ParamInfo(name=f"w{i}", full_shape=tuple(p.shape), tp_dim=None), p)
        for i, p in enumerate(params)
    ]
    groups = ProcessGroups.single()
    buffers = make_buffers(named, groups=groups, options=BufferOptions(bucket_numel=20))
    options = OptimizerOptions(rule=rule, **{"clip_grad": 0.0, "weight_decay": DECAY, **fields})  # type: ignore[arg-type]
    return DistributedOptimizer(buffers, groups=groups, options=options)


def make_params() -> Params:
    torch.manual_seed(3)
    return [nn.Parameter(torch.randn(shape)) for shape in ((4, 5), (7,), (3, 3))]


def backward(params: Params, seed: int) -> None:
    random = torch.Generator().manual_seed(seed)
    terms = [(p * torch.randn(p.shape, generator=random)).sum() for p in params]
    torch.stack(terms).sum().backward()


ORACLES: dict[str, tuple[UpdateRule, Callable[[Params], Optimizer]]] = {
    "adam": (
        Adam(beta1=0.8, beta2=0.9, eps=1e-6),
        lambda p: torch.optim.Adam(p, betas=(0.8, 0.9), eps=1e-6, weight_decay=DECAY),
    ),
    "sgd": (SGD(momentum=0.0), lambda p: torch.optim.SGD(p, weight_decay=DECAY)),
    "sgd, momentum": (SGD(), lambda p: torch.optim.SGD(p, momentum=0.9, weight_decay=DECAY)),
    "sgd, nesterov": (
        SGD(momentum=0.7, nesterov=True),
        lambda p: torch.optim.SGD(p, momentum=0.7, nesterov=True, weight_decay=DECAY),
    ),
    "rmsprop of torch": (
        TorchOptimizer(factory=lambda p: torch.optim.RMSprop(p, momentum=0.5)),
        lambda p: torch.optim.RMSprop(p, momentum=0.5, weight_decay=DECAY),
    ),
    "adamw of torch": (
        TorchOptimizer(factory=lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9))),
        lambda p: torch.optim.AdamW(p, betas=(0.8, 0.9), weight_decay=DECAY),
    ),
    "adadelta of torch": (
        TorchOptimizer(factory=lambda p: torch.optim.Adadelta(p)),
        lambda p: torch.optim.Adadelta(p, weight_decay=DECAY),
    ),
}


@pytest.mark.parametrize("name", ORACLES)
def test_an_optimizer_is_that_of_torch(name: str) -> None:
    rule, make_oracle = ORACLES[name]
    ours, theirs = make_params(), make_params()
    optimizer, oracle = make(rule, ours), make_oracle(theirs)
    for group in oracle.param_groups:
        group["lr"] = LR
    for step in range(5):
        optimizer.zero_grads()
        oracle.zero_grad()
        backward(ours, step)
        backward(theirs, step)
        optimizer.step(lr=LR)
        oracle.step()
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=2e-6, atol=2e-6)


def test_adam_without_weight_decay_has_the_bits_of_adamw() -> None:
    finals = []
    for rule in (Adam(), Adam.__base__()):
        params = make_params()
        optimizer = make(rule, params, weight_decay=0.0)
        for step in range(3):
            optimizer.zero_grads()
            backward(params, step)
            optimizer.step(lr=LR)
        finals.append([p.detach() for p in params])
    assert all(torch.equal(a, b) for a, b in zip(*finals, strict=True))


def test_lion_is_that_of_its_library() -> None:
    # Printed by lion-pytorch 0.2.5: lr 0.1, betas (0.9, 0.99), weight decay 0.1.
    grads = ([1.0, -2.0, 0.5, 0.1], [-0.5, 1.0, -3.0, 0.2], [0.02, 3.0, 1.0, -0.4])
    expected = (
        [0.8899999856948853, -0.39500001072883606, 0.14750000834465027, 1.8799999952316284],
        [0.9811000227928162, -0.49105000495910645, 0.24602502584457397, 1.761199951171875],
        [0.8712890148162842, -0.5861395001411438, 0.14356479048728943, 1.8435879945755005],
    )
    param = nn.Parameter(torch.tensor([1.0, -0.5, 0.25, 2.0]))
    optimizer = make(Lion(), [param], weight_decay=0.1)
    for grad, after in zip(grads, expected, strict=True):
        optimizer.zero_grads()
        (param * torch.tensor(grad)).sum().backward()
        optimizer.step(lr=0.1)
        torch.testing.assert_close(param.detach(), torch.tensor(after), rtol=1e-6, atol=1e-6)
    mean = optimizer.pieces()[0].tensors["exp_avg"]
    expected_mean = [0.00505100, 0.02029800, -0.01479950, -0.00103990]
    torch.testing.assert_close(mean, torch.tensor(expected_mean), rtol=1e-5, atol=1e-7)


def test_an_optimizer_that_is_not_element_wise_is_refused() -> None:
    rule = TorchOptimizer(factory=lambda p: torch.optim.ASGD(p))
    with pytest.raises(ValueError, match=r"must .* element-wise .* ASGD holds 'eta' not by"):
        make(rule, make_params())
    for factory in (torch.optim.Adafactor, torch.optim.Rprop):
        rule = TorchOptimizer(factory=factory)
        with pytest.raises(ValueError, match=r"element-wise .* (Adafactor|Rprop) mixes elements"):
            make(rule, make_params())
    rule = TorchOptimizer(factory=torch.optim.LBFGS)
    with pytest.raises(ValueError, match=r"trial ended with TypeError: .*closure"):
        make(rule, make_params())
    no_optimizer = TorchOptimizer(factory=lambda p: p)  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match=r"must return a torch.optim.Optimizer, got list"):
        make(no_optimizer, make_params())
