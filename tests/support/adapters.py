"""Adapters of PEFT on models of `transformers`, with the values and names of ours."""

from __future__ import annotations

import re
import zlib
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config import ModelConfig
from megatrain.hf.families import FAMILIES
from megatrain.models.shape import GPTShape

RANK, ALPHA = 3, 6.0
# Modules of theirs in a layer, and projections of ours.
_NAMES = {
    "self_attn.q_proj": "attention.q",
    "self_attn.k_proj": "attention.k",
    "self_attn.v_proj": "attention.v",
    "self_attn.o_proj": "attention.output",
    "self_attn.q_a_proj": "attention.q_down",
    "self_attn.q_b_proj": "attention.q_up",
    "self_attn.kv_a_proj_with_mqa": "attention.kv_down",
    "self_attn.kv_b_proj": "attention.kv_up",
    **{f"mlp.{part}_proj": f"mlp.{part}" for part in ("gate", "up", "down")},
    **{
        f"mlp.{block}.{part}_proj": f"moe.shared.{part}"
        for block in ("shared_expert", "shared_experts")
        for part in ("gate", "up", "down")
    },
}
_FACTOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.lora_(A|B)\.")


def formula(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values of an adapter's parameter, the same for every layout and library."""
    phase = zlib.crc32(name.encode()) % 1000
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    values = torch.sin(1.7 * numbers + phase) * (0.2 if name.endswith("a") else 0.1)
    return values.to(torch.float32).view(shape)


def add_adapters(theirs: Any, **settings: Any) -> Any:
    """Give a model of `transformers` the adapters of PEFT, with the values of `formula`."""
    peft = pytest.importorskip("peft")
    modules = {name for name, _ in theirs.named_modules()}
    names = sorted({key for key in _NAMES for name in modules if name.endswith(f".{key}")})
    settings = {"r": RANK, "lora_alpha": ALPHA, "target_modules": names, **settings}
    model = peft.get_peft_model(theirs, peft.LoraConfig(**settings))
    with torch.no_grad():
        for name, parameter in their_adapters(model).items():
            parameter.copy_(formula(name, tuple(parameter.shape)))
    return model


def their_adapters(model: Any) -> dict[str, Tensor]:
    """Return the parameters of adapters by our names, with rows in their order."""
    found = {}
    for name, parameter in model.named_parameters():
        if (match := _FACTOR.search(name)) is not None:
            layer, module, factor = match.groups()
            found[f"layers.{layer}.{_NAMES[module]}.lora_{factor.lower()}"] = parameter
    return found


def in_our_order(name: str, theirs: Tensor, family: str, model: ModelConfig) -> Tensor:
    """Return a parameter of an adapter with its rows in our order."""
    local = name.split(".", 2)[2].rpartition(".")[0]
    row = FAMILIES[family].table.get(local)
    if not name.endswith("lora_b") or row is None:
        return theirs
    return row.transform.join([theirs], GPTShape.from_config(model)).reshape(theirs.shape)
