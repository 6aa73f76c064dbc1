"""CUDA-graph capture: capture plans, static buffers, backends and graphed callables."""

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
from megacore.graphs.capturing import buffers_kept
from megacore.graphs.errors import CaptureError, FormError, ReplayError
from megacore.graphs.full import FullIterationGraph
from megacore.graphs.options import CaptureOptions
from megacore.graphs.partial import PartialGraphs, StepOrder
from megacore.graphs.replay import GraphedCallable
from megacore.graphs.static_tensors import CaptureSignature, TensorSpec, weak_tensor
from megacore.graphs.transformer_engine import DelegatedCallable, TransformerEngineBackend

__all__ = [
    "BufferRole",
    "BufferUse",
    "Capture",
    "CaptureError",
    "CaptureOptions",
    "CapturePlan",
    "CaptureSignature",
    "CudaBackend",
    "DelegatedCallable",
    "EmulatedBackend",
    "FormError",
    "FullIterationGraph",
    "GraphBackend",
    "GraphedCallable",
    "PartialGraphs",
    "ReplayError",
    "StepKind",
    "StepOrder",
    "TensorSpec",
    "TransformerEngineBackend",
    "buffers_kept",
    "graph_backend",
    "make_graphed_callables",
    "plan_capture",
    "static_bytes",
    "weak_tensor",
]
