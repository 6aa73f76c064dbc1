"""Mixture of experts on the CPU: operations, a whole layer, and a model on several ranks.

    python benchmarks/bench_moe.py [--only ops layer ranks exchange] [--threads 2] [--rounds 7]

* ``ops``: the grouped product against a loop of ``torch.mm`` and ``torch._grouped_mm``, balanced
  and skewed; permutation and activation against plain torch.
* ``layer``: forward and backward pass of an MoE layer against the blocks of ``transformers``, with
  equal weights.
* ``ranks``: training steps of ``examples/demo.toml`` without its pipeline on gloo ranks, the same
  global batch with its experts on 1, 2 and 4 ranks.
* ``exchange``: rows to their experts and back, by collectives and through memory of peers.

Every figure is the median of several rounds, in which the contestants take turns. With one thread
it is processor time, which a busy machine disturbs less; with several, and on ranks, it is wall
time. A ratio above 1 means that megacore is faster.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks need it, before torch is imported

import torch
from torch import Tensor, nn

from _common import header, keep_memory, on_gloo_ranks, options
from megacore.moe import AllToAllDispatcher, GroupedExperts, MoELayer, TopKRouter
from megacore.moe.dispatchers import (
    Dispatcher,
    ExpertPlacement,
    HostPeers,
    LocalDispatcher,
    PeerDispatcher,
    StaticBudget,
    StaticDispatcher,
    static_receive_rows,
)
from megacore.moe.options import RouterOptions
from megacore.ops import grouped_gemm, permute, sort_by_expert, swiglu, unpermute
from megacore.ops.activations import swiglu_reference
from megacore.ops.grouped_product import grouped_product
from megacore.ops.permutation import (
    permute_reference,
    sort_by_expert_reference,
    unpermute_reference,
)
from megacore.parallel import ProcessGroups, Topology
from megatrain.config import Config, load_config, resolve
from megatrain.train.trainer import build_trainer

EXCHANGED_TOKENS = 512
DEMO = Path(__file__).parents[1] / "examples" / "demo.toml"


def medians(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median time of each contestant in ms."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    times: dict[str, list[float]] = {name: [] for name in runs}
    for round_number in range(rounds + 1):
        for name, run in runs.items():
            start = clock()
            run()
            if round_number > 0:  # the first round warms up
                times[name].append((clock() - start) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def splits(kind: str, num_experts: int, rows_per_expert: int) -> list[int]:
    """Rows per expert: all the same, or falling as 1/(rank + 1) with the last quarter empty."""
    if kind == "balanced":
        return [rows_per_expert] * num_experts
    busy = max(1, num_experts * 3 // 4)
    weights = [1 / (rank + 1) for rank in range(busy)]
    total = rows_per_expert * num_experts
    counts = [int(total * weight / sum(weights)) for weight in weights]
    counts[0] += total - sum(counts)
    return counts + [0] * (num_experts - busy)


def mm_loop(x: Tensor, w: Tensor, counts: list[int]) -> Tensor:
    """What a user writes without a grouped product."""
    y = x.new_empty(x.shape[0], w.shape[1])
    row = 0
    for expert, count in enumerate(counts):
        if count:
            torch.mm(x[row : row + count], w[expert].t(), out=y[row : row + count])
        row += count
    return y


def mm_loop_backward(
    x: Tensor, w: Tensor, grad: Tensor, counts: list[int], main_grad: Tensor
) -> Tensor:
    """Gradient of the input, and that of the weights added to float32 memory."""
    grad_x = torch.empty_like(x)
    row = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(row, row + count)
            torch.mm(grad[rows], w[expert], out=grad_x[rows])
            main_grad[expert].addmm_(
                grad[rows].t().to(main_grad.dtype), x[rows].to(main_grad.dtype)
            )
        row += count
    return grad_x


def torch_grouped(x: Tensor, w: Tensor, counts: list[int]) -> Callable[[], Tensor] | None:
    """``torch._grouped_mm`` if this build runs it here."""
    grouped = getattr(torch, "_grouped_mm", None)
    if grouped is None:
        return None
    offsets = torch.tensor(counts).cumsum(0).to(torch.int32)
    transposed = w.transpose(1, 2)

    def run() -> Tensor:
        result: Tensor = grouped(x, transposed, offs=offsets)
        return result

    try:
        run()
    except RuntimeError as error:  # torch's NotImplementedError of a missing kernel is one, too
        print(f"  torch._grouped_mm does not run here: {str(error).splitlines()[0]}")
        return None
    return run


def bench_grouped(arguments: argparse.Namespace, dtype: torch.dtype) -> None:
    experts, hidden, width = arguments.experts, arguments.hidden, arguments.width
    w = torch.randn(experts, width, hidden).to(dtype)
    main_grad = torch.zeros(experts, width, hidden)
    name = str(dtype).removeprefix("torch.")
    print(f"grouped product, {name}: {experts} experts, {hidden} -> {width}; forward / backward")
    print(
        "  rows/expert  shape     torch.mm loop      _grouped_mm   megacore          mm/megacore  "
        "_grouped_mm/megacore"
    )
    for rows in arguments.rows:
        for kind in ("balanced", "skewed"):
            counts = splits(kind, experts, rows)
            m_splits = torch.tensor(counts)
            x = torch.randn(sum(counts), hidden).to(dtype)
            grad = torch.randn(sum(counts), width).to(dtype)

            def ours_backward(x=x, grad=grad, m_splits=m_splits) -> None:  # type: ignore[no-untyped-def]
                grouped_product("input_grad", grad, w, m_splits)
                grouped_product("weight_grad", grad, x, m_splits, out=main_grad, accumulate=True)

            runs: dict[str, Callable[[], object]] = {
                "mm": lambda x=x, counts=counts: mm_loop(x, w, counts),
                "mm back": lambda x=x, grad=grad, counts=counts: mm_loop_backward(
                    x, w, grad, counts, main_grad
                ),
                "ours": lambda x=x, m_splits=m_splits: grouped_gemm(x, w, m_splits),
                "ours back": ours_backward,
            }
            theirs = torch_grouped(x, w, counts)
            if theirs is not None:
                runs["grouped"] = theirs
            ms = medians(runs, arguments.rounds)
            flops = 2e-6 * sum(counts) * hidden * width
            grouped_ms = f"{ms['grouped']:8.2f} ms" if "grouped" in ms else "          -"
            grouped_ratio = f"{ms['grouped'] / ms['ours']:.2f}" if "grouped" in ms else "-"
            print(
                f"  {rows:11d}  {kind:8s}  {ms['mm']:6.2f} / {ms['mm back']:6.2f} ms"
                f"  {grouped_ms}  {ms['ours']:6.2f} / {ms['ours back']:6.2f} ms"
                f"  {ms['mm'] / ms['ours']:4.2f} / {ms['mm back'] / ms['ours back']:4.2f}"
                f"  {grouped_ratio:>8s}   ({flops / ms['ours']:.0f} GFLOP/s forward)"
            )


def bench_rows(arguments: argparse.Namespace, dtype: torch.dtype) -> None:
    tokens, hidden, width, experts, k = (
        4096,
        arguments.hidden,
        arguments.width,
        arguments.experts,
        2,
    )
    x = torch.randn(tokens, hidden).to(dtype)
    chosen = torch.rand(tokens, experts).topk(k).indices
    probs = torch.rand(tokens, k)
    row_map, _ = sort_by_expert(chosen, experts)
    rows = permute(x, row_map, tokens * k)
    inner = torch.randn(tokens * k, 2 * width).to(dtype)
    row_probs = torch.rand(tokens * k)

    def reference_permute() -> None:
        row_map, _ = sort_by_expert_reference(chosen, experts)
        permute_reference(x, row_map, tokens * k)

    ms = medians(
        {
            "permute": lambda: permute(x, sort_by_expert(chosen, experts)[0], tokens * k),
            "permute torch": reference_permute,
            "unpermute": lambda: unpermute(rows, row_map, probs),
            "unpermute torch": lambda: unpermute_reference(rows, row_map, probs),
            "swiglu": lambda: swiglu(inner, row_probs),
            "swiglu torch": lambda: swiglu_reference(inner, row_probs),
        },
        arguments.rounds,
    )
    name = str(dtype).removeprefix("torch.")
    print(f"{tokens} tokens, {hidden} wide, {k} of {experts} experts, {name}")
    for op in ("permute", "unpermute", "swiglu"):
        print(
            f"  {op:10s} torch {ms[op + ' torch']:7.2f} ms   megacore {ms[op]:7.2f} ms"
            f"   torch/megacore {ms[op + ' torch'] / ms[op]:.2f}"
        )


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """An MoE layer and its input."""

    family: str
    tokens: int
    hidden: int
    width: int
    experts: int
    top_k: int


LAYERS = (
    *(
        LayerSize(
            family="Mixtral", tokens=tokens, hidden=hidden, width=2 * hidden, experts=8, top_k=2
        )
        for hidden in (32, 96, 256, 512)
        for tokens in (64, 512, 2048)
    ),
    LayerSize(family="Qwen3Moe", tokens=512, hidden=256, width=96, experts=64, top_k=8),
    LayerSize(family="Qwen3Moe", tokens=2048, hidden=256, width=96, experts=64, top_k=8),
)


def their_block(size: LayerSize, experts: str | None, dtype: torch.dtype) -> nn.Module:
    """The block of ``transformers``; ``experts`` names one of its ways to compute them."""
    import transformers
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    config: Any
    if size.family == "Mixtral":
        config = transformers.MixtralConfig(
            hidden_size=size.hidden,
            intermediate_size=size.width,
            num_local_experts=size.experts,
            num_experts_per_tok=size.top_k,
        )
    else:
        config = transformers.Qwen3MoeConfig(
            hidden_size=size.hidden,
            moe_intermediate_size=size.width,
            num_experts=size.experts,
            num_experts_per_tok=size.top_k,
            norm_topk_prob=True,
        )
    config._experts_implementation = experts
    block = {"Mixtral": MixtralSparseMoeBlock, "Qwen3Moe": Qwen3MoeSparseMoeBlock}[size.family]
    made: nn.Module = block(config).to(dtype)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return made


def our_layer(theirs: nn.Module, size: LayerSize) -> MoELayer:
    """The layer with the weights of a block."""
    weights = dict(theirs.named_parameters())
    fc1 = weights["experts.gate_up_proj"].detach().clone()
    return MoELayer(
        router=TopKRouter(
            RouterOptions(num_experts=size.experts, top_k=size.top_k),
            nn.Parameter(weights["gate.weight"].detach().clone()),
        ),
        dispatcher=LocalDispatcher(ExpertPlacement.of(ProcessGroups.single(), size.experts)),
        experts=GroupedExperts(
            nn.Parameter(fc1.unflatten(1, (2, size.width))),
            nn.Parameter(weights["experts.down_proj"].detach().clone()),
            activation="swiglu",
        ),
    )


def forward_backward(layer: nn.Module, x: Tensor, grad: Tensor) -> Tensor:
    """The output; gradients of weights and of ``x`` are made anew."""
    x.grad = None
    layer.zero_grad(set_to_none=True)
    output: Tensor = layer(x)
    output.backward(grad)
    return output


def bench_layers(arguments: argparse.Namespace, dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    print(f"MoE layer, forward and backward, {name}; transformers as a loop and as grouped_mm")
    print("  block     tokens  hidden  width  experts       loop    grouped_mm   megacore   ratios")
    for size in LAYERS:
        loop, grouped = (their_block(size, way, dtype) for way in ("eager", "grouped_mm"))
        ours = our_layer(loop, size)
        # One sequence: theirs is (1, T, H), ours (T, 1, H).
        theirs_x = torch.randn(1, size.tokens, size.hidden).to(dtype).requires_grad_()
        ours_x = theirs_x.detach().view(size.tokens, 1, size.hidden).clone().requires_grad_()
        grad = torch.randn(1, size.tokens, size.hidden).to(dtype)
        expected = forward_backward(loop, theirs_x, grad)
        found = forward_backward(ours, ours_x, grad.view_as(ours_x))
        distance = (found.view_as(expected) - expected).norm() / expected.norm()
        # Theirs rounds the scores to bfloat16, so that some tokens go to other experts.
        if not distance < (1e-5 if dtype == torch.float32 else 0.2):
            raise SystemExit(f"{size}: the outputs differ by {distance:.1e}")

        def run(layer: nn.Module, x: Tensor, grad: Tensor = grad) -> Callable[[], object]:
            return lambda: forward_backward(layer, x, grad.view_as(x))

        ms = medians(
            {
                "loop": run(loop, theirs_x),
                "grouped": run(grouped, theirs_x),
                "ours": run(ours, ours_x),
            },
            # Small layers take less than a millisecond: a median of few rounds does not repeat.
            max(arguments.rounds, 400_000 // (size.tokens * size.hidden)),
        )
        print(
            f"  {size.family:8s}  {size.tokens:6d}  {size.hidden:6d}  {size.width:5d}"
            f"  {size.top_k:2d} of {size.experts:<3d}  {ms['loop']:8.2f} ms"
            f"  {ms['grouped']:8.2f} ms  {ms['ours']:8.2f} ms   {ms['loop'] / ms['ours']:.2f}  "
            f"{ms['grouped'] / ms['ours']:.2f}"
        )


def demo_config(world_size: int, changes: dict[str, Any]) -> Config:
    """The demo without its pipeline."""
    settings = {
        "parallel.pp": 1,
        "train.eval_interval": 0,
        "moe.static_budget": 4.0,  # nothing can run over
        **changes,
    }
    config = load_config(DEMO, [(key, str(value)) for key, value in settings.items()])
    return resolve(config, world_size, vocab_size=256, cuda=False)


def demo_steps(_rank: int, world_size: int, rounds: int) -> dict[str, list[float]]:
    """Seconds of each step by layout; the layouts take turns, all ranks together."""
    layouts: dict[str, dict[str, Any]] = {"ep 1": {"parallel.ep": 1}}
    if world_size == 4:
        layouts["ep 2"], layouts["ep 4"] = {"parallel.ep": 2}, {"parallel.ep": 4}
        layouts["ep 4, allgather"] = {"parallel.ep": 4, "moe.dispatcher": "allgather"}
        for way in ("collective", "peer"):
            static = {"moe.dispatcher": "static", "moe.static_transport": way}
            layouts[f"ep 4, static {way}"] = {"parallel.ep": 4, **static}
    trainers = {
        name: build_trainer(
            demo_config(world_size, changes), world_size=world_size, device=torch.device("cpu")
        )
        for name, changes in layouts.items()
    }
    times: dict[str, list[float]] = {name: [] for name in trainers}
    for step in range(rounds + 1):
        for name, trainer in trainers.items():
            metrics = trainer.train_step(step)
            if step > 0:  # the first one warms up
                times[name].append(metrics.step_time_s)
    return times


def bench_ranks(arguments: argparse.Namespace) -> None:
    config = demo_config(1, {"parallel.ep": 1})
    tokens = config.train.global_batch_size * config.model.seq_length
    print(
        f"demo model: {tokens} tokens per step in all layouts, {config.moe.top_k} of "
        f"{config.moe.num_experts} experts; ranks with one thread each, {os.cpu_count()} cores"
    )
    for world_size in (1, 4):
        times = on_gloo_ranks(world_size, demo_steps, world_size, arguments.rounds)[0]
        base = statistics.median(times["ep 1"])
        for name, seconds in times.items():
            median = statistics.median(seconds)
            print(
                f"  {world_size} rank{'s' if world_size > 1 else ' '}  {name:23s}"
                f"  {1e3 * median:7.1f} ms  {tokens / median:8.0f} tokens/s"
                f"   {base / median:.2f} of ep 1"
            )


@dataclass(frozen=True)
class Choice:
    """Decisions in place of a router's."""

    probs: Tensor
    expert_ids: Tensor
    num_copies: Tensor | None = None


