"""Kernels, driver and back ends of a run, for the start table and ``run.json``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from megacore.ops.cuda_module import KernelBuild, device_facts
from megacore.ops.gemm_torch import has_grouped_mm
from megacore.ops.kernel_facts import Fp8Products, kernel_text
from megatrain.config import ResolvedTrainConfig
from megatrain.models.stage import Stage


def kernel_environment(
    train: ResolvedTrainConfig, chunks: Sequence[Stage], *, backend: str, device: torch.device
) -> dict[str, str]:
    """Describe the kernels and back ends of this rank in readable text.

    Args:
        train: The ``[train]`` section.
        chunks: Model chunks of this rank.
        backend: Communication library.
        device: Device of the model.
    """
    found: dict[str, str] = {"back ends": backend}
    products = _fp8_products(train, chunks)
    fp8 = None if products is None else products.text()
    if device.type != "cuda":
        return found | ({} if fp8 is None else {"fp8": fp8})
    probe = torch.empty(0, dtype=torch.bfloat16, device=device)
    found["kernels"] = kernel_text(
        KernelBuild.here(),
        device_facts(device),
        has_torch_grouped=has_grouped_mm(probe, 1, 8, 8),
        fp8=fp8,
    )
    nccl = torch.cuda.nccl.version() if found["back ends"] == "nccl" else None  # type: ignore[no-untyped-call]
    return found | gpu_versions(toolkit=torch.version.cuda, driver=_driver(), nccl=nccl)


def gpu_versions(
    *, toolkit: str | None, driver: str | None, nccl: tuple[int, ...] | None
) -> dict[str, str]:
    """Format versions of CUDA, the driver and NCCL, without those that are not known.

    Example:
        >>> gpu_versions(toolkit="12.8", driver="570.86.15", nccl=(2, 27, 3))
        {'CUDA': '12.8', 'driver': '570.86.15', 'NCCL': '2.27.3'}
    """
    versions = {
        "CUDA": toolkit,
        "driver": driver,
        "NCCL": None if nccl is None else ".".join(map(str, nccl)),
    }
    return {name: version for name, version in versions.items() if version}


def _driver() -> str | None:
    """Return the version of the NVIDIA driver; ``None`` if the system does not show it."""
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"\d+(\.\d+)+", text)
    return None if found is None else found[0]


def kernel_notes(
    train: ResolvedTrainConfig, chunks: Sequence[Stage], *, device: torch.device
) -> tuple[str, ...]:
    """Return notes on products of this rank that are slower than they could be.

    Args:
        train: The ``[train]`` section.
        chunks: Model chunks of this rank.
        device: Device of the model.
    """
    products = _fp8_products(train, chunks)
    matmul = torch.backends.cuda.matmul
    notes = () if products is None else products.notes(train.dtype)
    if device.type == "cuda" and train.dtype == "float32" and not matmul.allow_tf32:
        notes += (
            'products are in full float32; train.dtype = "bfloat16" is faster, and so is '
            "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1, which rounds their factors to TF32",
        )
    return notes


def _fp8_products(train: ResolvedTrainConfig, chunks: Sequence[Stage]) -> Fp8Products | None:
    if train.fp8 == "off":
        return None
    return Fp8Products.of(chunks, getattr(torch, train.dtype))
