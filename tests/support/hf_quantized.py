"""Folders of quantized models, and the values that `transformers` reads from them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.hf_models import save_theirs

BLOCK = (8, 16)
# Widths that are multiples of the block, and of 32 for MXFP4.
GPT_OSS = {"hidden_size": 64, "intermediate_size": 96}
_KEPT = ("embed_tokens", "lm_head", "norm", "gate.weight", "bias")


def save_fp8(
    name: str, folder: Path, *, scales: torch.dtype = torch.float32, **more: Any
) -> dict[str, Tensor]:
    """Save a model in blockwise fp8; return the tensors as `transformers` dequantizes them."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    save_theirs(name, folder, torch.bfloat16, **more)
    stored, wanted = {}, {}
    for key, value in load_file(folder / "model.safetensors").items():
        stored[key] = wanted[key] = value
        if value.dim() == 2 and not any(part in key for part in _KEPT):
            weight, scale = to_fp8(value, scales)
            stored |= {key: weight, f"{key}_scale_inv": scale}
            rows, columns = value.shape
            if rows % BLOCK[0] == 0 and columns % BLOCK[1] == 0:
                wanted[key] = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16)
            else:  # transformers refuses such a weight, which vLLM and DeepSeek's code read
                whole = scale.float().repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
                wanted[key] = (weight.float() * whole[:rows, :columns]).bfloat16()
    quantization = {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": list(BLOCK),
    }
    _save(folder, stored, quantization)
    return wanted


def to_fp8(value: Tensor, scales: torch.dtype) -> tuple[Tensor, Tensor]:
    """Quantize a matrix; the last block of rows or columns may be smaller."""
    (height, width), (rows, columns) = BLOCK, value.shape
    padded = torch.zeros(-(-rows // height) * height, -(-columns // width) * width)
    padded[:rows, :columns] = value
    blocks = padded.view(len(padded) // height, height, -1, width)
    scale = blocks.abs().amax((1, 3)).clamp(min=1e-6) / 448
    if scales == torch.uint8:  # the exponent of a power of two
        stored = (scale.log2().ceil() + 127).to(torch.uint8)
        scale = (stored.float() - 127).exp2()
    elif scales == torch.float8_e8m0fnu:
        stored = scale.log2().ceil().exp2().to(scales)
        scale = stored.float()
    else:
        stored = scale.to(scales)
        scale = stored.float()
    weight = (blocks / scale[:, None, :, None]).view_as(padded)[:rows, :columns]
    return weight.clamp(-448, 448).to(torch.float8_e4m3fn), stored


def save_mxfp4(folder: Path, **more: Any) -> dict[str, Tensor]:
    """Save gpt-oss with random experts in MXFP4; return the tensors of `transformers`."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    save_theirs("gpt-oss", folder, torch.bfloat16, **GPT_OSS, **more)
    stored, wanted = {}, {}
    generator = torch.Generator().manual_seed(5)
    for key, value in load_file(folder / "model.safetensors").items():
        stored[key] = wanted[key] = value
        if key.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = value.shape
            shape = (experts, outputs, inputs // 32)
            blocks = torch.randint(256, (*shape, 16), dtype=torch.uint8, generator=generator)
            scales = torch.randint(118, 124, shape, dtype=torch.uint8, generator=generator)
            del stored[key]
            stored |= {f"{key}_blocks": blocks, f"{key}_scales": scales}
            wanted[key] = convert_moe_packed_tensors(blocks, scales)
    _save(folder, stored, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]})
    return wanted


def _save(folder: Path, tensors: dict[str, Tensor], quantization: dict[str, Any]) -> None:
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": quantization}
    path.write_text(json.dumps(config))
