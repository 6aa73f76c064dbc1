"""The loss scale of float16 training, which adapts to what the gradients can bear."""

from __future__ import annotations


class DynamicLossScale:
    """A power of two that halves after an overflow and doubles after many steps without one.

    float16 has no room for small gradients, so the loss is multiplied by the scale before the
    backward pass and gradients are divided by it in the update. Powers of two change no bits.

    Args:
        initial: First scale, a power of two.
        interval: Steps without overflow after which the scale doubles.

    Attributes:
        scale: What to multiply the loss by in the next step.
        good_steps: Steps without overflow since the scale last changed.

    Example:
        >>> loss_scale = DynamicLossScale(initial=8.0, interval=2)
        >>> [loss_scale.update(overflow=overflow) for overflow in (True, False, False, False)]
        [4.0, 4.0, 8.0, 8.0]
    """

    _LARGEST = 2.0**24

    def __init__(self, *, initial: float, interval: int) -> None:
        self.scale = initial
        self._interval = interval
        self.good_steps = 0

    def update(self, *, overflow: bool) -> float:
        """Adapt to a step; ``overflow`` must be the same on all ranks. Returns the new scale."""
        if overflow:
            self.good_steps = 0
            self.scale = max(1.0, self.scale / 2)
            return self.scale
        self.good_steps += 1
        if self.good_steps == self._interval:
            self.good_steps = 0
            self.scale = min(self._LARGEST, self.scale * 2)
        return self.scale
