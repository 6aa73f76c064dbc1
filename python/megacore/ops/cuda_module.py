"""The optional CUDA module; the only file that imports it."""

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
