"""Data-parallel training steps: megacore's optimizer against the three that come with torch.

Trains the same stack of linear layers (about 100 million float32 parameters, few tokens, so that
memory and communication weigh most) with AdamW in several ways, each in fresh processes, and prints
time per step, peak memory and bytes sent. Losses are compared: all must learn the same. Run:

    python benchmarks/bench_optimizer.py [--world-sizes 2,4] [--hidden 1024] [--layers 12]

Bytes are those of the loopback device. For exact ones on a busy machine give the run a network of
its own: unshare -rn sh -c 'ip link set lo up; python benchmarks/bench_optimizer.py'
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from _common import header, options
from megacore.buffers import make_buffers
from megacore.buffers.options import BufferOptions
from megacore.ops.linear import linear
from megacore.optim import AdamW, DistributedOptimizer
from megacore.optim.options import OptimizerOptions
from megacore.parallel import ProcessGroups, Topology
from megacore.parallel.param_info import ParamInfo
from megacore.qualification import choose_kernels

VARIANTS = {
    "megacore": "megacore",
    "megacore-overlap": "megacore, both overlaps",
    "megacore-gloo": "megacore, as on several hosts",
    "megacore-gloo-overlap": "megacore, as on several hosts, both overlaps",
    "megacore-gloo-overlap-plain": "the same with the linear layers of torch",
    "ddp": "DistributedDataParallel + fused AdamW",
    "zero": "DistributedDataParallel + ZeroRedundancyOptimizer",
    "fsdp": "fully_shard (weights kept after forward) + fused AdamW",
}
ADAMW: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
MEMORY_STEPS = 3  # with memory samples, after the timed ones
Step = Callable[[Tensor], float]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Size of the model and of a batch."""

    hidden: int
    layers: int
    tokens: int


class MegacoreLinear(nn.Linear):
    """A linear layer by megacore's matrix product, which is faster on some CPUs."""

    def forward(self, x: Tensor) -> Tensor:
        """Multiply by the weight, without bias."""
        return linear(x, self.weight)


def make_model(shape: Shape, layer: type[nn.Linear] = nn.Linear) -> nn.Sequential:
    torch.manual_seed(0)
    blocks = [
        nn.Sequential(
            layer(shape.hidden, 4 * shape.hidden, bias=False),
            nn.ReLU(),
            layer(4 * shape.hidden, shape.hidden, bias=False),
        )
        for _ in range(shape.layers)
    ]
    model = nn.Sequential(*blocks)
    for param in model.parameters():  # the signal keeps its size, so every weight matters
        nn.init.normal_(param, std=param.shape[1] ** -0.5)
    return model


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    output: Tensor = model(x)
    return (output - x).square().mean()


def with_megacore(model: nn.Sequential, *, overlap: bool, host_memory: bool) -> tuple[Step, str]:
    topology = Topology(world_size=dist.get_world_size())
    groups = ProcessGroups.create(topology, host_memory=host_memory)
    choose_kernels(torch.device("cpu"), world=groups.world)
    options = OptimizerOptions(
        rule=AdamW(beta1=ADAMW["betas"][0], beta2=ADAMW["betas"][1], eps=ADAMW["eps"]),
        weight_decay=ADAMW["weight_decay"],
        clip_grad=0.0,
        overlap="all" if overlap else "none",
    )
    params = [
        (ParamInfo(name=name, full_shape=tuple(param.shape), tp_dim=None), param)
        for name, param in model.named_parameters()
    ]
    layout = BufferOptions(bucket_numel=8_000_000)
    buffers = make_buffers(params, groups=groups, options=layout)
    optimizer = DistributedOptimizer(buffers, groups=groups, options=options, modules=[model])

    def step(x: Tensor) -> float:
        optimizer.zero_grads()
        loss = loss_of(model, x)
        optimizer.before_backward(is_last=True)
        loss.backward()
        optimizer.step(lr=ADAMW["lr"])
        return loss.item()

    return step, "shared memory" if buffers[0].starts_are_free else "gloo"


def with_torch(model: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[Step, str]:
    def step(x: Tensor) -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model, x)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step, "gloo"


