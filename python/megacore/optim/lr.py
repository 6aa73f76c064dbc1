"""The learning rate of a step: linear warmup, then cosine, warmup-stable-decay, or constant."""

from __future__ import annotations

import math

from megacore.config import OptimizerConfig


def learning_rate(step: int, *, config: OptimizerConfig, steps: int) -> float:
    """Return the learning rate of step ``step``, a pure function of its arguments.

    The first ``warmup_steps`` steps rise linearly, the last of them to ``lr``. Afterwards:

    - ``cosine`` falls from ``lr`` along half a cosine and reaches ``min_lr`` at step
      ``decay_steps`` (default: ``steps``), where it stays.
    - ``wsd`` stays at ``lr`` and falls linearly over the last ``decay_steps`` steps (default: a
      fifth of ``steps``); the last step of the run has ``min_lr``.
    - ``constant`` stays at ``lr``.

    Args:
        step: Number of the step, from 0.
        config: The ``[optimizer]`` section. ``min_lr`` defaults to a tenth of ``lr``.
        steps: Steps of the whole run.

    Raises:
        ValueError: If ``step`` is negative or ``steps`` is not positive.

    Example:
        >>> config = OptimizerConfig(lr=1.0, min_lr=0.0, warmup_steps=2, schedule="cosine")
        >>> [round(learning_rate(step, config=config, steps=6), 3) for step in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if step < 0 or steps < 1:
        raise ValueError(f"step is {step} of {steps} steps; step must be >= 0 and steps >= 1")
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    min_lr = config.lr / 10 if config.min_lr is None else config.min_lr
    return min_lr + (config.lr - min_lr) * _height(step, config=config, steps=steps)


def _height(step: int, *, config: OptimizerConfig, steps: int) -> float:
    """Return the position of the rate after the warmup: 1 at ``lr``, 0 at ``min_lr``."""
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "cosine":
        end = steps if config.decay_steps is None else config.decay_steps
        if step >= end:
            return 0.0
        progress = (step - config.warmup_steps) / (end - config.warmup_steps)
        return 0.5 * (1.0 + math.cos(math.pi * progress))
    length = steps // 5 if config.decay_steps is None else config.decay_steps
    steps_left = max(0, steps - 1 - step)
    return min(1.0, steps_left / length) if length > 0 else 1.0
