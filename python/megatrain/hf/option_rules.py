"""Entries of ``config.json`` whose settings are computed from them, or from other settings."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.errors import MegacoreError
from megatrain.hf.keys import Values, checked
from megatrain.hf.layer_rules import Windows, letters_of, pattern_of


@dataclass(frozen=True)
class EmbeddingRoot:
    """Embeddings times the square root of their width, in all Gemma models."""

    names: tuple[str, ...] = ()

    def read(self, config: Mapping[str, Any], values: Values) -> Values:  # noqa: ARG002
        """Return the factor."""
        return {"model.embedding_factor": math.sqrt(values["model.hidden_size"])}

    def write(self, values: Values) -> dict[str, Any]:  # noqa: ARG002
        """Return no entries, since the factor follows from the width."""
        return {}


@dataclass(frozen=True, kw_only=True)
class ScoreWidth:
    """Factor on scores, as the width of heads whose root it is the inverse of.

    Attributes:
        default: The width if no entry states it.
    """

    default: int
    names: tuple[str, ...] = ("query_pre_attn_scalar",)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:  # noqa: ARG002
        """Return the factor."""
        width = config.get(self.names[0])
        width = self.default if width is None else checked(self.names[0], width, float)
        if width <= 0:
            raise MegacoreError(f"{self.names[0]} in config.json must be positive, got {width}")
        return {"model.attention_scale": width**-0.5}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the width, an integer if it is one up to rounding."""
        width = (values["model.attention_scale"] or values["model.head_dim"] ** -0.5) ** -2
        nearest = round(width)
        return {self.names[0]: nearest if math.isclose(width, nearest) else width}


@dataclass(frozen=True, kw_only=True)
class LogitDivisor:
    """Divisor of logits, ``logits_scaling`` of Granite."""

    names: tuple[str, ...] = ("logits_scaling",)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:  # noqa: ARG002
        """Return the factor on logits."""
        divisor = config.get("logits_scaling")
        divisor = 1.0 if divisor is None else checked("logits_scaling", divisor, float)
        if divisor <= 0:
            raise MegacoreError(f"logits_scaling in config.json must be positive, got {divisor}")
        return {"model.logit_factor": 1 / divisor}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the divisor."""
        return {"logits_scaling": 1 / values["model.logit_factor"]}


@dataclass(frozen=True, kw_only=True)
class RotatedLayers:
    """Layers with rotation: 1 in ``no_rope_layers``, or all but every so many.

    Attributes:
        empty: Whether an empty list is as if it were missing.
    """

    empty: bool = False
    names: tuple[str, ...] = ("no_rope_layers", "no_rope_layer_interval")

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the pattern of rotated layers.

        Raises:
            MegacoreError: If the entry does not have a number for each layer.
        """
        num_layers, flags = values["model.num_layers"], config.get("no_rope_layers")
        if flags is None or (self.empty and flags == []):
            interval = config.get("no_rope_layer_interval", 4)
            interval = checked("no_rope_layer_interval", interval, int)
            flags = [int((layer + 1) % interval != 0) for layer in range(num_layers)]
        is_list = isinstance(flags, list) and len(flags) == num_layers
        if not is_list or not all(flag in (0, 1) for flag in flags):
            raise MegacoreError(
                f"no_rope_layers in config.json must have 0 or 1 for each of {num_layers} layers, "
                f"got {flags!r}"
            )
        return {"model.rotation_pattern": pattern_of("".join("nr"[flag] for flag in flags))}

    def write(self, values: Values) -> dict[str, Any]:
        """Return a number for each layer."""
        letters = letters_of(values["model.rotation_pattern"], values["model.num_layers"])
        return {"no_rope_layers": [int(letter == "r") for letter in letters]}