def make_step(variant: str, shape: Shape) -> tuple[Step, str]:
    if variant.startswith("megacore"):
        model = make_model(shape, nn.Linear if "plain" in variant else MegacoreLinear)
        host_memory = "gloo" not in variant
        return with_megacore(model, overlap="overlap" in variant, host_memory=host_memory)
    model = make_model(shape)
    if variant == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model:
            fully_shard(block, mesh=mesh, reshard_after_forward=False)
        fully_shard(model, mesh=mesh, reshard_after_forward=False)
        return with_torch(model, torch.optim.AdamW(model.parameters(), fused=True, **ADAMW))
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.nn.parallel import DistributedDataParallel

    wrapped = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if variant == "ddp":
        return with_torch(wrapped, torch.optim.AdamW(wrapped.parameters(), fused=True, **ADAMW))
    sharded = ZeroRedundancyOptimizer(
        wrapped.parameters(), optimizer_class=torch.optim.AdamW, fused=True, **ADAMW
    )
    return with_torch(wrapped, sharded)


def memory_bytes() -> int:
    """Physical memory of this process: a page that n processes share counts 1/n (PSS)."""
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no Pss in /proc/self/smaps_rollup")


class PeakMemory:
    """Samples the memory of this process in a thread; it takes time, so not in timed steps."""

    def __init__(self, interval_s: float) -> None:
        self.peak = 0
        self.samples = 0
        self._interval_s = interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def _sample(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, memory_bytes())
            self.samples += 1
            self._stop.wait(self._interval_s)

    def __enter__(self) -> PeakMemory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()


