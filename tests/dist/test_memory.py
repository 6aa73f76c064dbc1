"""The memory that ranks really take is that of the formula."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn

from megacore.buffers import make_buffers
from megacore.buffers.options import BufferOptions
from megacore.optim import DistributedOptimizer, memory_row
from megacore.optim.options import OptimizerOptions
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.collectives import barrier
from megacore.parallel.param_info import ParamInfo
from tests.support.distributed import run_ranks

pytestmark = pytest.mark.dist

LAYERS, WIDTH = 8, 1024  # of 4 MiB each in fp32
NUMEL = LAYERS * WIDTH * WIDTH


def memory_bytes() -> tuple[int, int]:
    """Anonymous and shared memory of this process; a page that n processes share counts 1/n.

    Without what only the allocator holds. Torch asks glibc for aligned blocks, and before release
    2.38 a freed one of them does not serve the next request of its size unless a neighbour is free
    as well: with eight gradients one after another, of which never two are alive, up to eight holes
    were seen in the heap, most of them on a busy machine.
    """
    ctypes.CDLL(None).malloc_trim(0)
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    fields = dict(line.split(":") for line in lines[1:])
    anonymous, shared = (int(fields[name].split()[0]) for name in ("Pss_Anon", "Pss_Shmem"))
    return 1024 * anonymous, 1024 * shared


def grown(_rank: int, world_size: int, dtype: str, grads: Literal["float32", "param"]) -> int:
    """How much a rank has grown after two steps with both overlaps.

    Anonymous memory is that of the backward pass, at its highest.
    """
    groups = ProcessGroups.create(Topology(world_size=world_size))
    model = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(LAYERS)))
    model(torch.ones(1, 8)).sum().backward()  # loads what every computation needs
    model = model.to(getattr(torch, dtype))
    gc.collect()
    barrier(groups.world)
    before = sum(memory_bytes())
    barrier(groups.world)
    for layer in model:
        layer.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=getattr(torch, dtype)))
    params = [
        (ParamInfo(name=name, full_shape=(WIDTH, WIDTH), tp_dim=None), param)
        for name, param in model.named_parameters()
    ]
    layout = BufferOptions(grad_dtype=grads, bucket_numel=2 * WIDTH * WIDTH)
    buffers = make_buffers(params, groups=groups, options=layout)
    options = OptimizerOptions(overlap="all")
    optimizer = DistributedOptimizer(buffers, groups=groups, options=options, modules=[model])
    anonymous: list[int] = []
    for buffer in buffers:
        buffer.on_grad(lambda _: anonymous.append(memory_bytes()[0]))
    for _ in range(2):
        optimizer.zero_grads()
        loss = model(torch.ones(1, WIDTH, dtype=getattr(torch, dtype))).float().square().mean()
        optimizer.before_backward(is_last=True)
        loss.backward()
        optimizer.step(lr=1e-3)
    optimizer.finish_param_gather()
    barrier(groups.world)
    at_end, shared = memory_bytes()
    barrier(groups.world)
    return max(*anonymous, at_end) + shared - before


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize(
    ("dtype", "grads"), [("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "param")]
)
def test_ranks_grow_by_the_formula(
    world_size: int, dtype: str, grads: Literal["float32", "param"]
) -> None:
    row = memory_row(params=dtype, grads=dtype if grads == "param" else "float32")
    expected = float(row.per_rank(world_size)) * NUMEL
    # On top: the gradient of a layer and blocks of a million elements that are converted.
    workspace = 4 * WIDTH * WIDTH * 2
    for found in run_ranks(world_size, grown, world_size, dtype, grads, timeout_s=120):
        assert 0.97 * expected < found < 1.02 * expected + workspace
