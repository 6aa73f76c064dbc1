from __future__ import annotations

import pytest
import torch
from torch import nn

from megacore.buffers import make_buffers
from megacore.optim import DistributedOptimizer, ParamGroup
from megacore.optim.options import OptimizerOptions
from megacore.parallel import ProcessGroups
from megacore.parallel.param_info import ParamInfo

GROUPS = (
    ParamGroup(pattern="a.*", lr_scale=0.5),
    ParamGroup(pattern="*.bias", weight_decay=0.3),
)


def test_groups_act_as_those_of_torch() -> None:
    names = ("a.weight", "a.bias", "b.weight", "b.bias")
    torch.manual_seed(0)
    start = {name: torch.randn(5, 3) for name in names}
    ours = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    theirs = {name: nn.Parameter(value.clone()) for name, value in start.items()}
    infos = {
        name: ParamInfo(
            name=name, full_shape=(5, 3), tp_dim=None, weight_decay=name.endswith("weight")
        )
        for name in names
    }
    groups = ProcessGroups.single()
    options = OptimizerOptions(clip_grad=0.0, weight_decay=0.1)
    params = [(infos[name], ours[name]) for name in names]
    buffers = make_buffers(params, groups=groups)
    optimizer = DistributedOptimizer(buffers, groups=groups, options=options, param_groups=GROUPS)
    # The first group that matches wins: a.bias keeps its own weight decay, which is none.
    wanted = {"a.weight": (0.05, 0.1), "a.bias": (0.05, 0.0)}
    wanted |= {"b.weight": (0.1, 0.1), "b.bias": (0.1, 0.3)}
    oracle = torch.optim.AdamW(
        [
            {"params": [theirs[name]], "lr": lr, "weight_decay": decay}
            for name, (lr, decay) in wanted.items()
        ],
        betas=options.rule.decays,
    )
    for _ in range(3):
        optimizer.zero_grads()
        oracle.zero_grad()
        for model in (ours, theirs):
            sum((model[name].square() * (i + 1)).sum() for i, name in enumerate(names)).backward()
        optimizer.step(lr=0.1)
        oracle.step()
    for name in names:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-5, atol=1e-6)


def test_a_negative_number_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lr_scale of 'a' must be .*, got -1.0"):
        ParamGroup(pattern="a", lr_scale=-1.0)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_names() -> None:
    names = ("layers.0.mlp.up", "layers.0.mlp.down", "layers.0.attn.qkv", "embedding.weight")
    params = [
        (ParamInfo(name=name, full_shape=(2,), tp_dim=None), nn.Parameter(torch.ones(2)))
        for name in names
    ]
    groups = ProcessGroups.single()
    buffers = make_buffers(params, groups=groups)
    with pytest.raises(ValueError, match=r"none of the 4 parameters; nearest: layers\.0\.mlp"):
        DistributedOptimizer(
            buffers,
            groups=groups,
            param_groups=[
                ParamGroup(pattern="layers.*.attn.*"),
                ParamGroup(pattern="layers.*.mpl.*"),
            ],
        )
