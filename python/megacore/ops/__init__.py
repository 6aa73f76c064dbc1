"""Kernels on tensors: a CPU tensor takes the native CPU code, a CUDA tensor the CUDA kernel.

Every operation has a reference in plain torch of the same signature beside it. This is the only
file that imports the optional CUDA module.
"""

from __future__ import annotations

from types import ModuleType

try:
    from megacore import _cuda

    _CUDA: ModuleType | None = _cuda
except ImportError:  # built without nvcc
    _CUDA = None


def has_cuda_kernels() -> bool:
    """Tell whether this installation was built with the CUDA kernels.

    Says nothing about a device: asking the driver would keep this process from forking ranks.
    """
    return _CUDA is not None


def cuda_kernels() -> ModuleType:
    """Return the CUDA extension module.

    Raises:
        RuntimeError: If megacore was built without it.
    """
    if _CUDA is None:
        raise RuntimeError(
            "this megacore was installed without CUDA kernels; with nvcc on PATH, "
            "MEGACORE_CUDA=ON pip install . builds them"
        )
    return _CUDA


# Last: the modules below take the functions above from here.
from megacore.ops.activations import gelu, swiglu  # noqa: E402
from megacore.ops.gemm import grouped_gemm, main_grad_of  # noqa: E402
from megacore.ops.permutation import (  # noqa: E402
    Permuted,
    collect_rows,
    permute_probs,
    permute_tokens,
    sort_by_expert,
    spread_rows,
    unpermute_tokens,
)
from megacore.ops.topk import top_k  # noqa: E402

__all__ = [
    "Permuted",
    "collect_rows",
    "cuda_kernels",
    "gelu",
    "grouped_gemm",
    "has_cuda_kernels",
    "main_grad_of",
    "permute_probs",
    "permute_tokens",
    "sort_by_expert",
    "spread_rows",
    "swiglu",
    "top_k",
    "unpermute_tokens",
]
