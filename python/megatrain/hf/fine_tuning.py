"""Entries of ``config.json`` that matter to training only, with the effect of `transformers`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatrain.config import ModelConfig, MoEConfig
from megatrain.hf.keys import Values, checked
from megatrain.hf.layer_rules import letters_of

# Entries of DeepSeek's training, which `transformers` does not read.
_UNUSED = ("aux_loss_alpha", "seq_aux")
_COEF, _SWITCH = "router_aux_loss_coef", "output_router_logits"


@dataclass(frozen=True, kw_only=True)
class RouterLoss:
    """Load-balancing loss, which `transformers` adds only with ``output_router_logits``.

    `transformers` pools the tokens of all layers and counts each choice of a token. Ours is a loss
    per layer with shares of all choices, so its coefficient is ``top_k / MoE layers`` of theirs;
    the sums are equal where layers are alike.

    Attributes:
        default: Coefficient if no entry states it.
    """

    default: float = 0.001
    names: tuple[str, ...] = (_COEF, _SWITCH)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the coefficient, 0 if the loss is off, and the pool of `transformers`."""
        coef = config.get(_COEF)
        coef = self.default if coef is None else checked(_COEF, coef, float)
        is_on = checked(_SWITCH, config.get(_SWITCH) or False, bool)
        if not is_on or coef == 0 or values.get("moe.num_experts") == 0:
            return {"moe.aux_loss_coef": 0.0}
        share = values["moe.top_k"] / max(1, _num_moe_layers(values))
        return {"moe.aux_loss_coef": coef * share, "moe.aux_loss_type": "batch"}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the coefficient in the scale of `transformers`; the loss stays off there."""
        return {_COEF: values["moe.aux_loss_coef"] * _num_moe_layers(values) / values["moe.top_k"]}


@dataclass(frozen=True, kw_only=True)
class PaddingRow:
    """Row of the embedding without gradient, ``padding_idx`` of `transformers`.

    Attributes:
        default: Token if no entry states it.
    """

    default: int | None = None
    names: tuple[str, ...] = ("pad_token_id",)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the row; a negative number counts from the end, as in torch."""
        token, vocab = config.get("pad_token_id", self.default), values["model.vocab_size"]
        if token is not None:
            token = checked("pad_token_id", token, int, least=-vocab)
            token = token + vocab if token < 0 else token
        return {"model.padding_idx": token if token is not None and token < vocab else None}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the token."""
        return {"pad_token_id": values["model.padding_idx"]}


# Rules whose entries do not change what the trained model computes.
TRAINING_RULES = (RouterLoss, PaddingRow)


def _num_moe_layers(values: Values) -> int:
    pattern = values.get("moe.layer_pattern", "e")
    return letters_of(pattern, values["model.num_layers"]).count("e")


def training_note(config: Mapping[str, Any], model: ModelConfig, moe: MoEConfig) -> str | None:
    """Describe the settings of an imported model that give training the loss of `transformers`.

    Args:
        config: Content of ``config.json``.
        model: From `sections_from_hf`.
        moe: From `sections_from_hf`.

    Returns:
        One line, or ``None`` if there are none.
    """
    parts = []
    if moe.num_experts and moe.expert_bias:
        parts.append("moe.expert_bias_rate = 0 (the biases of experts stay)")
    coef = config.get(_COEF)
    if moe.aux_loss_coef:
        parts.append(
            f"moe.aux_loss_coef = {moe.aux_loss_coef:.6g} for each layer ({_COEF} times top_k over "
            "the MoE layers, as if layers were alike)"
        )
    elif moe.num_experts and coef:
        parts.append(f"moe.aux_loss_coef = 0.0 ({_SWITCH} is not true, so {_COEF} = {coef} is off)")
    if model.num_mtp_layers:
        parts.append(
            f"model.mtp_loss_coef = {model.mtp_loss_coef} (layers for multi-token prediction do "
            "not learn; 0.1 trains them)"
        )
    unused = [
        f"{name} = {json.dumps(config[name])}" for name in _UNUSED if config.get(name) is not None
    ]
    if moe.num_experts and unused:
        parts.append(f"{' and '.join(unused)} not used")
    if model.padding_idx is not None:
        parts.append(f"model.padding_idx = {model.padding_idx} (no gradient for that row)")
    return f"training as in transformers: {'; '.join(parts)}" if parts else None
