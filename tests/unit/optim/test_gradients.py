from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from megacore.buffers import ParamGradBuffer
from megacore.optim.gradients import (
    grad_ranges,
    is_counted,
    merge_neighbours,
    norm_parts,
)
from megacore.parallel import Group, ProcessGroups, Topology
from megacore.parallel.param_info import ParamInfo


class Handle:
    """Stands for a torch process group that is never used."""


def groups_at(*, tp: int = 0, etp: int = 0) -> ProcessGroups:
    """Groups of one of two tensor-parallel ranks; only positions are looked at."""
    solo = Group.solo()
    names = ("world", "cp", "dp", "dp_cp", "pp", "ep", "etp_ep", "expert_dp", "holders")
    fields = dict.fromkeys((*names, "expert_holders", "embedding"), solo)
    pair = Handle()
    return ProcessGroups(
        topology=Topology(world_size=2, tp=2),
        rank=tp,
        tp=Group("tp", (0, 1), tp, pair),  # type: ignore[arg-type]
        etp=Group("etp", (0, 1), etp, pair),  # type: ignore[arg-type]
        **fields,
    )


def make_info(**fields: object) -> ParamInfo:
    return ParamInfo(**{"name": "w", "full_shape": (4,), "tp_dim": None, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "tp", "etp", "counted"),
    [
        ({}, 0, 1, True),
        ({}, 1, 0, False),
        ({"tp_dim": 0}, 1, 0, True),
        ({"expert": True}, 1, 0, True),
        ({"expert": True}, 0, 1, False),
        ({"shared": "embedding"}, 0, 0, True),
        ({"shared": "embedding", "is_shared_copy": True}, 0, 0, False),
        ({"tp_dim": 0, "shared": "embedding", "is_shared_copy": True}, 1, 0, False),
    ],
)
def test_each_parameter_counts_on_one_of_its_holders(
    fields: dict[str, object], tp: int, etp: int, counted: bool
) -> None:
    assert is_counted(make_info(**fields), groups_at(tp=tp, etp=etp)) is counted


def make_buffer(numels: list[int], infos: list[ParamInfo], **options: int) -> ParamGradBuffer:
    params = [
        (
            replace(info, full_shape=(numel * (1 if info.tp_dim is None else 2),)),
            nn.Parameter(torch.zeros(numel)),
        )
        for numel, info in zip(numels, infos, strict=True)
    ]
    return ParamGradBuffer(params, dp_group=Group.solo(), **options)


def test_neighbours_merge_across_padding_but_not_across_buckets_or_flags() -> None:
    infos = [make_info(name=f"p{i}") for i in range(5)]
    buffer = make_buffer([10, 10, 10, 10, 300], infos, bucket_numel=300)
    flags = [True, True, False, False, False]
    runs = merge_neighbours((p, flags[p.param_index]) for p in buffer.owned_pieces())
    assert [[p.param_index for p in run] for run in runs] == [[4], [3, 2], [1, 0]]


def test_the_norm_leaves_out_what_another_rank_counts() -> None:
    infos = [make_info(tp_dim=0), make_info(name="replicated"), make_info(name="v", tp_dim=0)]
    buffer = make_buffer([70, 3, 5], infos)
    for index, value in enumerate([2.0, 100.0, 3.0]):
        buffer.main_grad(index).fill_(value)
    cpu = torch.device("cpu")
    first = norm_parts(grad_ranges([buffer], groups_at(tp=0)), device=cpu)
    second = norm_parts(grad_ranges([buffer], groups_at(tp=1)), device=cpu)
    assert second.tolist() == [70 * 4 + 5 * 9, 0]
    assert first.tolist() == [70 * 4 + 5 * 9 + 3 * 10000, 0]
    assert first.dtype == torch.float64


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("index", [0, 1])
def test_a_bad_gradient_is_flagged_even_where_it_does_not_count(bad: float, index: int) -> None:
    infos = [make_info(tp_dim=0), make_info(name="replicated")]
    buffer = make_buffer([70, 3], infos)
    buffer.main_grad(index)[1] = bad
    parts = norm_parts(grad_ranges([buffer], groups_at(tp=1)), device=torch.device("cpu"))
    assert parts.tolist() == [0.0, 1.0]
