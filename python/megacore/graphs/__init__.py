"""CUDA-graph capture: what to capture, on which static buffers."""

from megacore.graphs.backend import CudaBackend, EmulatedBackend, GraphBackend, graph_backend
from megacore.graphs.callables import make_graphed_callables
from megacore.graphs.capture_plan import (
    BufferRole,
    BufferUse,
    Capture,
    CapturePlan,
    StepKind,
    plan_capture,
    static_bytes,
)
from megacore.graphs.errors import CaptureError, ReplayError
from megacore.graphs.replay import GraphedCallable
from megacore.graphs.tensors import TensorSpec, weak_tensor

__all__ = [
    "BufferRole",
    "BufferUse",
    "Capture",
    "CaptureError",
    "CapturePlan",
    "CudaBackend",
    "EmulatedBackend",
    "GraphBackend",
    "GraphedCallable",
    "ReplayError",
    "StepKind",
    "TensorSpec",
    "graph_backend",
    "make_graphed_callables",
    "plan_capture",
    "static_bytes",
    "weak_tensor",
]
