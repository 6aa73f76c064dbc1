"""Clipping as the optimizer's decision about a step should do it, in plain Python."""

from __future__ import annotations


def clip_coefficient(norm: float, *, max_norm: float) -> float:
    """The factor that brings gradients of norm ``norm`` down to ``max_norm`` (0: no limit)."""
    return 1.0 if max_norm == 0.0 else min(1.0, max_norm / (norm + 1e-6))
