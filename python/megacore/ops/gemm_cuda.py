"""Grouped GEMM on the GPU: eligibility of calls, and kernel launch."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from megacore.ops.cuda_module import (
    WITHOUT_KERNELS,
    KernelBuild,
    cached_on_device,
    device_facts,
    kernel_obstacle,
)
from megacore.ops.gemm_torch import has_grouped_mm
from megacore.ops.kernel_choice import Product, is_left
from megacore.ops.register import compiled

# Values of the enumerators in cuda/include/megacore/cuda/grouped_gemm.h and of the operation.
PRODUCTS: dict[Product, int] = {"forward": 0, "input_grad": 1, "weight_grad": 2}
_TILES = {"auto": 0, "wide": 1, "middle": 2, "narrow": 3, "square": 4}
MAX_EXPERTS = 1024
# Compute capabilities with grouped kernels (cuda/kernels/grouped_gemm_sm*.cu) and with 8-bit ones.
GROUPED_CAPABILITIES = ((9, 0), (10, 0))
FP8_CAPABILITY = (9, 0)
FP8_MULTIPLE = 16


def choose_backend(
    x: Tensor, num_experts: int, out_features: int, in_features: int
) -> Literal["native", "torch", "reference"]:
    """Return the implementation of a product of CUDA tensors; warn if it syncs with the host.

    Ours, else ``torch._grouped_mm`` where it does not sync, else the reference, which copies the
    counts to the host. float32 has no other, so it needs no warning.
    """
    if x.dtype not in (torch.bfloat16, torch.float16):
        return "reference"
    sizes = num_experts, out_features, in_features
    reason = grouped_obstacle(x.device, *sizes)
    if reason is None:
        return "native"
    if has_grouped_mm(x, *sizes):
        return "torch"
    warnings.warn(
        f"grouped_gemm takes one torch.mm per expert and waits for the GPU: {reason}", stacklevel=2
    )
    return "reference"


def takes_kernel(x: Tensor, num_experts: int, out_features: int, in_features: int) -> bool:
    """Return whether our kernels run a product of CUDA tensors, see `choose_backend`."""
    return choose_backend(x, num_experts, out_features, in_features) == "native"


def takes_fp8_kernels(x: Tensor, num_experts: int, out_features: int, in_features: int) -> bool:
    """Return whether our kernels run products of 8-bit operands for activations like ``x``.

    See `fp8_obstacle` for the conditions.
    """
    return fp8_obstacle(x.device, x.dtype, num_experts, out_features, in_features) is None


def fp8_obstacle(
    device: torch.device, dtype: torch.dtype, num_experts: int, out_features: int, in_features: int
) -> str | None:
    """Return why products of 8-bit operands are emulated, or ``None``."""
    if device.type == "cuda" and is_left("fp8_product", "cuda"):
        return "our 8-bit products are left out, see run.kernels"
    return _fp8_obstacle(device, dtype, num_experts, out_features, in_features)


@cached_on_device
def _fp8_obstacle(
    device: torch.device, dtype: torch.dtype, num_experts: int, out_features: int, in_features: int
) -> str | None:
    if device.type != "cuda":
        return f"there are no 8-bit products on the {device.type.upper()}"
    capability = device_facts(device).capability
    if capability != FP8_CAPABILITY:
        return (
            f"8-bit products exist for {_of([FP8_CAPABILITY])} only, and the device has "
            f"{_dotted(capability)}"
        )
    if dtype != torch.bfloat16:
        return f"8-bit products exist for bfloat16, not for {str(dtype).removeprefix('torch.')}"
    if out_features % FP8_MULTIPLE or in_features % FP8_MULTIPLE:
        return f"8-bit products need features that are multiples of {FP8_MULTIPLE}"
    return _grouped_obstacle(device, num_experts, out_features, in_features)


def missing_grouped(
    built: Sequence[str], compiled: Sequence[str], capability: tuple[int, int]
) -> str | None:
    """Return why a build has no grouped kernels for a compute capability, or ``None``.

    Args:
        built: ``_cuda.grouped_gemm_archs()``.
        compiled: ``_cuda.compiled_archs()``, of all other kernels.
        capability: That of the device.

    Example:
        >>> missing_grouped([], ["80"], (8, 0))
        'grouped products exist for compute capability 9.0 and 10.0 only, and the device has 8.0'
    """
    if capability not in GROUPED_CAPABILITIES:
        return (
            f"grouped products exist for {_of(GROUPED_CAPABILITIES)} only, and the device has "
            f"{_dotted(capability)}"
        )
    arch = f"{capability[0]}{capability[1]}a"
    if arch in built:
        return None
    if arch not in compiled:
        names = " and ".join(f"sm_{name}" for name in built or compiled)
        return f"this build has kernels for {names}, and the device is sm_{arch[:-1]}"
    return "megacore was built without CUTLASS's headers; set CUTLASS_ROOT and install it again"


def _of(capabilities: Sequence[tuple[int, int]]) -> str:
    return f"compute capability {' and '.join(map(_dotted, capabilities))}"


def _dotted(capability: tuple[int, int]) -> str:
    return f"{capability[0]}.{capability[1]}"


def grouped_obstacle(
    device: torch.device, num_experts: int, out_features: int, in_features: int
) -> str | None:
    """Return why our grouped kernel does not run products of these sizes on a GPU, or ``None``."""
    if is_left("grouped_product", "cuda"):
        return "our grouped products are left out, see run.kernels"
    return _grouped_obstacle(device, num_experts, out_features, in_features)


@cached_on_device
def _grouped_obstacle(
    device: torch.device, num_experts: int, out_features: int, in_features: int
) -> str | None:
    build, capability = KernelBuild.here(), device_facts(device).capability
    if not build.archs:
        return WITHOUT_KERNELS
    missing = missing_grouped(build.grouped, build.archs, capability) or kernel_obstacle(device)
    if missing is not None:
        return missing
    if num_experts > MAX_EXPERTS or num_experts == 0:
        return f"{num_experts} experts; a launch takes 1 to {MAX_EXPERTS}"
    for name, features in (("out_features", out_features), ("in_features", in_features)):
        if features % 8 or features == 0:
            return f"{name} is {features}, which is not a multiple of 8"
    return None


def launch_grouped(
    product: Product,
    a: Tensor,
    b: Tensor,
    m_splits: Tensor | None,
    out: Tensor,
    *,
    scales: tuple[Tensor, Tensor] | None = None,
    num_rows: int | None = None,
    accumulate: bool = False,
    accumulate_mask: Tensor | None = None,
    clear_tail: bool = False,
    first_row: Tensor | None = None,
    expected_rows: int = 0,
    plan: str = "auto",
) -> None:
    """Launch a grouped product on the current stream, without host sync or checks of the counts.

    Counts that do not fit the rows are truncated: negative counts are taken as zero, and rows
    beyond the matrix are ignored.

    Args:
        product: ``"forward"``: ``out[rows of e] = a[rows of e] @ b[e].T``; ``"input_grad"``: the
            same without ``.T``; ``"weight_grad"``: ``out[e] = a[rows of e].T @ b[rows of e]``.
        a: ``(M, K)`` in the forward product, else the gradient ``(M, N)``; bf16 or fp16.
        b: The weights ``(E, N, K)``, or in the weight gradient ``x`` ``(M, K)``; dtype of ``a``.
        m_splits: Rows per expert, ``(E,)``, int64, on the device. ``None``: one expert with all
            rows.
        out: ``(M, N)``, ``(M, K)`` or ``(E, N, K)``, contiguous, written. dtype of ``a``; a weight
            gradient may be float32.
        scales: Scales of ``a`` and ``b``, for 8-bit operands from `megacore.ops.quantize`: rows and
            blocks in the forward product, into bf16, or transposed columns in the weight gradient,
            into float32. The input gradient is a forward product with transposed weights.
        num_rows: M. Default: the length of ``a``, which transposed columns do not have.
        accumulate: Add to ``out`` (float32 weight gradients only).
        accumulate_mask: Instead of ``accumulate``, one bool per expert, ``(E,)``.
        first_row: First row of the first expert, int64 scalar on the device; earlier rows
            are neither read nor written. Default: row 0.
        expected_rows: Expected rows of an expert, from which the tiles are chosen; 0 for the mean
            of the rows of ``a``, which is too high if these are a capacity.
        clear_tail: Zero the padding rows. Otherwise they are not written.
        plan: ``"auto"``, ``"wide"``, ``"middle"``, ``"narrow"`` or ``"square"``, or one of the
            last four followed by ``"-columns"``, for measurements. Default: ``"auto"``.

    Raises:
        ValueError: If a size, dtype or address does not fit, or the plan is unknown.
        RuntimeError: If the device or the build has no kernel.
    """
    tile, along_columns = _plan(plan)
    _grouped_gemm(
        a,
        b,
        m_splits,
        out,
        PRODUCTS[product],
        *(scales or (None, None)),
        a.shape[0] if num_rows is None else num_rows,
        accumulate,
        accumulate_mask,
        clear_tail,
        first_row,
        expected_rows,
        tile,
        along_columns,
    )


def _plan(plan: str) -> tuple[int, bool]:
    tile, dash, order = plan.partition("-")
    if tile not in _TILES or (dash and (order != "columns" or tile == "auto")):
        raise ValueError(
            f"the plan of a grouped product must be one of {', '.join(_TILES)}, and all but auto "
            f'may be followed by "-columns", got {plan!r}'
        )
    return _TILES[tile], bool(dash)


def _fake(*args: object) -> None:
    del args


_grouped_gemm = compiled(
    "grouped_gemm_(Tensor a, Tensor b, Tensor? m_splits, Tensor(a!) out, int product,"
    " Tensor? a_scale, Tensor? b_scale, SymInt num_rows, bool accumulate, Tensor? mask,"
    " bool clear_tail, Tensor? first_row, SymInt expected_rows, int tile, bool along_columns)"
    " -> ()",
    _fake,
)
