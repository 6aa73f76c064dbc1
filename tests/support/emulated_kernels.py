"""The emulated kernels of GPUs that `make test-cpp` compiles; see tests/cpp/emulated."""

from __future__ import annotations

import ctypes
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_LIBRARY = _ROOT / "build/cpu/tests/cpp/libemulated_operations.so"
_SOURCES = ("cuda/**/*.c*", "cuda/**/*.h", "cpp/ops/*", "tests/cpp/emulated/**/*")


def load_kernels() -> ctypes.CDLL | None:
    """Load the library; ``None`` if it is not compiled from the sources as they are now."""
    compiled_at = _LIBRARY.stat().st_mtime if _LIBRARY.exists() else 0.0
    if any(path.stat().st_mtime > compiled_at for glob in _SOURCES for path in _ROOT.glob(glob)):
        return None
    return ctypes.CDLL(str(_LIBRARY))
