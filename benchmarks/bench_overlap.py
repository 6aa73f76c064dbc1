"""Steps of a model with experts, its exchanges beside the compute of another microbatch or not.

    python benchmarks/bench_overlap.py [--latencies 0 2 5] [--rounds 10] [--out FILE]

Four gloo ranks (pp 2 x ep 2) train the same model one pass after another, with passes in pairs
(``pipeline.overlap_moe``) and with gradients of weights in the exchanges as well
(``pipeline.pairs = "split"``), taking turns. Loopback is much faster than a network, so every
exchange of rows is also given a latency: whoever waits for it sleeps until that time has passed
since its start. A sleeping rank uses no core; what is hidden is the latency, not work.
"""

from __future__ import annotations

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # forked ranks need it, and share the cores

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from _common import finish, header, on_gloo_ranks, options, take_turns

RANKS = 4
LAYOUTS: dict[str, dict[str, Any]] = {
    "interleaved_1f1b": {"schedule": "interleaved_1f1b", "num_chunks": 2},
    "1f1b": {"schedule": "1f1b"},
}
WAYS: dict[str, dict[str, Any]] = {
    "one after another": {},
    "pairs": {"overlap_moe": True},
    "pairs, split": {"overlap_moe": True, "pairs": "split"},
}


@contextmanager
def slow_exchanges(latency_s: float, waits: list[float]) -> Iterator[None]:
    """Give exchanges a latency, and add up in ``waits[0]`` how long was waited for them."""
    from megacore.parallel import row_exchange
    from megacore.parallel.async_collectives import PendingCollective

    start, wait = row_exchange.all_to_all_async, PendingCollective.wait
    due: dict[PendingCollective, float] = {}

    def slow_start(*args: Any) -> Any:
        result = start(*args)
        due[result[1]] = time.perf_counter() + latency_s
        return result

    def slow_wait(pending: PendingCollective) -> None:
        arrival = due.pop(pending, None)
        begin = time.perf_counter()
        wait(pending)
        if arrival is not None:
            time.sleep(max(0.0, arrival - time.perf_counter()))
            waits[0] += time.perf_counter() - begin

    row_exchange.all_to_all_async, PendingCollective.wait = slow_start, slow_wait  # type: ignore[method-assign]
    try:
        yield
    finally:
        row_exchange.all_to_all_async, PendingCollective.wait = start, wait  # type: ignore[method-assign]


def steps_on_rank(
    _rank: int, layout: dict[str, Any], latencies: list[float], rounds: int
) -> dict[float, dict[str, Any]]:
    """For each latency and way the seconds of the steps, and those waited in a step."""
    import torch

    from megatrain.config import Config, resolve
    from megatrain.train.trainer import Trainer, build_trainer

    def trainer_of(way: dict[str, Any]) -> Trainer:
        config = Config(
            model={"hidden_size": 128, "num_layers": 8, "num_heads": 4, "seq_length": 128},
            parallel={"pp": 2, "ep": 2},
            pipeline={**layout, **way},
            moe={"num_experts": 8, "top_k": 2, "ffn_hidden_size": 256},
            train={"microbatch_size": 1, "global_batch_size": 16, "eval_interval": 0},
        )
        config = resolve(config, RANKS, vocab_size=256, cuda=False)
        return build_trainer(config, world_size=RANKS, device=torch.device("cpu"))

    trainers = {way: trainer_of(changes) for way, changes in WAYS.items()}
    numbers = dict.fromkeys(WAYS, 0)
    found = {}
    for latency in latencies:
        waited: dict[str, list[float]] = {way: [] for way in WAYS}

        def step(way: str, latency: float = latency, waited: Any = waited) -> None:
            waits = [0.0]
            with slow_exchanges(latency, waits):
                trainers[way].train_step(numbers[way])
            numbers[way] += 1
            waited[way].append(waits[0])

        contenders: dict[str, Callable[[], None]] = {
            way: (lambda way=way, step=step: step(way)) for way in WAYS
        }
        seconds = take_turns(contenders, rounds=rounds)
        found[latency] = {way: (seconds[way], waited[way][-rounds:]) for way in WAYS}
    return found


def table(name: str, latencies: list[float], rounds: int) -> str:
    by_rank = on_gloo_ranks(RANKS, steps_on_rank, LAYOUTS[name], latencies, rounds)
    lines = [
        f"{name}: steps of {RANKS} gloo ranks, pp 2 x ep 2: 8 MoE layers, 8 experts of 128 x 256, "
        f"top-2, 8 microbatches of 128 tokens; {rounds} rounds in turns",
        f"{'latency':<10}{'way':<20}{'fastest ms':>11}{'median ms':>11}{'speed':>8}"
        f"{'waited ms (mean of ranks)':>28}",
    ]
    for latency in latencies:
        medians = {}
        for way in WAYS:
            seconds = by_rank[0][latency][way][0]  # a step ends on all ranks together
            medians[way] = statistics.median(seconds)
            waited = statistics.fmean(statistics.median(r[latency][way][1]) for r in by_rank)
            ratio = medians["one after another"] / medians[way]
            lines.append(
                f"{1e3 * latency:<4g}ms    {way:<20}{1e3 * min(seconds):>11.0f}"
                f"{1e3 * medians[way]:>11.0f}{ratio:>7.2f}x{1e3 * waited:>28.0f}"
            )
    return "\n".join(lines)


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--latencies", type=float, nargs="+", default=[0, 2, 5], help="ms")
    parser.add_argument("--layouts", nargs="+", choices=LAYOUTS, default=list(LAYOUTS))
    parser.add_argument("--rounds", type=int, default=10, help="timed steps of each way")
    parser.add_argument("--out", type=Path, help="also write the output here")
    args = parser.parse_args()
    latencies = [latency / 1e3 for latency in args.latencies]
    parts = [header("torch")]
    parts += [table(name, latencies, args.rounds) for name in args.layouts]
    finish(parts, args.out)


if __name__ == "__main__":
    main()
