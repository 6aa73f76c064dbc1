"""Random learning rate schedules, and their rates by Megatron-Core's own code.

The golden file was written with megatron-core 0.16.1 (``pip install --no-deps megatron-core``):

    python -m tests.support.megatron_rates > tests/golden/megatron_rates.json
"""

from __future__ import annotations

import json
import random
from types import SimpleNamespace
from typing import Any

NUM_CASES = 1000
TAILS = ("linear", "cosine", "exponential", "minus_sqrt")


def make_cases() -> list[dict[str, Any]]:
    """Return settings under Megatron's names, and positions in ``at``: samples before a step."""
    draw = random.Random(20261126)
    styles = ("constant", "linear", "cosine", "inverse-square-root", "WSD")
    cases = []
    for number in range(NUM_CASES):
        max_lr = 10.0 ** draw.uniform(-5, -1)
        warmup = draw.choice((0, 1, draw.randrange(1, 200)))
        end = warmup + draw.randrange(1, 2000)
        tail = draw.randrange(1, end - warmup + 1)
        at = [0, warmup, end - tail, end, *(draw.randrange(end + 9) for _ in range(3))]
        cases.append(
            {
                "init_lr": max_lr * draw.choice((0.0, draw.random())),
                "max_lr": max_lr,
                "min_lr": max_lr * draw.choice((0.0, draw.random())),
                "lr_warmup_steps": warmup,
                "lr_decay_steps": end,
                "lr_decay_style": styles[number % len(styles)],
                "wsd_decay_steps": tail,
                "lr_wsd_decay_style": TAILS[number // len(styles) % len(TAILS)],
                "at": at,
            }
        )
    return cases


def positions(case: dict[str, Any]) -> list[int]:
    """Return where Megatron's rate is read: our warmup counts the step that is taken."""
    return [n + 1 if n < case["lr_warmup_steps"] else n for n in case["at"]]


def megatron_rates(case: dict[str, Any]) -> list[float]:
    """Return the rates of a case by Megatron-Core, which must be installed."""
    from megatron.core.optimizer_param_scheduler import (  # type: ignore[import-not-found]
        OptimizerParamScheduler,
    )

    decay = {"start_wd": 0.0, "end_wd": 0.0, "wd_incr_steps": 1, "wd_incr_style": "constant"}
    options = {name: value for name, value in case.items() if name != "at"}
    group: dict[str, Any] = {}
    scheduler = OptimizerParamScheduler(SimpleNamespace(param_groups=[group]), **options, **decay)
    rates = []
    for position in positions(case):
        scheduler.num_steps = position
        scheduler.step(0)
        rates.append(group["lr"])
    return rates


if __name__ == "__main__":
    lines = [json.dumps([float(f"{rate:.9g}") for rate in megatron_rates(c)]) for c in make_cases()]
    print("[\n" + ",\n".join(lines) + "\n]")