def exchanges(rank: int, world_size: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Seconds of a dispatch and a combine with their gradients, by way; the ways take turns."""
    groups = ProcessGroups.create(Topology(world_size=world_size, ep=world_size))
    placement = ExpertPlacement.of(groups, 8)
    torch.manual_seed(rank)
    scores = torch.rand(EXCHANGED_TOKENS, 8)
    probs, ids = scores.softmax(-1).topk(2, dim=-1)
    x = torch.randn(EXCHANGED_TOKENS, arguments.hidden, requires_grad=True)
    grad = torch.randn(EXCHANGED_TOKENS, arguments.hidden)
    budget = StaticBudget(2.0)
    ways: dict[str, Dispatcher] = {
        "alltoall": AllToAllDispatcher(placement),
        "static collective": StaticDispatcher(placement, budget=budget),
        "static peer": PeerDispatcher(
            placement,
            peers=HostPeers(groups.etp_ep),
            receive_rows=static_receive_rows(placement, budget, None),
        ),
    }

    def run(dispatcher: Dispatcher) -> None:
        plan = dispatcher.preprocess(Choice(probs, ids))
        splits = dispatcher.read_splits(plan)
        arrived = dispatcher.dispatch(x, plan, splits).finish()
        rows = dispatcher.combine(arrived.rows, arrived, splits)
        dispatcher.postprocess(rows, plan).backward(grad)

    times: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(3 * arguments.rounds + 1):
        for name, dispatcher in ways.items():
            groups.world.host.barrier()  # type: ignore[union-attr]
            start = time.perf_counter()
            run(dispatcher)
            if round_number > 0:
                times[name].append(time.perf_counter() - start)
    return times


def bench_exchanges(arguments: argparse.Namespace) -> None:
    print(
        f"dispatch and combine, forward and backward: {EXCHANGED_TOKENS} tokens per rank, 2 of 8 "
        f"experts, {arguments.hidden} features, float32; rows through memory of peers against "
        "the others"
    )
    for world_size in (2, 4):
        times = on_gloo_ranks(world_size, exchanges, world_size, arguments)[0]
        ms = {name: 1e3 * statistics.median(seconds) for name, seconds in times.items()}
        for name, each in ms.items():
            print(
                f"  {world_size} ranks  {name:18s}  {each:7.2f} ms  {each / ms['static peer']:.2f}"
            )


def main() -> None:
    parser = options(__doc__)
    parts = ("ranks", "exchange", "layer", "ops")
    parser.add_argument("--only", nargs="+", choices=parts, default=[])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 8, 16, 64, 256])
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    wanted = arguments.only or parts
    print(header("torch", "transformers"))
    print(f"# {arguments.threads} threads, {torch.backends.cpu.get_cpu_capability()}")
    if "ranks" in wanted:
        bench_ranks(arguments)  # first: ranks are forked from a process without threads
    if "exchange" in wanted:
        bench_exchanges(arguments)
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    keep_memory()
    for dtype in (torch.float32, torch.bfloat16):
        if "layer" in wanted:
            bench_layers(arguments, dtype)
    for dtype in (torch.float32, torch.bfloat16):
        if "ops" in wanted:
            bench_grouped(arguments, dtype)
            bench_rows(arguments, dtype)


if __name__ == "__main__":
    main()
