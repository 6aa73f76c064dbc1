"""Kernels, driver and back ends of a run, for the start table and ``run.json``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import torch

from megacore.moe.experts import GroupedExperts
from megacore.ops.cuda_module import KernelBuild, device_facts, runs_kernels
from megacore.ops.gemm_cuda import grouped_obstacle
from megacore.ops.gemm_torch import has_grouped_mm_on
from megacore.ops.kernel_facts import Fp8Products, kernel_text
from megacore.parallel.process_groups import Group
from megacore.qualification import KernelChoice, Sizes, choose_kernels
from megatrain.config import ResolvedConfig, ResolvedTrainConfig
from megatrain.models.stage import Stage

# Kernels are timed on at most these: more take memory and time, and the same side wins.
_MOST_TOKENS = 8192


def choose_run_kernels(
    config: ResolvedConfig, *, device: torch.device, world: Group
) -> KernelChoice:
    """Choose between our kernels and torch's operations for a run; collective.

    Args:
        config: Resolved configuration.
        device: Device of this rank.
        world: All ranks.
    """
    return choose_kernels(
        device,
        kernels=config.run.kernels,
        torch_operations=config.run.torch_operations,
        sizes=run_sizes(config),
        dtype=getattr(torch, config.train.dtype),
        world=world,
    )


def run_sizes(config: ResolvedConfig) -> Sizes:
    """Return the sizes of what operations get on a rank of a run, for at most 8,192 tokens."""
    model, moe, parallel = config.model, config.moe, config.parallel
    has_experts = moe.num_experts > 0
    tokens = config.train.microbatch_size * model.seq_length // parallel.cp
    mlp = moe.ffn_hidden_size // parallel.etp if has_experts else model.ffn_hidden_size
    return Sizes(
        tokens=min(tokens, _MOST_TOKENS),
        width=model.hidden_size,
        mlp=mlp if has_experts else mlp // parallel.tp,
        head_dim=model.head_dim,
        groups=max(1, model.num_kv_heads // parallel.tp),
        q_per_kv=max(1, model.num_heads // model.num_kv_heads),
        experts=moe.num_experts,
        choices=moe.top_k if has_experts else 0,
        local_experts=moe.num_experts // parallel.ep,
    )


def kernel_environment(
    train: ResolvedTrainConfig,
    chunks: Sequence[Stage],
    *,
    backend: str,
    device: torch.device,
    choice: KernelChoice,
) -> dict[str, str]:
    """Describe the kernels and back ends of this rank in readable text.

    Args:
        train: The ``[train]`` section.
        chunks: Model chunks of this rank.
        backend: Communication library.
        device: Device of the model.
        choice: The operations that torch computes.
    """
    found: dict[str, str] = {"back ends": backend}
    if device.type == "cpu" or (device.type == "cuda" and runs_kernels(device)):
        found["choice of kernels"] = choice.text()
    if device.type != "cuda":
        products = _fp8_products(train, chunks)
        return found | ({} if products is None else {"fp8": products.text()})
    found["kernels"] = gpu_kernels(train, chunks, device)
    nccl = torch.cuda.nccl.version() if found["back ends"] == "nccl" else None  # type: ignore[no-untyped-call]
    return found | gpu_versions(toolkit=torch.version.cuda, driver=_driver(), nccl=nccl)


def gpu_kernels(train: ResolvedTrainConfig, chunks: Sequence[Stage], device: torch.device) -> str:
    """Describe the kernels that a GPU runs, in one line; see `kernel_text`."""
    products = _fp8_products(train, chunks)
    return kernel_text(
        KernelBuild.here(),
        device_facts(device),
        has_torch_grouped=has_grouped_mm_on(device, torch.bfloat16, 1, 8, 8),
        fp8=None if products is None else products.text(),
    )


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
    return notes if device.type != "cuda" else notes + _expert_notes(train, chunks, device)


def _expert_notes(
    train: ResolvedTrainConfig, chunks: Sequence[Stage], device: torch.device
) -> tuple[str, ...]:
    """Return a note if products of experts read row counts on the host."""
    dtype = getattr(torch, train.dtype)
    for experts in (part for chunk in chunks for part in chunk.modules()):
        if not isinstance(experts, GroupedExperts):
            continue
        num, hidden, width = experts.fc2.shape
        reason = grouped_obstacle(device, num, hidden, width)
        if dtype == torch.float32:
            reason = "there are no grouped products of float32"
        if reason is not None and not has_grouped_mm_on(device, dtype, num, hidden, width):
            return (f"products of experts run one by one and wait for the GPU: {reason}",)
    return ()


def _fp8_products(train: ResolvedTrainConfig, chunks: Sequence[Stage]) -> Fp8Products | None:
    if train.fp8 == "off":
        return None
    return Fp8Products.of(chunks, getattr(torch, train.dtype))
