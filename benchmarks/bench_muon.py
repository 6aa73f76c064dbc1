"""Muon: balance of whole matrices over data-parallel ranks, and the time of a step on the CPU.

    python benchmarks/bench_muon.py [--parts balance time] [--rounds 7] [--threads 1]

``balance``: the work of the fullest rank against the least possible for lists of Llama's matrices,
computed without ranks. ``time``: a step of the optimizer on one process against the same matrix
products alone (made by ``torch.addmm`` on buffers of their own) plus a step of AdamW on the other
parameters; processor time, best of the
rounds, in turns.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import nn

from _common import header, options
from megacore.buffers import make_buffers
from megacore.optim import AdamW, DistributedOptimizer, Muon, OptimizerOptions
from megacore.optim.matrix_plan import MatrixUnit, pack, unit_cost, units_of
from megacore.parallel import ParamInfo, ProcessGroups
from megatrain.config import ModelConfig
from megatrain.models.param_infos import GPTInfos

LLAMA = {
    "Llama 3 8B": (32, {"hidden_size": 4096, "num_heads": 32, "ffn_hidden_size": 14336}),
    "Llama 3 70B": (80, {"hidden_size": 8192, "num_heads": 64, "ffn_hidden_size": 28672}),
}
DP_SIZES = (2, 4, 8, 16, 32, 64)


def units_of_model(name: str, tp: int) -> Iterator[MatrixUnit]:
    """Yield the units of a model on a tensor-parallel rank."""
    num_layers, sizes = LLAMA[name]
    config = ModelConfig(num_layers=num_layers, num_kv_heads=8, vocab_size=128256, **sizes)
    infos = GPTInfos.of(config)
    for layer in range(num_layers):
        for info in infos.layer(layer).values():
            if info.matrices is not None:
                yield from units_of(0, info, tp_size=tp)


def least_load(costs: Sequence[float], ranks: int) -> float:
    """Return a bound below the fullest rank: the mean, and what the largest matrices force.

    Of the ``k * ranks + 1`` largest, ``k + 1`` share a rank.
    """
    falling = sorted(costs, reverse=True)
    bounds = [sum(costs) / ranks, falling[0]]
    for k in range(1, (len(costs) - 1) // ranks + 1):
        bounds.append(sum(falling[k * ranks - k : k * ranks + 1]))
    return max(bounds)


def balance_table() -> str:
    """Return the balance of each model and number of ranks."""
    rule = Muon()
    lines = [
        f"{'matrices':14}{'tp':>4}{'dp':>4}{'fullest/least':>15}{'fullest/mean':>14}{'MB sent':>10}"
    ]
    for name in LLAMA:
        for tp in (1, 8):
            units = list(units_of_model(name, tp))
            costs = [unit_cost(unit, rule.cost, tp) for unit in units]
            for dp in DP_SIZES:
                loads = [0.0] * dp
                for owner, cost in zip(pack(costs, dp), costs, strict=True):
                    loads[owner] += cost
                least, mean = least_load(costs, dp), sum(costs) / dp
                sent = 2 * 4 * sum(unit.numel for unit in units) / dp * (dp - 1) / dp / 1e6
                lines.append(
                    f"{name:14}{tp:>4}{dp:>4}{max(loads) / least:>15.3f}{max(loads) / mean:>14.3f}"
                    f"{sent:>10.0f}"
                )
    return "\n".join(lines)


def best_of(rounds: int, *steps: Callable[[], None]) -> list[float]:
    """Return the shortest processor time of each step, seconds; they take turns."""
    found = [math.inf] * len(steps)
    for _ in range(rounds):
        for number, step in enumerate(steps):
            start = time.process_time()
            step()
            found[number] = min(found[number], time.process_time() - start)
    return found


def step_of(infos: Sequence[ParamInfo], rule: AdamW | Muon) -> Callable[[], None]:
    """Return a step of an optimizer of random parameters and gradients."""
    groups = ProcessGroups.single()
    params = [(info, nn.Parameter(torch.randn(info.full_shape))) for info in infos]
    buffers = make_buffers(params, groups=groups, kind_of=rule.rule_for)
    for buffer in buffers:
        buffer.grad_data.normal_()
    own = OptimizerOptions(rule=rule, clip_grad=0.0)
    optimizer = DistributedOptimizer(buffers, groups=groups, options=own)

    def step() -> None:
        optimizer.step(lr=1e-6)

    return step


def products_of(shapes: Sequence[tuple[int, int]], rule: Muon) -> Callable[[], None]:
    """Return the matrix products of the iterations alone."""
    works = []
    for rows, columns in shapes:
        short, long = sorted((rows, columns))
        x, out = torch.randn(short, long) / math.sqrt(short * long), torch.empty(short, long)
        works.append((x, out, torch.empty(short, short), torch.empty(short, short)))

    @torch.no_grad()
    def step() -> None:
        for x, out, gram, update in works:
            for a, b, c in rule.iterations:
                torch.mm(x, x.t(), out=gram)
                torch.addmm(gram, gram, gram, beta=b, alpha=c, out=update)
                torch.addmm(x, update, x, beta=a, out=out)

    return step


def time_table(rounds: int) -> str:
    """Return times of steps of layers of two widths."""
    lines = [
        f"{'layer':24}{'Muon ms':>10}{'products ms':>13}{'AdamW ms':>10}{'ratio':>8}"
        f"{'AdamW on all ms':>17}"
    ]
    for hidden, ffn in ((256, 768), (512, 1536)):
        config = ModelConfig(
            hidden_size=hidden, ffn_hidden_size=ffn, num_heads=8, num_kv_heads=4, vocab_size=8192
        )
        infos = GPTInfos.of(config)
        described = [
            infos.embedding(is_shared=False),
            *(info for layer in range(2) for info in infos.layer(layer).values()),
        ]
        others = [info for info in described if info.matrices is None]
        rule = Muon()
        with_muon = step_of(described, rule)
        shapes = [
            shape
            for info in described
            if info.matrices is not None
            for shape in info.matrices.shapes(info.full_shape)
        ]
        muon, products, adamw, everything = best_of(
            rounds,
            with_muon,
            products_of(shapes, rule),
            step_of(others, AdamW()),
            step_of(described, AdamW()),
        )
        lines.append(
            f"{f'2 of {hidden} x {ffn}':24}{1e3 * muon:>10.1f}{1e3 * products:>13.1f}"
            f"{1e3 * adamw:>10.1f}{muon / (products + adamw):>8.3f}{1e3 * everything:>17.1f}"
        )
    return "\n".join(lines)


def main() -> None:
    """Print the tables."""
    parser = options(__doc__)
    parser.add_argument(
        "--parts", nargs="+", choices=("balance", "time"), default=["balance", "time"]
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(header("torch"))
    if "balance" in args.parts:
        print(balance_table())
    if "time" in args.parts:
        print(f"\nSteps of the optimizer in this process, {args.threads} threads")
        print(time_table(args.rounds))


if __name__ == "__main__":
    main()
