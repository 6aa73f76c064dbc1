"""Quantized weights of Hugging Face folders, dequantized to bfloat16 while they are read.

The values are those of `transformers` (``Fp8Dequantize`` and ``Mxfp4Dequantize``), bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megatrain.hf_folder import BLOCK_BYTES, DTYPES, TensorFiles, dtype_name

FP8, MXFP4 = "fp8", "mxfp4"
_BLOCKS, _SCALES = "_blocks", "_scales"
_SCALE_INV, _ACTIVATION_SCALE = "_scale_inv", "activation_scale"
_FP8 = torch.float8_e4m3fn
# Scales are numbers, or powers of two: 2 ** (byte - 127).
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu, torch.uint8)
_STORED = {
    **DTYPES,
    "F8_E4M3": _FP8,
    "F8_E8M0": torch.float8_e8m0fnu,
    "U8": torch.uint8,
}
# Values of the format E2M1 by their four bits.
_POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_E2M1 = (*_POSITIVE, *(-value for value in _POSITIVE))
_GROUP = 32  # values with a common scale

Ranges = Mapping[int, tuple[int, int]]


@dataclass(frozen=True, kw_only=True)
class Quantization:
    """Number format of quantized weights.

    Attributes:
        method: ``"fp8"`` or ``"mxfp4"``.
        block: Rows and columns of a weight with a common scale; ``None`` if all have one scale, and
            for MXFP4.
    """

    method: str
    block: tuple[int, int] | None = None


def quantization_of(config: Mapping[str, Any]) -> Quantization | None:
    """Return the number format that ``config.json`` states, or ``None`` without quantization.

    Raises:
        MegacoreError: If it is not supported.
    """
    entry = config.get("quantization_config")
    if not entry:
        return None
    method = entry.get("quant_method", entry) if isinstance(entry, Mapping) else entry
    if method == MXFP4:
        return Quantization(method=MXFP4)
    if method != FP8 or not isinstance(entry, Mapping):
        raise MegacoreError(
            f"quantization_config in config.json must have quant_method fp8 or mxfp4, got "
            f"{method!r}; save the model dequantized, in bfloat16, and import that folder"
        )
    if entry.get("fmt", "e4m3") != "e4m3":
        raise MegacoreError(
            f"fmt of quantization_config in config.json must be 'e4m3', got {entry['fmt']!r}"
        )
    # The default of `transformers` for a missing entry.
    block = entry.get("weight_block_size", (128, 128))
    if block is None:
        return Quantization(method=FP8)
    if not _is_block(block):
        raise MegacoreError(
            "weight_block_size of quantization_config in config.json must be two positive "
            f"integers, got {block!r}"
        )
    return Quantization(method=FP8, block=(block[0], block[1]))


def _is_block(block: Any) -> bool:
    return (
        isinstance(block, (list, tuple))
        and len(block) == 2
        and all(isinstance(size, int) and size > 0 for size in block)
    )


def open_tensors(folder: Path, config: Mapping[str, Any]) -> TensorFiles:
    """Open the tensors of a folder with this content of ``config.json``; no values are read.

    Raises:
        MegacoreError: As `quantization_of` and `QuantizedFiles`.
    """
    quantization = quantization_of(config)
    return TensorFiles(folder) if quantization is None else QuantizedFiles(folder, quantization)


class QuantizedFiles(TensorFiles):
    """Tensors of a folder, of which some are quantized; they appear as bfloat16.

    Dequantized are 16 MiB at a time, or one expert of MXFP4.

    Args:
        folder: As in `TensorFiles`.
        quantization: From `quantization_of`.

    Raises:
        MegacoreError: As `TensorFiles`, or if a scale has another shape than its weight implies.
    """

    formats = _STORED

    def __init__(self, folder: Path, quantization: Quantization) -> None:
        super().__init__(folder)
        self._block = quantization.block
        stored = set(super().keys())
        self._hidden: set[str] = set()
        self._quantized: set[str] = set()
        self._method = quantization.method
        self._is_mxfp4 = self._method == MXFP4
        if self._is_mxfp4:
            self._quantized = {
                name.removesuffix(_BLOCKS) for name in stored if name.endswith(_BLOCKS)
            }
            self._hidden = {name + end for name in self._quantized for end in (_BLOCKS, _SCALES)}
        else:
            self._quantized = {name for name in stored if name + _SCALE_INV in stored}
            self._hidden = {name + _SCALE_INV for name in self._quantized}
            # Scales of activations have no effect on products in bfloat16.
            self._hidden |= {name for name in stored if name.endswith(_ACTIVATION_SCALE)}
        for name in sorted(self._quantized):
            self._check(name)

    def note(self) -> str:
        """Describe what is dequantized, in one sentence."""
        count = len(self._quantized)
        if count == 1:
            return f"1 tensor in {self._method} was read as bfloat16"
        return f"{count:,} tensors in {self._method} were read as bfloat16"

    def keys(self) -> list[str]:
        """Return the names of all tensors, without scales."""
        stored = super().keys()
        visible = [name for name in stored if name not in self._hidden]
        return visible + (sorted(self._quantized) if self._is_mxfp4 else [])

    def __contains__(self, name: object) -> bool:
        """Check whether there is a tensor of this name, quantized or not."""
        if name in self._hidden:
            return False
        return name in self._quantized or super().__contains__(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor, dequantized."""
        if not self._is_mxfp4 or name not in self._quantized:
            return super().shape(name)
        experts, rows, groups, _ = super().shape(name + _BLOCKS)
        return experts, groups * _GROUP, rows

    def dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype of a tensor: bfloat16 if it is quantized.

        Raises:
            MegacoreError: If it is not supported.
        """
        if name in self._quantized:
            return torch.bfloat16
        dtype = self._stored_dtype(name)
        if dtype not in DTYPES.values():
            raise MegacoreError(
                f"tensor {name} has the dtype {dtype_name(dtype)}, but no scales of quant_method "
                f"{self._method} beside it; save the model dequantized, in bfloat16, and import "
                "that folder"
            )
        return dtype

    def dtype(self) -> torch.dtype:
        """Return the dtype of most matrices."""
        return torch.bfloat16 if self._quantized else super().dtype()

    def part(self, name: str, ranges: Ranges, *, into: Tensor | None = None) -> Tensor:
        """Read one tensor, or the part within these ranges of its dimensions; see `TensorFiles`."""
        if name not in self._quantized:
            self.dtype_of(name)  # weights that lack their scales are refused
            return super().part(name, ranges, into=into)
        ends = [ranges.get(dim, (0, size)) for dim, size in enumerate(self.shape(name))]
        if into is None:
            into = torch.empty([end - first for first, end in ends], dtype=torch.bfloat16)
        if self._is_mxfp4:
            self._read_mxfp4(name, ends, into)
        else:
            self._read_fp8(name, ends, into)
        return into

    def elements(self, name: str, first: int, into: Tensor) -> None:
        """Read consecutive elements of a flattened tensor; see `TensorFiles`."""
        if name not in self._quantized:
            self.dtype_of(name)
            super().elements(name, first, into)
            return
        shape = self.shape(name)
        width = math.prod(shape[1:])
        start, end = first // width, -(-(first + into.numel()) // width)
        rows = self.part(name, {0: (start, end)}).view(-1)
        into.copy_(rows[first - start * width :][: into.numel()])

    def _check(self, name: str) -> None:
        """Check dtypes and shapes of a quantized tensor."""
        stored, scales = name, name + _SCALE_INV
        if self._is_mxfp4:
            stored, scales = name + _BLOCKS, name + _SCALES
        if not super().__contains__(scales):
            raise MegacoreError(f"there is no tensor {scales} for {stored}; copy the files again")
        found = super().shape(stored)
        dtypes = (self._stored_dtype(stored), self._stored_dtype(scales))
        if self._is_mxfp4:
            wanted = found[:-1]
            is_valid = len(found) == 4 and found[-1] == _GROUP // 2
            is_valid &= dtypes == (torch.uint8, torch.uint8)
        else:
            is_valid = len(found) == 2 and dtypes[0] == _FP8 and dtypes[1] in _SCALE_DTYPES
            wanted = (1, 1)
            if is_valid and self._block is not None:
                wanted = tuple(-(-n // size) for n, size in zip(found, self._block, strict=True))
        if not is_valid:
            kind = "MXFP4 of (E, O, G, 16) uint8" if self._is_mxfp4 else "a float8_e4m3fn matrix"
            raise MegacoreError(
                f"tensor {stored} with {scales} must be {kind}, got {found} of "
                f"{dtype_name(dtypes[0])} with scales of {dtype_name(dtypes[1])}"
            )
        of_scales = super().shape(scales)
        if of_scales != wanted and not (self._block is None and math.prod(of_scales) == 1):
            raise MegacoreError(
                f"tensor {scales} must have shape {wanted} for {stored} of shape {found}, got "
                f"{of_scales}"
            )

    def _read_fp8(self, name: str, ends: list[tuple[int, int]], into: Tensor) -> None:
        scales = super().part(name + _SCALE_INV, {})
        if scales.dtype == torch.uint8:
            scales = (scales.float() - 127.0).exp2()
        scales = scales.float().view(-1, scales.shape[-1] if scales.dim() else 1)
        height, width = self._block or self.shape(name)
        (first, end), columns = ends
        of_columns = torch.arange(*columns) // width
        step = max(1, BLOCK_BYTES // (4 * max(1, self.shape(name)[1])))
        for at in range(first, end, step):
            stop = min(at + step, end)
            values = super().part(name, {0: (at, stop)})[:, slice(*columns)].float()
            values *= scales[torch.arange(at, stop) // height][:, of_columns]
            into[at - first : stop - first].copy_(values.to(torch.bfloat16))

    def _read_mxfp4(self, name: str, ends: list[tuple[int, int]], into: Tensor) -> None:
        (first, end), columns, rows = ends
        for expert in range(first, end):
            ranges = {0: (expert, expert + 1), 1: rows}
            blocks = super().part(name + _BLOCKS, ranges)
            scales = super().part(name + _SCALES, ranges)
            values = mxfp4_values(blocks, scales)[0, :, slice(*columns)]
            into[expert - first].copy_(values.T)


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize MXFP4.

    Args:
        blocks: ``(..., G, 16)`` uint8; each byte has two values, the lower half first.
        scales: ``(..., G)`` uint8; exponents plus 127.

    Returns:
        ``(..., 32 * G)`` bfloat16.
    """
    table = torch.tensor(_E2M1, dtype=torch.bfloat16)
    values = torch.stack((table[(blocks & 15).int()], table[(blocks >> 4).int()]), dim=-1)
    exponents = scales.int()[..., None] - 127
    return torch.ldexp(values.flatten(-2), exponents).to(torch.bfloat16).flatten(-2)
