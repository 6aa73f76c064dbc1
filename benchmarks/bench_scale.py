"""What a run of many ranks costs one of its ranks, without the other ranks.

    python benchmarks/bench_scale.py [--worlds 64,1024,16384,131072] [--out benchmarks/results/scale_cpu.txt]

Three parts, each measured in processes of its own:

- ``start``: rank 0 of a recipe is built over process groups that nobody else is in, on torch's meta
  device, with the layout of the recipe and 4 sequences per data-parallel rank.
- ``checkpoint``: the boxes of all ranks of a made-up model whose tensors are cut into flat ranges, as
  many per rank as that recipe has at 16,384 ranks. Rank 0 joins them once; at each save it writes
  both indexes. Each rank that resumes opens the index and looks its boxes up.
- ``why-hung``: the recorded calls of ranks of which one is late, compared on one rank.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import multiprocessing
import resource
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch.distributed.checkpoint.metadata import StorageMeta

from _common import finish, header, options
from megatrain.checkpoint.checked_files import FileSum
from megatrain.checkpoint.chunks import boxes_of_range
from megatrain.checkpoint.format import CheckpointIndex, TrainState, read_index
from megatrain.checkpoint.planner import RankBoxes, merge_boxes
from megatrain.checkpoint.tensor_checks import check_index
from megatrain.checkpoint.tensor_file import read_tensor_index, write_tensor_index
from megatrain.checkpoint.tensor_index import padded
from megatrain.checkpoint.torch_metadata import write_torch_metadata

WORLDS = (64, 1024, 16384, 131072)
RECIPE = Path(__file__).parents[1] / "examples/recipes/deepseek-v3-2048.toml"
KINDS = ("main_param", "exp_avg", "exp_avg_sq")
# Ranks that cut the tensors of one pipeline stage and expert rank into flat ranges.
_STAGE = 64
_SHAPE = (4096, 7168)


def in_child(fn: Callable[..., Mapping[str, float]], *args: Any) -> Mapping[str, float]:
    """Call a function in a new process; adds the growth of its memory, MB."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def run() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        found = fn(*args)
        grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        sender.send({**found, "MB": grown / 1024})

    process = context.Process(target=run)
    process.start()
    sender.close()
    found: Mapping[str, float] = receiver.recv()
    process.join()
    return found


class Timer:
    """Seconds of processor time since the last call."""

    def __init__(self) -> None:
        self._last = time.process_time()

    def __call__(self) -> float:
        now, before = time.process_time(), self._last
        self._last = time.process_time()
        return now - before


# ---- checkpoints ---------------------------------------------------------------------------------


def boxes_of_ranks(world_size: int, per_rank: int) -> Iterator[RankBoxes]:
    """Yield the boxes that each rank writes: flat ranges of the tensors of its stage."""
    num_tensors = max(1, _STAGE * per_rank // (8 * len(KINDS)))
    numel = _SHAPE[0] * _SHAPE[1]
    for rank in range(world_size):
        stage, position = divmod(rank, _STAGE)
        start, end = (num_tensors * numel * at // _STAGE for at in (position, position + 1))
        keys: list[str] = []
        rows: list[tuple[int, tuple[int, ...], tuple[int, ...]]] = []
        for tensor in range(start // numel, -(-end // numel)):
            first, last = max(start - tensor * numel, 0), min(end - tensor * numel, numel)
            for kind in KINDS:
                keys.append(f"{kind}.layers.{stage}.moe.experts.fc{tensor}.weight")
                boxes = boxes_of_range(_SHAPE, first, last)
                rows += [(len(keys) - 1, at, sizes) for at, sizes in boxes]
        sizes = padded([sizes for _, _, sizes in rows], 2, 1)
        yield RankBoxes(
            keys=tuple(keys),
            dtypes=("float32",) * len(keys),
            shapes=(_SHAPE,) * len(keys),
            tensors=np.array([tensor for tensor, _, _ in rows], np.int32),
            offsets=padded([at for _, at, _ in rows], 2, 0),
            sizes=sizes,
            lengths=4 * sizes.prod(axis=1) + 1260,
            heads=np.full(len(rows), 896, np.int32),
        )


def plan_and_save(world_size: int, per_rank: int, folder: Path) -> Mapping[str, float]:
    """Join the boxes of all ranks, as rank 0 does once, and write what it writes at each save."""
    ranks = list(boxes_of_ranks(world_size, per_rank))
    names = [f"__{rank}_0.distcp" for rank in range(world_size)]
    timer = Timer()
    index = merge_boxes(ranks, names)
    joined = timer()
    sums = {name: FileSum(num_bytes=1 << 40, crc32=1 << 31) for name in names}
    sums["tensors.idx"] = write_tensor_index(folder / "tensors.idx", index)
    written = timer()
    meta = StorageMeta(checkpoint_id=str(folder), save_id="x")
    sums[".metadata"] = write_torch_metadata(folder / ".metadata", index, meta)
    for_torch = timer()
    state = TrainState(step=1, samples=1, optimizer={})
    text = CheckpointIndex(state=state, config={}, topology={}, files=sums).to_json()
    (folder / "index.json").write_text(text)
    return {
        "boxes": index.num_boxes,
        "plan s": joined,
        "index s": written,
        "index MB": sums["tensors.idx"].num_bytes / 1e6,
        ".metadata s": for_torch,
        ".metadata MB": sums[".metadata"].num_bytes / 1e6,
        "index.json s": timer(),
    }


def resume(world_size: int, per_rank: int, folder: Path) -> Mapping[str, float]:
    """Look up the boxes of a rank of another layout, as every rank does."""
    timer = Timer()
    index = read_index(folder)
    read = timer()
    tensors = read_tensor_index(folder / "tensors.idx", index.files["tensors.idx"], mapped=True)
    opened = timer()
    mine = list(boxes_of_ranks(min(world_size, _STAGE), per_rank))[world_size % 7]
    timer()
    found = 0
    for number, at, sizes in zip(mine.tensors, mine.offsets, mine.sizes, strict=True):
        stored = tensors.find(mine.keys[number])
        assert stored is not None
        found += sum(1 for _ in stored.overlapping(at.tolist(), sizes.tolist()))
    assert found >= len(mine.tensors)
    return {"index.json s": read, "open s": opened, "look up s": timer()}


def check(folder: Path) -> Mapping[str, float]:
    """Check what the index says, as rank 0 does."""
    index = read_index(folder)
    tensors = read_tensor_index(folder / "tensors.idx", index.files["tensors.idx"], mapped=True)
    timer = Timer()
    check_index(tensors, index.files)
    return {"check s": timer()}
