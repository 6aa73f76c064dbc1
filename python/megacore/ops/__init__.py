"""Kernels on tensors: native code for CPU tensors, CUDA kernels for CUDA tensors.

Each operation has a reference in plain torch with the same signature.
"""

from __future__ import annotations

from megacore.ops.activations import gelu, swiglu
from megacore.ops.cuda_module import cuda_kernels, has_cuda_kernels
from megacore.ops.gemm import grouped_gemm, main_grad_of
from megacore.ops.permutation import permute, permute_probs, sort_by_expert, unpermute
from megacore.ops.topk import top_k

__all__ = [
    "cuda_kernels",
    "gelu",
    "grouped_gemm",
    "has_cuda_kernels",
    "main_grad_of",
    "permute",
    "permute_probs",
    "sort_by_expert",
    "swiglu",
    "top_k",
    "unpermute",
]
