"""What a run of many ranks costs one of its ranks, without the other ranks.

    python benchmarks/bench_scale.py [--worlds 64,1024] [--out benchmarks/results/scale_cpu.txt]

Three parts, each measured in processes of its own:

- ``start``: rank 0 of a recipe is built over process groups that nobody else is in, on torch's meta
  device, with the layout of the recipe and 4 sequences per data-parallel rank.
- ``checkpoint``: the boxes of all ranks of a made-up model whose tensors are cut into flat ranges,
  as many per rank as that recipe has at 16,384 ranks. Rank 0 joins them once; at each save it
  writes both indexes. Each rank that resumes opens the index and looks its boxes up.
- ``why-hung``: the recorded calls of ranks of which one is late, compared on one rank; also from
  files, for up to 1,024 ranks.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"

import functools
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
MOST_FILES = 1024
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
        """Return them."""
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


# ---- the start -----------------------------------------------------------------------------------


def start(world_size: int) -> Mapping[str, float]:
    """Build rank 0 of the recipe; count the process groups it asks for, and its boxes."""
    import torch
    import torch.distributed as dist

    from megatrain.checkpoint.chunks import chunks_of
    from megatrain.checkpoint.planner import written_chunks
    from megatrain.config import load_config, resolve
    from megatrain.dry_run.world import fake_world, same_data
    from megatrain.launch.failure import watch_times
    from megatrain.train.trainer import build_trainer

    sequences = 4 * world_size // 16  # tp 4 x pp 4 of the recipe
    changes = [("train.global_batch_size", str(sequences))]
    if world_size < 256:  # fewer than the ranks over which the recipe shares its experts
        changes.append(("parallel.ep", str(world_size // 4)))
    config = load_config(RECIPE, changes)
    resolved = resolve(config, world_size, vocab_size=config.model.vocab_size or 0, cuda=False)
    calls = []
    new_group = dist.new_group

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return new_group(*args, **kwargs)

    dist.new_group = counted
    timer = Timer()
    with fake_world(world_size, 0):
        trainer = build_trainer(
            resolved,
            world_size=world_size,
            device=torch.device("meta"),
            data=same_data(resolved),
            initialize=False,
        )
        built = timer()
        pieces = [piece for piece in trainer.pieces() if not piece.info.is_shared_copy]
        mine = written_chunks(chunks_of(pieces, trainer.groups))
        planned = timer()
    interval_s = watch_times(world_size, peer_timeout_s=20.0).interval_s
    return {
        "build s": built,
        "new_group": len(calls),
        "requests/s": 2 * world_size / interval_s,
        "boxes": len(mine),
        "plan s": planned,
    }


# ---- why-hung ------------------------------------------------------------------------------------


def why_hung(world_size: int) -> Mapping[str, float]:
    """Compare the calls of ranks that wait for one rank, which is late in its data."""
    from megacore.calls.processes import Identity
    from megacore.calls.records import STARTED, CallRecord, RankCalls
    from megatrain.hang.diagnosis import diagnose

    world = ("world", tuple(range(world_size)))
    late = world_size // 3
    rings = []
    for rank in range(world_size):
        number = 8 if rank != late else 7
        records = [
            CallRecord(
                serial=serial,
                time_s=float(serial),
                stream=world,
                number=serial,
                kind="all_reduce_",
                group="world",
                dtype="float32",
                shape=(4,),
                site="step.py:1",
                state=STARTED if serial == 8 else 3,
            )
            for serial in range(1, number + 1)
        ]
        rings.append(
            RankCalls(
                identity=Identity(rank=rank, pid=rank + 1, start=1, host="a", space="s"),
                world_size=world_size,
                run="r",
                since=0.0,
                counts={world: number},
                records=records,
            )
        )
    timer = Timer()
    found = diagnose(rings)
    assert str(late) in str(found)
    return {"diagnose s": timer()}


def write_rings(run: Path, ranks: range, world_size: int, *, failed: bool) -> Mapping[str, float]:
    """Write full rings of some ranks in training, of which one is late.

    Args:
        run: Folder of the run.
        ranks: Ranks whose rings are written.
        world_size: Ranks, in groups of 8 neighbours, of every eighth, and of all.
        failed: Whether the call in which the others wait has failed, as after a timeout.
    """
    from megacore.calls.records import FAILED
    from megacore.calls.ring import CallRing

    for rank in ranks:
        ring = CallRing.create(run, rank=rank, world_size=world_size, run="a")
        assert ring is not None
        tp = ring.group("tp", range(rank // 8 * 8, rank // 8 * 8 + 8))
        dp = ring.group("dp", range(rank % 8, world_size, 8))
        world = ring.group("world", range(world_size))
        step = [
            (tp, "all_gather", 1024),
            (tp, "reduce_scatter_", 1024),
            (tp, "all_gather", 4096),
            (tp, "reduce_scatter_", 4096),
            (dp, "reduce_scatter_", 1 << 20),
            (dp, "all_gather", 1 << 20),
            (world, "all_reduce_", 4),
        ]
        for group, kind, numel in step * 150:  # more than a ring holds
            with group.begin(kind, (numel,), "bfloat16"):
                pass
        if rank != world_size // 3:
            last = tp.begin("all_gather", (1024,), "bfloat16")
            if failed:
                last.move_to(FAILED)
    return {}


def read_copies(run: Path, world_size: int) -> Mapping[str, float]:
    """Read and compare the copied rings of ranks."""
    from megatrain.hang.diagnosis import diagnosis_of_run

    timer = Timer()
    found = diagnosis_of_run(run)
    seconds = timer()
    assert found is not None
    assert found.num_read == world_size
    assert found.findings[0].ranks == (world_size // 3,)
    return {"diagnose s": seconds, "per rank ms": 1e3 * seconds / world_size}


def why_hung_by_files(world_size: int, *, failed: bool) -> Mapping[str, float]:
    """Measure on rings that were copied into a run's folder, as after a failure."""
    from megacore.calls.records import remove_rings, save_rings

    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder)
        for first in range(0, world_size, 128):  # open files of a process
            ranks = range(first, min(first + 128, world_size))
            in_child(functools.partial(write_rings, failed=failed), run, ranks, world_size)
        save_rings(run)
        remove_rings(run)
        return in_child(read_copies, run, world_size)


