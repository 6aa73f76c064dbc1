"""Initial weights of one rank's share of a Llama 70B layer: by counter against torch's generator.

    python benchmarks/bench_init.py [--tp 4] [--dtype bfloat16] [--rounds 5]

Before, a rank drew each matrix whole and kept its shard, so that all layouts start from the same
weights; `torch` does that here. `torch, shard` draws the shard alone, which gives other weights in
every layout. Memory is written for the first time in each round, as at a start. One thread;
processor time, the fastest of the rounds. ``ratio`` is torch's time by ours.
"""

from __future__ import annotations

import math
import time

import torch

from _common import header, options
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.params import ShardPosition, shard
from megatrain.models.init import draw

HIDDEN, FFN, GROUPS, ROWS = 8192, 28672, 8, 10 * 128
LAYER = (
    ParamInfo(name="qkv", full_shape=(GROUPS, ROWS, HIDDEN), tp_dim=0),
    ParamInfo(name="output", full_shape=(HIDDEN, HIDDEN), tp_dim=1),
    ParamInfo(name="gate_up", full_shape=(2, FFN, HIDDEN), tp_dim=1),
    ParamInfo(name="down", full_shape=(HIDDEN, FFN), tp_dim=1),
)


def by_counter(tp: int, dtype: torch.dtype) -> None:
    for info in LAYER:
        local = torch.empty(info.local_shape(tp), dtype=dtype)
        draw(local, info, ShardPosition(tp_size=tp), seed=1, std=0.02)


def whole(tp: int, dtype: torch.dtype) -> None:
    for info in LAYER:
        full = torch.empty(info.full_shape).normal_(0.0, 0.02)
        shard(full, info, tp_position=0, tp_size=tp).to(dtype)


def shard_alone(tp: int, dtype: torch.dtype) -> None:
    for info in LAYER:
        torch.empty(info.local_shape(tp)).normal_(0.0, 0.02).to(dtype)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--tp", type=int, default=4)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    kept = sum(math.prod(info.local_shape(arguments.tp)) for info in LAYER)
    print(f"{header('torch')}\n# tp {arguments.tp}, {kept / 1e6:.0f} M numbers kept")
    fastest = {}
    for _ in range(arguments.rounds):
        for name, run in (("ours", by_counter), ("torch", whole), ("torch, shard", shard_alone)):
            start = time.process_time()
            run(arguments.tp, getattr(torch, arguments.dtype))
            took = time.process_time() - start
            fastest[name] = min(took, fastest.get(name, math.inf))
    for name, took in fastest.items():
        ratio = f"ratio {took / fastest['ours']:5.2f}"
        print(f"{name:12s} {took:6.2f} s, {took / kept * 1e9:5.1f} ns per number kept, {ratio}")


if __name__ == "__main__":
    main()
