"""The optional CUDA module, imported here only, and the devices that its kernels run on."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import ModuleType
from typing import Any, ParamSpec, TypeVar

import torch

try:
    from megacore import _cuda

    _CUDA: ModuleType | None = _cuda
except ImportError:  # built without nvcc
    _CUDA = None

WITHOUT_KERNELS = "megacore was installed without CUDA kernels"


@dataclass(frozen=True, kw_only=True)
class KernelBuild:
    """Architectures of the CUDA kernels of this installation; none of one without kernels.

    Attributes:
        archs: Of all kernels but grouped products, such as ``"90a"``.
        grouped: Of grouped products.
        cuda: Version of the toolkit as CUDA counts it, such as 13000 for 13.0.
    """

    archs: tuple[str, ...] = ()
    grouped: tuple[str, ...] = ()
    cuda: int = 0

    @classmethod
    def here(cls) -> KernelBuild:
        """Return those of this installation."""
        if _CUDA is None:
            return cls()
        archs, grouped = _CUDA.compiled_archs(), _CUDA.grouped_gemm_archs()
        return cls(archs=tuple(archs), grouped=tuple(grouped), cuda=_CUDA.runtime_version())

    def arch_for(self, capability: tuple[int, int]) -> str | None:
        """Return the architecture whose code a device runs; ``None`` without one.

        Code of ``"80"`` runs on later minor versions, ``"100f"`` on those of its family, ``"90a"``
        on 9.0 only.

        Example:
            >>> build = KernelBuild(archs=("80", "90a"))
            >>> [build.arch_for(one) for one in ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))]
            ['80', '80', '90a', None, None]
        """
        for arch in self.archs:
            major, minor = divmod(int(arch.rstrip("af")), 10)
            is_newer = not arch.endswith("a") and minor < capability[1]
            if major == capability[0] and (minor == capability[1] or is_newer):
                return arch
        return None

    def obstacle(self, device: DeviceFacts) -> str | None:
        """Return why a device runs none of the kernels, or ``None``.

        Example:
            >>> KernelBuild(archs=("90a",), cuda=13000).obstacle(DeviceFacts(capability=(8, 0)))
            'this build has kernels for sm_90a, and the device is sm_80; \
MEGACORE_CUDA_ARCHS=80 pip install . builds them'
        """
        if not self.archs:
            return WITHOUT_KERNELS
        if self.arch_for(device.capability) is None:
            name = "{}{}".format(*device.capability)
            has = " and ".join(f"sm_{arch}" for arch in self.archs)
            own = f"{name}a" if device.capability >= (9, 0) else name
            advice = f"; MEGACORE_CUDA_ARCHS={own} pip install . builds them"
            return f"this build has kernels for {has}, and the device is sm_{name}" + advice
        # Within a major version, a driver runs the code of every toolkit.
        if device.driver is not None and device.driver // 1000 < self.cuda // 1000:
            return (
                f"the driver supports CUDA {_dotted(device.driver)}, and the kernels were built "
                f"with {_dotted(self.cuda)}; update it, or build with an older toolkit"
            )
        return None


@dataclass(frozen=True, kw_only=True)
class DeviceFacts:
    """What decides which kernels a CUDA device runs.

    Attributes:
        capability: Compute capability.
        driver: Newest CUDA version that the driver supports, such as 12080 for 12.8; ``None`` if
            it is not known.
        shared_bytes: Shared memory that a block may have; ``None`` if it is not known.
    """

    capability: tuple[int, int]
    driver: int | None = None
    shared_bytes: int | None = None


P = ParamSpec("P")
R = TypeVar("R")
_CACHES: list[functools._lru_cache_wrapper[Any]] = []
_ASSUMED: ContextVar[DeviceFacts | None] = ContextVar("assumed", default=None)


@contextmanager
def assume_device(facts: DeviceFacts) -> Iterator[None]:
    """Answer questions on CUDA devices with ``facts``, for tensors of a device that is not here."""
    token = _ASSUMED.set(facts)
    forget_devices()
    try:
        yield
    finally:
        _ASSUMED.reset(token)
        forget_devices()


def is_assumed() -> bool:
    """Return whether the devices that are asked about are not here, see `assume_device`."""
    return _ASSUMED.get() is not None


def cached_on_device(function: Callable[P, R]) -> Callable[P, R]:
    """Cache a function whose results follow from its arguments, this build and a device's facts."""
    cached = functools.cache(function)
    _CACHES.append(cached)
    return cached  # type: ignore[return-value]


def forget_devices() -> None:
    """Empty the caches, because the build or a device is another one from now on."""
    for cached in _CACHES:
        cached.cache_clear()


@cached_on_device
def device_facts(device: torch.device) -> DeviceFacts:
    """Return the facts of a CUDA device, cached."""
    assumed = _ASSUMED.get()
    if assumed is not None:
        return assumed
    driver = None if _CUDA is None else _CUDA.driver_version() or None
    properties = torch.cuda.get_device_properties(device)
    return DeviceFacts(
        capability=(properties.major, properties.minor),
        driver=driver,
        shared_bytes=getattr(properties, "shared_memory_per_block_optin", None),
    )


@cached_on_device
def kernel_obstacle(device: torch.device) -> str | None:
    """Return why our kernels do not run on a CUDA device, or ``None``; cached.

    Warns if they were built for others: operations then take torch's kernels, which are slower.
    """
    if _CUDA is None:
        return WITHOUT_KERNELS
    reason = KernelBuild.here().obstacle(device_facts(device))
    if reason is not None:
        warnings.warn(f"operations on {device} take torch's kernels: {reason}", stacklevel=2)
    return reason


def runs_kernels(device: torch.device) -> bool:
    """Return whether our kernels run on a CUDA device; see `kernel_obstacle`."""
    return kernel_obstacle(device) is None


def has_cuda_kernels() -> bool:
    """Return whether this installation was built with the CUDA kernels.

    Says nothing about a device: asking the driver would keep this process from forking ranks. See
    `runs_kernels`.
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


def _dotted(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
