"""Readable facts on the kernels that a device gets: architectures, grouped and 8-bit products."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from megacore.ops.cuda_module import DeviceFacts, KernelBuild
from megacore.ops.fp8 import fp8_products
from megacore.ops.gemm_cuda import fp8_obstacle, missing_grouped

# Products that a note names.
_MOST_SHOWN = 3


def kernel_text(
    build: KernelBuild,
    device: DeviceFacts,
    *,
    has_torch_grouped: bool,
    fp8: str | None = None,
) -> str:
    """Describe the kernels of a device in one line.

    Args:
        build: Kernels of the installation.
        device: Capability and driver of the device.
        has_torch_grouped: Whether torch has grouped products for it.
        fp8: Description of 8-bit products; ``None`` if the run has none.

    Example:
        >>> build = KernelBuild(archs=("90a",), grouped=("90a",), cuda=13000)
        >>> h100 = DeviceFacts(capability=(9, 0), driver=13010)
        >>> kernel_text(build, h100, has_torch_grouped=True, fp8="native")
        'sm_90a, grouped products native, fp8 native'
        >>> kernel_text(KernelBuild(), h100, has_torch_grouped=False)
        'none: megacore was installed without CUDA kernels, grouped products one per expert'
    """
    reason = build.obstacle(device)
    parts = [f"sm_{build.arch_for(device.capability)}" if reason is None else f"none: {reason}"]
    native = (
        reason is None and missing_grouped(build.grouped, build.archs, device.capability) is None
    )
    grouped = "native" if native else "of torch" if has_torch_grouped else "one per expert"
    parts.append(f"grouped products {grouped}")
    if fp8 is not None:
        parts.append(f"fp8 {fp8}")
    return ", ".join(parts)


@dataclass(frozen=True, kw_only=True)
class Fp8Products:
    """Products with 8-bit operands of a model, and why some are emulated.

    Attributes:
        number: All products.
        emulated: Reason by name and shape, as in ``"layers.0.mlp.up (out 96, in 40)"``.
    """

    number: int
    emulated: dict[str, str]

    @classmethod
    def of(cls, modules: Sequence[nn.Module], dtype: torch.dtype) -> Fp8Products:
        """Find the products of modules on their device."""
        products = [each for module in modules for each in fp8_products(module)]
        emulated = {}
        for each in products:
            if (reason := fp8_obstacle(each.weight.device, dtype, *each.sizes)) is not None:
                emulated[f"{each.name} (out {each.sizes[1]}, in {each.sizes[2]})"] = reason
        return cls(number=len(products), emulated=emulated)

    def text(self) -> str:
        """Return ``"native"``, ``"emulated"``, or the number of those that are emulated."""
        if not self.emulated:
            return "native"
        if len(self.emulated) == self.number:
            return "emulated"
        return f"emulated in {len(self.emulated)} of {self.number} products"

    def notes(self, dtype: str) -> tuple[str, ...]:
        """Return a note on products that are slower than those of ``dtype``, if there are any."""
        if not self.emulated:
            return ()
        reasons = list(dict.fromkeys(self.emulated.values()))
        start = f"train.fp8 is {self.text()}, slower than {dtype} alone: {'; '.join(reasons)}"
        if len(self.emulated) == self.number:
            return (start,)
        names = list(self.emulated)
        more = ", ..." if len(names) > _MOST_SHOWN else ""
        return (f"{start}: {', '.join(names[:_MOST_SHOWN])}{more}",)