def loopback_bytes() -> int:
    """Bytes that have crossed the loopback device of this network namespace."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    return 0


def work(args: argparse.Namespace) -> None:
    """One rank of one measurement; rank 0 writes the result."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank, world = args.rank, args.worker_world
    store = dist.FileStore(str(args.folder / "store"), world)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    shape = Shape(hidden=args.hidden, layers=args.layers, tokens=args.tokens)
    load_libraries()
    before = memory_bytes()
    step, way = make_step(args.variant, shape)
    times, cpu_times, losses, sent = [], [], [], []
    for number in range(args.warmup + args.steps):
        x = torch.randn(shape.tokens, shape.hidden, generator=seeded(number, rank))
        dist.barrier()
        bytes_before, start = loopback_bytes(), time.perf_counter()
        cpu_start = time.process_time()
        loss = torch.tensor(step(x))
        times.append(time.perf_counter() - start)
        dist.barrier()
        cpu_times.append(time.process_time() - cpu_start)
        sent.append(loopback_bytes() - bytes_before)
        dist.all_reduce(loss)
        losses.append(loss.item() / world)
    with PeakMemory(interval_s=0.02) as memory:
        for number in range(MEMORY_STEPS):
            step(torch.randn(shape.tokens, shape.hidden, generator=seeded(number, rank)))
        dist.barrier()
    cpu_s = statistics.median(cpu_times[args.warmup :])
    mine = {"times": times, "cpu_s": cpu_s, "peak": memory.peak - before, "samples": memory.samples}
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, mine)
    if rank == 0:
        slowest = [
            max(all_times) for all_times in zip(*(r["times"] for r in everyone), strict=True)
        ]
        result = {
            "variant": args.variant,
            "world_size": world,
            "way": way,
            "step_s": statistics.median(slowest[args.warmup :]),
            "fastest_s": min(slowest[args.warmup :]),
            "cpu_s": max(r["cpu_s"] for r in everyone),
            "peak_bytes": max(r["peak"] for r in everyone),
            "memory_samples": min(r["samples"] for r in everyone),
            "loopback_bytes_per_rank": statistics.median(sent[args.warmup :]) / world,
            "losses": losses,
        }
        (args.folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def load_libraries() -> None:
    """Touch the code that every variant runs, so that it does not count as memory of one."""
    model = make_model(Shape(hidden=8, layers=1, tokens=1))
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    loss_of(model, torch.ones(1, 8)).backward()
    optimizer.step()


def seeded(number: int, rank: int) -> torch.Generator:
    return torch.Generator().manual_seed(1000 * number + rank)


def measure(variant: str, world: int, args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        flags = {"hidden": args.hidden, "layers": args.layers, "tokens": args.tokens}
        flags |= {"warmup": args.warmup, "steps": args.steps, "worker-world": world}
        command = [sys.executable, __file__, "--variant", variant, "--folder", name]
        command += [f"--{key}={value}" for key, value in flags.items()]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen([*command, "--rank", str(rank)], env=env) for rank in range(world)
        ]
        codes = [process.wait(timeout=900) for process in ranks]
        if any(codes):
            raise SystemExit(f"{variant} on {world} ranks failed with codes {codes}")
        result: dict[str, Any] = json.loads((Path(name) / "result.json").read_text())
        return result


def report(results: list[dict[str, Any]], num_params: int, args: argparse.Namespace) -> None:
    print(f"\n{num_params / 1e6:.1f} M float32 parameters, {args.tokens} tokens per rank and step")
    print(f"time: median (fastest) of {args.steps} steps, each as slow as its slowest rank")
    print("CPU: time that a rank's threads computed per step (median, busiest rank)")
    fewest = min(result["memory_samples"] for result in results)
    print("memory: most physical memory that one rank took on top of what it had before the model")
    print("        (PSS: shared pages divided among their users), sampled every 20 ms in")
    print(f"        {MEMORY_STEPS} more steps, {fewest} samples or more per rank")
    print("TCP: bytes through the loopback device per rank and step, protocol included")
    print("load: what else ran on the machine, as processes wanting a core, at the start\n")
    print(
        f"{'':54} {'ranks':>5} {'time ms':>16} {'CPU ms':>7} {'memory MB':>10} {'TCP MB':>8}  way"
    )
    for result in results:
        time_text = f"{result['step_s'] * 1e3:.0f} ({result['fastest_s'] * 1e3:.0f})"
        print(
            f"{VARIANTS[result['variant']]:54} {result['world_size']:5} {time_text:>16} "
            f"{result['cpu_s'] * 1e3:7.0f} {result['peak_bytes'] / 1e6:10.0f} "
            f"{result['loopback_bytes_per_rank'] / 1e6:8.0f}  "
            f"{result['way']} (load {result['load']:.1f})"
        )
    for world in args.worlds:
        formula = num_params * (8 + 8 / world)
        print(f"memory by the formula (8 + 8/{world}) bytes: {formula / 1e6:.0f} MB")
    worst = 0.0
    for result in results:
        [plain] = [
            other["losses"]
            for other in results
            if other["variant"] == "ddp" and other["world_size"] == result["world_size"]
        ]
        pairs = zip(result["losses"], plain, strict=True)
        worst = max(worst, *(abs(a / b - 1) for a, b in pairs))
    print(f"largest difference of a loss from that of DistributedDataParallel: {worst:.1e}")
    for result in results:
        losses = " ".join(f"{loss:.5f}" for loss in result["losses"])
        print(f"losses {result['variant']:18} {result['world_size']}: {losses}")


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--world-sizes", default="2,4")
    parser.add_argument("--variants", default=",".join(VARIANTS), help="which; ddp among them")
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=8)
    parser.add_argument("--warmup", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--json", type=Path)
    for name in ("--variant", "--folder", "--rank", "--worker-world"):
        parser.add_argument(name, help=argparse.SUPPRESS, type=str)
    args = parser.parse_args()
    if args.variant is not None:
        args.folder, args.rank = Path(args.folder), int(args.rank)
        args.worker_world = int(args.worker_world)
        work(args)
        return
    args.worlds = [int(size) for size in args.world_sizes.split(",")]
    print(f"{header('torch')}; {shutil.disk_usage('/dev/shm').total >> 20} MiB /dev/shm")
    num_params = 8 * args.hidden * args.hidden * args.layers
    results = []
    for world in args.worlds:
        for variant in args.variants.split(","):
            load = os.getloadavg()[0]
            results.append({**measure(variant, world, args), "load": load})
            print(f"measured: {VARIANTS[variant]}, {world} ranks", flush=True)
    report(results, num_params, args)
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(results, indent=2))


if __name__ == "__main__":
    main()
