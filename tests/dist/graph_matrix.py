"""All sets of scopes in all layouts, over as many steps as one likes; takes hours.

    python -m tests.dist.graph_matrix --steps 50 --pp 1 2 4 --chunks 1 2 --microbatches 4 8 16

The tests run a part of it. One pipeline rank has two data-parallel ranks, more have one.
"""

from __future__ import annotations

import argparse
import itertools
import os

from tests.dist.test_graph_training import OF_DENSE, OF_EXPERTS, STATIC, check, laid_out


def main() -> None:
    """Run what the command line asks for; print a line for each layout."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--pp", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8, 16])
    parser.add_argument("--kinds", nargs="+", default=["dense", "experts"])
    asked = parser.parse_args()
    for m, pp, chunks in itertools.product(asked.microbatches, asked.pp, asked.chunks):
        dp = 2 if pp == 1 else 1
        world_size, changes = laid_out(pp, m, chunks, dp)
        for kind in asked.kinds:
            settings = OF_DENSE
            if kind == "experts":
                settings, changes = OF_EXPERTS, {**changes, **STATIC, "parallel.ep": dp}
            check(world_size, changes, settings, steps=asked.steps)
            what = f"pp {pp}, {chunks} chunks, m {m}, {kind}"
            print(f"{what}: {len(settings)} settings, {asked.steps} steps, equal", flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
