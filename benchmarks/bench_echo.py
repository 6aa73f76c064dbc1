"""Offload planners side by side: time to plan, balance reached, clones needed.

    python benchmarks/bench_echo.py [--tokens 4096] [--steps 2] [--rounds 40] [--out FILE]
    python benchmarks/bench_echo.py --parts steps [--ranks 2 4] [--train-rounds 12]
    python benchmarks/bench_echo.py --parts gpu
    python benchmarks/bench_echo.py --parts large [--out benchmarks/results/echo_large_cpu.txt]

The routings are those of ``megacore echo simulate``: Zipf, log-normal, drift and bursts, mild to
severe. "echo" is the planner of the ECHO documents, "balanced n%" ours with that
tolerance, "eplb-style" our Python of greedy replication and packing on the same step's counts. Plan
times are those of the whole Python call, the contenders taking turns on the same inputs.

steps: training steps of a model whose router sends half of all copies to one expert, on gloo ranks,
without clones, with clones, and with a router that deals tokens evenly. The three take turns. Ranks
without work wait without using a core, so where ranks share cores imbalance costs less than on
machines of their own.

large: processor time of a layer's plan on the CPU in groups of up to 576 ranks, and of rerouting
the tokens of one rank, by the kernel and by the torch operations that GPUs without kernels run.

gpu: the planner and the rerouting of 4096 tokens on a GPU, each a captured graph that is replayed
on changing counts, timed between events; and how many of 10,000 random plans are those of the CPU.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks need it, and share the cores

import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from _common import finish, header, on_gloo_ranks, options, take_turns
from megacore.moe import OffloadPlan, plan_offload, plan_offload_on_device
from megacore.moe.echo.reroute import SourceRow, reroute, reroute_ids_reference
from megatrain.echo_study.baselines import place_by_load
from megatrain.echo_study.simulate import remote_fraction
from megatrain.echo_study.workloads import MODEL_SHAPES, WORKLOADS, RoutingShape, routing_steps

Counts = np.ndarray
SKEWS = (0.25, 0.6, 1.2)
QUALITY_SHAPES = (
    ("deepseek-v3", 8),
    ("deepseek-v3", 16),
    ("deepseek-v3", 32),
    ("deepseek-v3", 64),
    ("qwen3", 8),
    ("qwen3", 32),
    ("qwen3", 64),
    ("mixtral", 4),
    ("mixtral", 8),
)
TOLERANCES = (0.0, 0.01, 0.05)
LARGE_SHAPES = ((64, 256), (128, 256), (256, 256), (576, 576))
TIMED_SHAPES = tuple((ep, experts) for ep in (8, 32, 64) for experts in (128, 256))


def routings(shape: RoutingShape, num_steps: int) -> list[Counts]:
    return [
        counts
        for name in WORKLOADS
        for skew in ((0.6,) if name == "zipf" else SKEWS)
        for counts in routing_steps(name, shape, num_steps=num_steps, seed=1234, skew=skew)
    ]


def slot_limited(num_ranks: int, num_experts: int, num_spare_slots: int) -> Counts:
    """Equally hot experts on as many ranks as makes the slots matter most; the rest is idle."""
    experts_per_rank = num_experts // num_ranks
    share = num_spare_slots / experts_per_rank
    hot_ranks = max(1, round(2 * share / (1 + share) * num_ranks))
    counts = np.zeros((num_ranks, num_experts), np.int64)
    counts[:, : hot_ranks * experts_per_rank] = 1000
    return counts


def median_us(run: Callable[[Counts], object], inputs: list[Counts], rounds: int) -> float:
    times = []
    for counts in inputs:
        for _ in range(rounds):
            start = time.perf_counter_ns()
            run(counts)
            times.append((time.perf_counter_ns() - start) / 1e3)
    return statistics.median(times)


def time_table(rounds: int) -> str:
    lines = [
        "Plan time, median microseconds (2 slots; last column: 1 slot, the least favourable loads)",
        f"{'EP':>4} {'experts':>8} {'balanced 1%':>12} {'balanced 0%':>12} {'echo':>11} "
        f"{'eplb-style':>11} {'slot-limited':>13}",
    ]
    for num_ranks, num_experts in TIMED_SHAPES:
        shape = RoutingShape(num_ranks=num_ranks, num_experts=num_experts, top_k=8, num_tokens=512)
        inputs = routings(shape, 1)
        hard = [slot_limited(num_ranks, num_experts, 1)]

        def eplb(counts: Counts, num_ranks: int = num_ranks) -> object:
            return place_by_load(counts.sum(axis=0), num_ranks=num_ranks, num_spare_slots=2)

        times = (
            median_us(lambda c: plan_offload(c, num_spare_slots=2), inputs, rounds),
            median_us(lambda c: plan_offload(c, num_spare_slots=2, tolerance=0.0), inputs, rounds),
            median_us(lambda c: plan_offload(c, num_spare_slots=2, planner="echo"), inputs, rounds),
            median_us(eplb, inputs, max(1, rounds // 10)),
            median_us(lambda c: plan_offload(c, num_spare_slots=1), hard, rounds),
        )
        cells = " ".join(
            f"{value:>{width}.0f}" for value, width in zip(times, (12, 12, 11, 11, 13), strict=True)
        )
        lines.append(f"{num_ranks:>4} {num_experts:>8} {cells}")
    return "\n".join(lines)


def most_sends(plan: OffloadPlan) -> int:
    experts_per_rank = plan.num_experts // plan.num_ranks
    homes = plan.slot_expert[plan.slot_expert >= 0] // experts_per_rank
    return int(np.bincount(homes, minlength=1).max())


def plan_cell(inputs: list[Counts], **options: object) -> str:
    plans = [plan_offload(counts, **options) for counts in inputs]  # type: ignore[arg-type]
    imbalance = [plan.imbalance_after for plan in plans]
    clones = np.mean([plan.num_clones for plan in plans])
    sends = np.mean([most_sends(plan) for plan in plans])
    return f"{np.mean(imbalance):.4f}/{max(imbalance):.3f}/{clones:5.1f}/{sends:3.1f}"


def same_load_cell(inputs: list[Counts], num_spare_slots: int) -> str:
    """The balanced method where no rank need be below the load that echo reaches."""
    plans = []
    for counts in inputs:
        echo = plan_offload(counts, num_spare_slots=num_spare_slots, planner="echo")
        tolerance = min(1.0, max(0.01, echo.imbalance_after - 1))
        plans.append(plan_offload(counts, num_spare_slots=num_spare_slots, tolerance=tolerance))
    mean = np.mean([plan.imbalance_after for plan in plans])
    return f"{mean:.4f}/{np.mean([plan.num_clones for plan in plans]):5.1f}"


def eplb_cell(inputs: list[Counts], num_spare_slots: int) -> str:
    imbalance, moved = [], []
    for counts in inputs:
        loads = counts.sum(axis=0)
        placement = place_by_load(loads, num_ranks=len(counts), num_spare_slots=num_spare_slots)
        rank_loads = placement.rank_loads(loads)
        imbalance.append(rank_loads.max() / rank_loads.mean())
        moved.append(placement.num_moved_experts)
    return f"{np.mean(imbalance):.4f}/{max(imbalance):.3f}/{np.mean(moved):5.1f}"


def quality_table(num_tokens: int, num_steps: int) -> str:
    lines = [
        f"Balance over all workloads, {num_tokens} tokens per rank: highest load over the mean, as",
        "mean / worst / clones (eplb-style: experts moved) / most clones of one rank's experts",
        "equal load: balanced with echo's load as goal, 1% at least: mean / clones",
        f"{'model':<12}{'EP':>3}{'slots':>6}  {'before':>11}"
        + "".join(f"  {name:>22}" for name in ("echo", *(f"balanced {t:.0%}" for t in TOLERANCES)))
        + f"  {'equal load':>12}  {'eplb-style':>19}",
    ]
    for model, num_ranks in QUALITY_SHAPES:
        num_experts, top_k = MODEL_SHAPES[model]
        shape = RoutingShape(
            num_ranks=num_ranks, num_experts=num_experts, top_k=top_k, num_tokens=num_tokens
        )
        inputs = routings(shape, num_steps)
        before = [plan_offload(c, num_spare_slots=0).imbalance_before for c in inputs]
        for slots in (1, 2, 4):
            cells = [
                plan_cell(inputs, num_spare_slots=slots, planner="echo"),
                *(plan_cell(inputs, num_spare_slots=slots, tolerance=t) for t in TOLERANCES),
            ]
            lines.append(
                f"{model:<12}{num_ranks:>3}{slots:>6}  {np.mean(before):>5.2f}/{max(before):>5.2f}"
                + "".join(f"  {cell:>22}" for cell in cells)
                + f"  {same_load_cell(inputs, slots):>12}  {eplb_cell(inputs, slots):>19}"
            )
    return "\n".join(lines)


def num_leaving(plan: OffloadPlan, domain_size: int) -> int:
    """Clones on a rank outside the domain of their home."""
    rank, slot = np.nonzero(plan.slot_expert >= 0)
    home = plan.slot_expert[rank, slot] // (plan.num_experts // plan.num_ranks)
    return int((home // domain_size != rank // domain_size).sum())


def domain_table(num_tokens: int, num_steps: int) -> str:
    shape = RoutingShape(num_ranks=64, num_experts=256, top_k=8, num_tokens=num_tokens)
    inputs = routings(shape, num_steps)
    anywhere = [plan_offload(c, num_spare_slots=2) for c in inputs]
    lines = [
        "Domains and locality (EP 64, 256 experts, 2 slots, balanced 1%; all workloads, means)",
        f"{'domain':>7} {'max/mean':>9} {'clones':>7} {'leave their domain':>19} "
        f"{'without domains':>16} {'tokens that cross ranks':>24}",
    ]
    for domain_size in (64, 32, 16, 8, 4):
        plans = [plan_offload(c, num_spare_slots=2, domain_size=domain_size) for c in inputs]
        remote = [remote_fraction(c, plan) for c, plan in zip(inputs, plans, strict=True)]
        lines.append(
            f"{domain_size:>7} {np.mean([p.imbalance_after for p in plans]):>9.4f} "
            f"{np.mean([p.num_clones for p in plans]):>7.1f} "
            f"{np.mean([num_leaving(p, domain_size) for p in plans]):>19.1f} "
            f"{np.mean([num_leaving(p, domain_size) for p in anywhere]):>16.1f} "
            f"{100 * np.mean(remote):>23.1f}%"
        )
    return "\n".join(lines)


def processor_us(run: Callable[[], object], rounds: int) -> float:
    """Median processor time of a call, which other processes do not lengthen."""
    run()
    times = []
    for _ in range(rounds):
        start = time.process_time_ns()
        run()
        times.append((time.process_time_ns() - start) / 1e3)
    return statistics.median(times)


def large_row(workload: str, shape: RoutingShape, rounds: int) -> str:
    counts = torch.from_numpy(next(iter(routing_steps(workload, shape, num_steps=1, seed=1))))
    plan = plan_offload_on_device(counts, rank=0, num_spare_slots=2)
    copies = torch.repeat_interleave(torch.arange(shape.num_experts), counts[0])
    order = torch.randperm(copies.numel(), generator=torch.Generator().manual_seed(0))
    ids, probs = copies[order].view(-1, shape.top_k), torch.ones(shape.num_tokens, shape.top_k)
    row = SourceRow(
        total=counts[0],
        first=torch.zeros_like(counts[0]),
        slot_expert=plan.slot_expert,
        tokens=plan.sent,
    )
    assert torch.equal(reroute(ids, probs, row)[0], reroute_ids_reference(ids, *vars(row).values()))
    times = (
        processor_us(lambda: plan_offload_on_device(counts, rank=0, num_spare_slots=2), rounds),
        processor_us(lambda: reroute(ids, probs, row), rounds),
        processor_us(lambda: reroute_ids_reference(ids, *vars(row).values()), 5),
    )
    mean = float(plan.load_before.sum()) / shape.num_ranks
    return (
        f"{shape.num_ranks:>5} {shape.num_experts:>8}  {workload:<10}"
        f"{int(plan.load_before.max()) / mean:>8.2f} {int(plan.summary[0]) / mean:>8.4f} "
        f"{int(plan.summary[1]):>7}" + "".join(f"{value:>14.0f}" for value in times)
    )


def large_table(rounds: int) -> str:
    lines = [
        "Large groups: processor time, median microseconds; 4,096 tokens x 8 copies, 2 slots, 1%",
        f"{'ranks':>5} {'experts':>8}  {'workload':<10}{'before':>8} {'after':>8} {'clones':>7}"
        f"{'plan':>14}{'reroute':>14}{'reroute torch':>14}",
    ]
    for num_ranks, num_experts in LARGE_SHAPES:
        shape = RoutingShape(num_ranks=num_ranks, num_experts=num_experts, top_k=8, num_tokens=4096)
        lines += [large_row(workload, shape, rounds) for workload in ("lognormal", "zipf")]
    return "\n".join(lines)


KINDS = ("without clones", "with clones", "evenly dealt")


def steps_on_rank(_rank: int, world_size: int, rounds: int) -> dict[str, object]:
    """Seconds of the steps of each kind, and the highest load of a rank over the mean."""
    import torch

    from megatrain.config import Config, resolve
    from megatrain.train.trainer import build_trainer

    trainers = {}
    for kind in KINDS:
        config = Config(
            model={"hidden_size": 256, "num_layers": 2, "num_heads": 4, "seq_length": 256},
            parallel={"ep": world_size},
            moe={
                "num_experts": 8,
                "top_k": 2,
                "ffn_hidden_size": 512,
                "expert_bias": True,
                "expert_bias_rate": 0.0,
                "echo": {"num_spare_slots": 2 if kind == "with clones" else 0},
            },
            train={"microbatch_size": 4, "global_batch_size": 8 * world_size, "eval_interval": 0},
            debug={"force_balanced": kind == "evenly dealt"},
        )
        config = resolve(config, world_size, vocab_size=256, cuda=False)
        trainers[kind] = build_trainer(config, world_size=world_size, device=torch.device("cpu"))
        for layer in trainers[kind].chunks[0].moe_layers().values():
            layer.router.expert_bias[:2] = torch.tensor([2.0, 0.1])
    numbers = dict.fromkeys(KINDS, 0)
    loads: dict[str, float] = {}

    def step(kind: str) -> None:
        metrics = trainers[kind].train_step(numbers[kind])
        numbers[kind] += 1
        assert metrics.experts is not None
        per_rank = [
            np.reshape(load, (world_size, -1)).sum(1) for load in metrics.experts.load.values()
        ]
        loads[kind] = float(np.mean([load.max() / load.mean() for load in per_rank]))
        if metrics.experts.echo:
            echo = metrics.experts.echo.values()
            loads[kind] = float(np.mean([counts.imbalance_after for counts in echo]))

    contenders = {kind: (lambda kind=kind: step(kind)) for kind in KINDS}
    return {"seconds": take_turns(contenders, rounds=rounds, warmup=2), "loads": loads}


def steps_table(world_size: int, rounds: int) -> str:
    found = on_gloo_ranks(world_size, steps_on_rank, world_size, rounds)[0]
    lines = [
        f"Training steps on {world_size} gloo ranks: 2 MoE layers, 8 experts of 256 x 512, top-2, "
        f"2 microbatches of 1,024 tokens per rank; {rounds} rounds",
        f"{'router':<16}{'max/mean':>9}{'fastest ms':>12}{'median ms':>11}{'to evenly dealt':>19}",
    ]
    even = statistics.median(found["seconds"]["evenly dealt"])
    for kind in KINDS:
        seconds = found["seconds"][kind]
        median = statistics.median(seconds)
        lines.append(
            f"{kind:<16}{found['loads'][kind]:>9.3f}{1e3 * min(seconds):>12.0f}"
            f"{1e3 * median:>11.0f}{median / even:>18.2f}x"
        )
    return "\n".join(lines)


def replayed_us(run: Callable[[], object], load: Callable[[int], None], rounds: int) -> float:
    """Median time of a replay of what ``run`` queues; ``load`` changes its static inputs before."""
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    times = []
    for number in range(rounds):
        load(number)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(1e3 * start.elapsed_time(end))
    return statistics.median(times)


def gpu_times(num_ranks: int, num_experts: int, rounds: int) -> tuple[float, float]:
    """Planning, and rerouting the tokens of rank 0, in microseconds."""
    shape = RoutingShape(num_ranks=num_ranks, num_experts=num_experts, top_k=8, num_tokens=4096)
    inputs = [torch.from_numpy(np.array(c, np.int64)).cuda() for c in routings(shape, 2)]
    static = inputs[0].clone()
    plan_us = replayed_us(
        lambda: plan_offload_on_device(static, rank=0, num_spare_slots=2),
        lambda number: static.copy_(inputs[number % len(inputs)]),
        rounds,
    )
    ids, rows = [], []
    random = torch.Generator().manual_seed(0)
    for counts in inputs:
        plan = plan_offload_on_device(counts, rank=0, num_spare_slots=2)
        copies = torch.repeat_interleave(torch.arange(num_experts), counts[0].cpu())
        ids.append(copies[torch.randperm(copies.numel(), generator=random)].view(-1, 8).cuda())
        rows.append(
            SourceRow(
                total=counts[0].clone(),
                first=torch.zeros_like(counts[0]),
                slot_expert=plan.slot_expert,
                tokens=plan.sent.clone(),
            )
        )
    static_ids, static_row = ids[0].clone(), SourceRow(**vars(rows[0]))
    static_row = SourceRow(**{name: part.clone() for name, part in vars(static_row).items()})
    probs = torch.rand(ids[0].shape, device="cuda")

    def load(number: int) -> None:
        static_ids.copy_(ids[number % len(ids)])
        for name, part in vars(rows[number % len(rows)]).items():
            getattr(static_row, name).copy_(part)

    return plan_us, replayed_us(lambda: reroute(static_ids, probs, static_row), load, rounds)


def gpu_table(rounds: int) -> str:
    """Times of both kernels, and how many random plans are those of the CPU."""
    if not torch.cuda.is_available():
        return "gpu: no NVIDIA GPU here"
    lines = [f"microseconds on {torch.cuda.get_device_name()}, 2 slots, captured and replayed"]
    lines.append(f"{'ranks x experts':<18}{'plan':>8}{'reroute':>10}")
    for num_ranks, num_experts in TIMED_SHAPES:
        plan_us, reroute_us = gpu_times(num_ranks, num_experts, rounds)
        lines.append(f"{f'{num_ranks} x {num_experts}':<18}{plan_us:>8.1f}{reroute_us:>10.1f}")
    random, equal, total = np.random.default_rng(0), 0, 10_000
    for number in range(total):
        num_ranks, per_rank = int(random.integers(1, 65)), int(random.integers(1, 9))
        heat = random.random(num_ranks * per_rank) ** (number % 6)
        counts = (random.random((num_ranks, num_ranks * per_rank)) * heat * 3000).astype(np.int64)
        settings = {
            "num_spare_slots": number % 4,
            "planner": "echo" if number % 5 == 4 else "balanced",
            "tolerance": (0.0, 0.01)[number % 2],
        }
        host, rank = torch.from_numpy(counts), number % num_ranks
        plans = [
            plan_offload_on_device(each, rank=rank, **settings) for each in (host.cuda(), host)
        ]
        numbers = [[*vars(plan).values()][2:-1] for plan in plans]  # without the time
        equal += all(torch.equal(a.cpu(), b) for a, b in zip(*numbers, strict=True))
    lines.append(f"{equal} of {total} random plans are those of the CPU")
    return "\n".join(lines)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="per rank, for the quality tables")
    parser.add_argument("--steps", type=int, default=2, help="per workload and skew")
    parser.add_argument("--rounds", type=int, default=40, help="timed calls per input")
    parser.add_argument(
        "--parts", nargs="+", choices=("plans", "steps", "large", "gpu"), default=["plans", "steps"]
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="for the steps")
    parser.add_argument("--train-rounds", type=int, default=12, help="timed steps of each kind")
    parser.add_argument("--out", type=Path, help="also write the output here")
    args = parser.parse_args()
    parts = [f"{header('numpy', 'torch')}\n# one thread"]
    if "plans" in args.parts:
        parts.append(time_table(args.rounds))
        parts.append(quality_table(args.tokens, args.steps))
        parts.append(domain_table(args.tokens, args.steps))
    if "steps" in args.parts:
        parts += [steps_table(ranks, args.train_rounds) for ranks in args.ranks]
    if "large" in args.parts:
        parts.append(large_table(args.rounds))
    if "gpu" in args.parts:
        parts.append(gpu_table(max(args.rounds, 200)))
    finish(parts, args.out)


if __name__ == "__main__":
    main()
