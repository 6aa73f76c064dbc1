"""The learning rate of a step: linear warmup, then cosine, warmup-stable-decay, or constant."""

from __future__ import annotations

import math

from megacore.optim.options import RateOptions


def learning_rate(step: int, *, options: RateOptions, steps: int) -> float:
    """Return the learning rate of step ``step``, a pure function of its arguments.

    The first ``warmup_steps`` steps rise linearly, the last of them to ``lr``. Afterwards:

    - ``cosine`` falls from ``lr`` along half a cosine and reaches ``min_lr`` at step
      ``decay_steps`` (default: ``steps``), where it stays.
    - ``wsd`` stays at ``lr`` and falls linearly over the last ``decay_steps`` steps (default: a
      fifth of ``steps``); the last step of the run has ``min_lr``.
    - ``constant`` stays at ``lr``.

    Args:
        step: Number of the step, from 0.
        options: Shape of the rate.
        steps: Steps of the whole run.

    Raises:
        ValueError: If ``step`` is negative or ``steps`` is not positive.

    Example:
        >>> options = RateOptions(lr=1.0, min_lr=0.0, warmup_steps=2, schedule="cosine")
        >>> [round(learning_rate(step, options=options, steps=6), 3) for step in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < 0 or steps < 1:
        raise ValueError(f"step is {step} of {steps} steps; step must be >= 0 and steps >= 1")
    if step < options.warmup_steps:
        return options.lr * (step + 1) / options.warmup_steps
    min_lr = options.lr / 10 if options.min_lr is None else options.min_lr
    return min_lr + (options.lr - min_lr) * _height(step, options=options, steps=steps)


def _height(step: int, *, options: RateOptions, steps: int) -> float:
    """Return the position of the rate after the warmup: 1 at ``lr``, 0 at ``min_lr``."""
    if options.schedule == "constant":
        return 1.0
    if options.schedule == "cosine":
        end = steps if options.decay_steps is None else options.decay_steps
        if step >= end:
            return 0.0
        progress = (step - options.warmup_steps) / (end - options.warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    length = steps // 5 if options.decay_steps is None else options.decay_steps
    steps_left = max(0, steps - 1 - step)
    return min(1.0, steps_left / length) if length > 0 else 1.0