@dataclass(frozen=True, kw_only=True)
class RotatedWindows(Windows):
    """Windows, and rotation in the layers that have one.

    Attributes:
        rotated_without: Whether all layers are rotated if the window is empty.
    """

    rotated_without: bool = False

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the windows and the pattern of rotated layers."""
        found = super().read(config, values)
        if found["model.sliding_window"] is None:
            is_empty = config.get("sliding_window", self.default) is None
            is_rotated = self.rotated_without and is_empty
            return found | {"model.rotation_pattern": "r" if is_rotated else "n"}
        letters = letters_of(found["model.window_pattern"], values["model.num_layers"])
        rotated = "".join("r" if letter == "w" else "n" for letter in letters)
        return found | {"model.rotation_pattern": pattern_of(rotated)}


@dataclass(frozen=True, kw_only=True)
class OnlyAttention:
    """Kinds of layers, all of which must have full attention.

    Attributes:
        names: The entry.
        kinds: Its values for such a layer.
        default: Whether a missing entry means full attention.
    """

    names: tuple[str, ...] = ("layer_types",)
    kinds: tuple[str, ...] = ("full_attention",)
    default: bool = True

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Check the kinds.

        Raises:
            MegacoreError: If there are others.
        """
        num_layers = values["model.num_layers"]
        stated = (each for each in self.names if config.get(each) is not None)
        name = next(stated, self.names[0])
        kinds: Any = config.get(name)
        if kinds is None and self.default:
            return {}
        is_list = isinstance(kinds, list) and len(kinds) >= num_layers
        if not is_list or not all(kind in self.kinds for kind in kinds[:num_layers]):
            raise MegacoreError(
                f"{name} in config.json must name {' or '.join(self.kinds)} for each of "
                f"{num_layers} layers, got {kinds!r}; other kinds of layers are not supported"
            )
        return {}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the kind of all layers."""
        return {self.names[0]: [self.kinds[0]] * values["model.num_layers"]}


@dataclass(frozen=True, kw_only=True)
class RotatedChunks(RotatedLayers):
    """Layers of Llama 4 with rotation, and those whose attention stays in chunks.

    The latter are the same, if no entry names them.
    """

    empty: bool = True
    names: tuple[str, ...] = (*RotatedLayers.names, "attention_chunk_size", "layer_types")

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the length of a chunk, and the patterns of layers.

        Raises:
            MegacoreError: If the entry does not name a kind for each layer.
        """
        found = super().read(config, values)
        num_layers, kinds = values["model.num_layers"], config.get("layer_types")
        letters = {"chunked_attention": "w", "full_attention": "f"}
        if kinds is None:
            rotated = letters_of(found["model.rotation_pattern"], num_layers)
            layers = rotated.replace("n", "f").replace("r", "w")
        elif (
            isinstance(kinds, list)
            and len(kinds) == num_layers
            and all(isinstance(kind, str) and kind in letters for kind in kinds)
        ):
            layers = "".join(letters[kind] for kind in kinds)
        else:
            raise MegacoreError(
                f"layer_types in config.json must name chunked_attention or full_attention for "
                f"each of {num_layers} layers, got {kinds!r}"
            )
        size = config.get("attention_chunk_size", 8192)
        if size is None or "w" not in layers:
            return found | {"model.sliding_window": None}
        return found | {
            "model.sliding_window": checked("attention_chunk_size", size, int),
            "model.window_type": "chunk",
            "model.window_pattern": pattern_of(layers),
        }

    def write(self, values: Values) -> dict[str, Any]:
        """Return the length of a chunk, which `transformers` needs in any case, and the kinds."""
        size, num_layers = values["model.sliding_window"], values["model.num_layers"]
        layers = (
            letters_of(values["model.window_pattern"], num_layers) if size else "f" * num_layers
        )
        kinds = {"w": "chunked_attention", "f": "full_attention"}
        return super().write(values) | {
            "attention_chunk_size": size or 8192,
            "layer_types": [kinds[letter] for letter in layers],
        }


@dataclass(frozen=True)
class QueryScale:
    """Factor of Llama 4 on queries of layers without rotation, by position."""

    names: tuple[str, ...] = ("attn_temperature_tuning", "floor_scale", "attn_scale")

    def read(self, config: Mapping[str, Any], values: Values) -> Values:  # noqa: ARG002
        """Return the settings of the factor."""
        is_on = checked(self.names[0], config.get(self.names[0], True), bool)
        length = checked("floor_scale", config.get("floor_scale", 8192), int)
        beta = checked("attn_scale", config.get("attn_scale", 0.1), float)
        if not is_on or beta == 0:
            return {"model.query_scaling.beta": 0.0}
        return {
            "model.query_scaling.beta": beta,
            "model.query_scaling.length": length,
            "model.query_scaling.shift": 1,
            "model.query_scaling.layers": "unrotated",
        }

    def write(self, values: Values) -> dict[str, Any]:
        """Return the entries for the same factor."""
        beta = values["model.query_scaling.beta"]
        entries = {"floor_scale": values["model.query_scaling.length"], "attn_scale": beta}
        return {"attn_temperature_tuning": beta > 0, **(entries if beta else {})}


@dataclass(frozen=True)
class ListedExperts:
    """Layers of Llama 4 with experts: ``moe_layers``, or every so many."""

    names: tuple[str, ...] = ("moe_layers", "interleave_moe_layer_step")

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the settings that select the same layers."""
        num_layers, listed = values["model.num_layers"], config.get("moe_layers")
        if listed is None:
            step = config.get("interleave_moe_layer_step", 1)
            step = checked("interleave_moe_layer_step", step, int)
            listed = list(range(step - 1, num_layers, step))
        if not isinstance(listed, list) or not all(type(layer) is int for layer in listed):
            raise MegacoreError(
                f"moe_layers in config.json must be a list of layers, got {listed!r}"
            )
        letters = ("e" if layer in listed else "d" for layer in range(num_layers))
        return {"moe.layer_pattern": pattern_of("".join(letters))}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the list."""
        letters = letters_of(values["moe.layer_pattern"], values["model.num_layers"])
        return {"moe_layers": [layer for layer, letter in enumerate(letters) if letter == "e"]}


