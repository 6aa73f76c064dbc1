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
_FACTOR = re.compile(r"model\.layers\.(\d+)\.(.+)\.lora_(A|B|magnitude)")
_EXPERTS = "mlp.experts"


def formula(name: str, shape: tuple[int, ...]) -> Tensor:
    """Values of an adapter's parameter, the same for every layout and library."""
    phase = zlib.crc32(name.encode()) % 1000
    numbers = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
    values = torch.sin(1.7 * numbers + phase) * (0.2 if name.endswith("a") else 0.1)
    return values.to(torch.float32).view(shape)


def add_adapters(theirs: Any, **settings: Any) -> Any:
    """Give a model of `transformers` the adapters of PEFT, with the values of `formula`.

    All projections have one, except gate and up of experts, which share one in PEFT. In models
    with experts, PEFT takes names of dense MLPs for those of experts, so these are parameters.
    """
    peft = pytest.importorskip("peft")
    modules = [name for name, _ in theirs.named_modules()]
    linear = [name for name in modules if any(name.endswith(f".{key}") for key in _NAMES)]
    experts = [f"{name}.down_proj" for name in modules if name.endswith(_EXPERTS)]
    if experts:
        dense = [name for name in linear if ".mlp." in name]
        linear = [name for name in linear if name not in dense]
        settings["target_parameters"] = [f"{name}.weight" for name in dense] + experts
    options = {"r": RANK, "lora_alpha": ALPHA, "target_modules": linear, **settings}
    model = peft.get_peft_model(theirs, peft.LoraConfig(**options))
    with torch.no_grad():
        for name, parameter in their_adapters(model).items():
            if name.endswith("magnitude"):
                continue  # the norms of the rows of weights
            values = formula(name, tuple(_ours(name, parameter).shape))
            parameter.copy_(_theirs(name, values))
    return model


def their_adapters(model: Any) -> dict[str, Tensor]:
    """Return the parameters of adapters by our names, with shapes and rows of theirs."""
    found = {}
    for name, parameter in model.named_parameters():
        if (match := _FACTOR.search(name)) is not None:
            layer, module, factor = match.groups()
            ours = "moe.experts.down" if module == _EXPERTS else _NAMES[module]
            found[f"layers.{layer}.{ours}.lora_{factor.lower()}"] = parameter
    return found


def their_saved(model: Any, rows: int) -> dict[str, Tensor]:
    """Return the parameters of ``modules_to_save`` by our names, padded with zeros to ``rows``."""
    found = {}
    for name, parameter in model.named_parameters():
        for module, ours in (("embed_tokens", "embedding"), ("lm_head", "head")):
            if f"{module}.modules_to_save" in name:
                padding = (0, 0, 0, rows - len(parameter))
                found[ours] = torch.nn.functional.pad(parameter.detach(), padding)
    return found


def in_our_order(name: str, theirs: Tensor, family: str, model: ModelConfig) -> Tensor:
    """Return a parameter of an adapter with its rows in our order."""
    local = name.split(".", 2)[2].rpartition(".")[0]
    row = FAMILIES[family].table.get(local)
    if not name.endswith("lora_b") or row is None:
        return _ours(name, theirs)
    return row.transform.join([theirs], GPTShape.from_config(model)).reshape(theirs.shape)


def _ours(name: str, theirs: Tensor) -> Tensor:
    """Return the factors of all experts, ``(E, rank, K)`` or ``(E, N, rank)``."""
    if "experts" not in name or theirs.dim() == 3:
        return theirs
    if name.endswith("a"):
        return theirs.view(-1, RANK, theirs.shape[1])
    return theirs.view(theirs.shape[0], RANK, -1).permute(2, 0, 1)


def _theirs(name: str, ours: Tensor) -> Tensor:
    """Invert `_ours`."""
    if "experts" not in name:
        return ours
    if name.endswith("a"):
        return ours.flatten(0, 1)
    return ours.permute(1, 2, 0).flatten(1)


class PlainExperts(torch.nn.Module):
    """Adapters of some weights of all experts as plain sums: ``W + scale * B A``."""

    def __init__(self, names: list[str], width: int, inputs: int, num_experts: int) -> None:
        super().__init__()
        self.names = names
        for number, name in enumerate(names):
            for factor, shape in (("a", (RANK, inputs)), ("b", (width, RANK))):
                values = formula(f"{name}.lora_{factor}", (num_experts, *shape))
                self.register_parameter(f"{factor}{number}", torch.nn.Parameter(values))

    def forward(self, weight: Tensor) -> Tensor:
        """Compute the weights with adapters, ``(E, N, K)``."""
        terms = [
            getattr(self, f"b{number}") @ getattr(self, f"a{number}")
            for number in range(len(self.names))
        ]
        return weight + ALPHA / RANK * torch.cat(terms, dim=1)

    def by_name(self) -> dict[str, Tensor]:
        """Return the factors by our names."""
        return {
            f"{name}.lora_{factor}": getattr(self, f"{factor}{number}")
            for number, name in enumerate(self.names)
            for factor in "ab"
        }


def add_plain_experts(theirs: Any) -> dict[str, Tensor]:
    """Give all experts of a model adapters by plain torch; return these by our names."""
    theirs.requires_grad_(False)
    found: dict[str, Tensor] = {}
    for name, module in theirs.named_modules():
        if not name.endswith(_EXPERTS):
            continue
        experts = f"layers.{name.split('.')[2]}.moe.experts"
        for weight, parts in (("gate_up_proj", ["gate", "up"]), ("down_proj", ["down"])):
            num_experts, rows, inputs = getattr(module, weight).shape
            names = [f"{experts}.{part}" for part in parts]
            adapters = PlainExperts(names, rows // len(parts), inputs, num_experts)
            torch.nn.utils.parametrize.register_parametrization(module, weight, adapters)
            found |= adapters.by_name()
    return found
