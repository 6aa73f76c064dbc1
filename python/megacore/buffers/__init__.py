"""Contiguous storage for parameters and gradients, and the plan of what lies where."""

from __future__ import annotations

from megacore.buffers.bucket_plan import Bucket, BufferPlan, ShardPiece, plan_buckets
from megacore.buffers.param_grad_buffer import ParamGradBuffer, make_buffers

__all__ = [
    "Bucket",
    "BufferPlan",
    "ParamGradBuffer",
    "ShardPiece",
    "make_buffers",
    "plan_buckets",
]