@dataclass(frozen=True)
class PositionKind:
    """Rotation of all layers or none, by ``position_embedding_type``."""

    names: tuple[str, ...] = ("position_embedding_type",)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:  # noqa: ARG002
        """Return the pattern of rotated layers."""
        kind = config.get("position_embedding_type")
        return {"model.rotation_pattern": "r" if kind == "rope" else "n"}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the entry for the same rotation."""
        return {
            "position_embedding_type": "rope" if values["model.rotation_pattern"] == "r" else "nope"
        }


@dataclass(frozen=True)
class HybridWidths:
    """Widths of Granite 4; ``shared_intermediate_size`` is the MLP's if there are no experts."""

    names: tuple[str, ...] = ("shared_intermediate_size", "intermediate_size")

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the widths."""
        shared = config.get("shared_intermediate_size", 1024)
        shared = checked("shared_intermediate_size", shared, int)
        if not values["moe.num_experts"]:
            return {"model.ffn_hidden_size": shared, "moe.score_function": "softmax"}
        width = checked("intermediate_size", config.get("intermediate_size"), int)
        return {
            "model.ffn_hidden_size": width,
            "moe.ffn_hidden_size": width,
            "moe.shared_ffn_hidden_size": shared,
        }

    def write(self, values: Values) -> dict[str, Any]:
        """Return the widths."""
        if not values["moe.num_experts"]:
            return {"shared_intermediate_size": values["model.ffn_hidden_size"]}
        return {
            "shared_intermediate_size": values["moe.shared_ffn_hidden_size"],
            "intermediate_size": values["moe.ffn_hidden_size"],
        }


@dataclass(frozen=True)
class SharedWidth:
    """Width of the shared expert, 0 for none."""

    names: tuple[str, ...] = ("shared_intermediate_size",)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:  # noqa: ARG002
        """Return the width."""
        width = config.get("shared_intermediate_size", 0)
        width = checked("shared_intermediate_size", width, int, least=0)
        return {"moe.shared_ffn_hidden_size": width}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the width."""
        return {"shared_intermediate_size": values["moe.shared_ffn_hidden_size"]}


@dataclass(frozen=True)
class InnerWidth:
    """Inner width of GPT-2's MLP, four times the model's if it is not stated."""

    names: tuple[str, ...] = ("n_inner",)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the width."""
        width = config.get("n_inner")
        hidden = values["model.hidden_size"]
        return {
            "model.ffn_hidden_size": 4 * hidden if width is None else checked("n_inner", width, int)
        }

    def write(self, values: Values) -> dict[str, Any]:
        """Return the width."""
        return {"n_inner": values["model.ffn_hidden_size"]}


@dataclass(frozen=True)
class IndexerKinds:
    """Layers of GLM-5 with an indexer of their own, ``full``, or that of an earlier layer."""

    names: tuple[str, ...] = (
        "indexer_types",
        "index_topk_pattern",
        "index_topk_freq",
        "index_skip_topk_offset",
    )

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the pattern of layers with an indexer.

        Raises:
            MegacoreError: If the entries do not name a kind for each layer.
        """
        kinds, pattern = config.get("indexer_types"), config.get("index_topk_pattern")
        num_layers = values["model.num_layers"]
        if kinds is None and pattern is not None:
            kinds = [{"F": "full", "S": "shared"}.get(kind, kind) for kind in pattern]
        if kinds is None:
            every = checked("index_topk_freq", config.get("index_topk_freq", 1), int, least=0)
            name = "index_skip_topk_offset"
            offset = checked(name, config.get(name, 2), int, least=0)
            kinds = [
                "full" if max(layer - offset + 1, 0) % max(every, 1) == 0 else "shared"
                for layer in range(num_layers)
            ]
        is_list = isinstance(kinds, list) and len(kinds) >= num_layers
        if not is_list or not all(kind in ("full", "shared") for kind in kinds):
            raise MegacoreError(
                f"indexer_types in config.json must name full or shared for each of {num_layers} "
                f"layers, got {kinds!r}"
            )
        letters = "".join(kind[0] for kind in kinds[:num_layers])
        return {"model.mla.index_pattern": pattern_of(letters)}

    def write(self, values: Values) -> dict[str, Any]:
        """Return a kind for each layer."""
        letters = letters_of(values["model.mla.index_pattern"], values["model.num_layers"])
        return {"indexer_types": ["full" if kind == "f" else "shared" for kind in letters]}
