"""The learning rate of a step: a linear warmup, then one of five shapes."""

from __future__ import annotations

import math

from megacore.optim.options import RateOptions


def learning_rate(
    done: float, *, options: RateOptions, total: float, step_size: float = 1
) -> float:
    """Return the learning rate of a step, a pure function of its arguments.

    All lengths have one unit: steps, samples or tokens. During the warmup the rate rises linearly
    from ``warmup_from``, by the length of the step in advance: the first of W steps has a W-th of
    the rise, the W-th has ``lr``. Afterwards, with n for ``done``:

    - ``constant`` stays at ``lr``.
    - ``linear`` and ``cosine`` fall from ``lr`` at the end of the warmup to ``min_lr`` at
      ``decay_end``.
    - ``inverse_sqrt`` is ``lr * sqrt(W / n)``, at least ``min_lr``; without a warmup, W is the
      length of one step.
    - ``wsd`` (warmup, stable, decay) stays at ``lr`` and falls over the last ``tail_length`` before
      ``decay_end``, with x from 0 to 1 by ``1 - x`` (``linear``), ``(1 + cos(pi x)) / 2``
      (``cosine``), ``2 * 0.5^x - 1`` (``exponential``) or ``1 - sqrt(x)`` (``minus_sqrt``).

    Beyond ``decay_end`` all but ``constant`` stay at ``min_lr``.

    Args:
        done: Steps, samples or tokens before this step.
        options: Shape of the rate.
        total: Length of the whole run.
        step_size: Length of this step.

    Raises:
        ValueError: If ``done`` is negative, or ``total`` or ``step_size`` is not positive.

    Source:
        The decays of Megatron-LM, the offset of torchtitan's warmup.

    Example:
        >>> options = RateOptions(lr=1.0, min_lr=0.0, warmup=2, schedule="cosine")
        >>> [round(learning_rate(step, options=options, total=6), 3) for step in range(7)]
        [0.5, 1.0, 1.0, 0.854, 0.5, 0.146, 0.0]
    """
    if done < 0 or not (total > 0 and step_size > 0):
        raise ValueError(
            "done must be at least 0, and total and step_size above 0, "
            f"got done = {done}, total = {total}, step_size = {step_size}"
        )
    warmup = options.warmup
    if done < warmup:
        rise = min(1.0, (done + step_size) / warmup)
        return options.warmup_from + (options.lr - options.warmup_from) * rise
    if options.schedule == "constant":
        return options.lr
    min_lr = options.lr / 10 if options.min_lr is None else options.min_lr
    end = total if options.decay_end is None else options.decay_end
    if options.schedule == "inverse_sqrt":
        timescale = max(warmup, step_size)
        rate = options.lr * math.sqrt(timescale / max(done, timescale))
        return min_lr if done > end else max(min_lr, rate)
    if done >= end:
        return min_lr
    if options.schedule == "wsd":
        height = _tail_height(done, options=options, end=end)
    else:
        height = _fall(options.schedule, (done - warmup) / (end - warmup))
    return min_lr + (options.lr - min_lr) * height


def _tail_height(done: float, *, options: RateOptions, end: float) -> float:
    """Return the position of ``wsd`` after the warmup: 1 at ``lr``, 0 at ``min_lr``."""
    length: float | None = options.tail_length
    if length is None:
        length = min(end // 5, end - options.warmup)
    start = end - length
    return 1.0 if done <= start else _fall(options.tail_shape, (done - start) / length)


def _fall(shape: str, x: float) -> float:
    """Return the height of a decay that is 1 at x = 0 and 0 at x = 1."""
    if shape == "linear":
        return 1.0 - x
    if shape == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * x))
    return 2.0 * 0.5**x - 1.0 if shape == "exponential" else 1.0 - math.sqrt(x)
