"""CUDA-graph capture: what to capture, on which static buffers."""

from megacore.graphs.capture_plan import (
    BufferRole,
    BufferUse,
    Capture,
    CapturePlan,
    StepKind,
    plan_capture,
    static_bytes,
)

__all__ = [
    "BufferRole",
    "BufferUse",
    "Capture",
    "CapturePlan",
    "StepKind",
    "plan_capture",
    "static_bytes",
]