# ---- the table -----------------------------------------------------------------------------------


def table(title: str, rows: Mapping[int, Mapping[str, float]]) -> str:
    """Format a table with a row per number of ranks."""
    names = list(next(iter(rows.values())))
    lines = [title, f"{'ranks':>8}" + "".join(f"{name:>15}" for name in names)]
    for world_size, row in rows.items():
        cells = (
            f"{value:15,.3f}" if name.endswith((" s", " ms")) else f"{value:15,.0f}"
            for name, value in row.items()
        )
        lines.append(f"{world_size:8,}" + "".join(cells))
    return "\n".join(lines)


def main() -> None:
    """Measure and print the tables."""
    parser = options(__doc__)
    parser.add_argument("--worlds", default=",".join(map(str, WORLDS)), help="numbers of ranks")
    parser.add_argument("--boxes", type=int, default=80, help="boxes that a rank writes")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    args = parser.parse_args()
    worlds = [int(world) for world in args.worlds.split(",")]
    plans, resumes, checks = {}, {}, {}
    for world in worlds:
        with tempfile.TemporaryDirectory() as folder:
            plans[world] = in_child(plan_and_save, world, args.boxes, Path(folder))
            resumes[world] = in_child(resume, world, args.boxes, Path(folder))
            checks[world] = in_child(check, Path(folder))
    parts = [
        table(
            "checkpoint: rank 0 plans once (with the boxes it gets), then writes at each save",
            plans,
        ),
        table("checkpoint: every rank that resumes", resumes),
        table("checkpoint: rank 0 that resumes, in addition", checks),
        table(
            f"start: rank 0 of {RECIPE.name}, 4 sequences per data-parallel rank (64: ep 16)",
            {world: in_child(start, world) for world in worlds if world % 64 == 0},
        ),
        table("why-hung: one rank, without reading", {w: in_child(why_hung, w) for w in worlds}),
        *(
            table(
                f"why-hung: files of full rings, ranks whose call {state}",
                {
                    w: why_hung_by_files(w, failed=state == "has failed")
                    for w in worlds
                    if w <= MOST_FILES
                },
            )
            for state in ("waits", "has failed")
        ),
    ]
    finish([header("torch", "numpy"), *parts], args.out)


if __name__ == "__main__":
    main()
