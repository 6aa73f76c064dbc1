"""Entries of ``config.json`` that select layers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megacore.errors import MegacoreError
from megatrain.config.base import letter_of_layer
from megatrain.hf.keys import Values, checked


@dataclass(frozen=True, kw_only=True)
class SparseStep:
    """Layers with experts: every ``decoder_sparse_step``-th, except ``mlp_only_layers``."""

    names: tuple[str, ...] = ("decoder_sparse_step", "mlp_only_layers")

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the settings that select the same layers."""
        step = checked("decoder_sparse_step", config.get("decoder_sparse_step") or 1, int)
        dense = config.get("mlp_only_layers") or []
        if not isinstance(dense, list) or not all(isinstance(layer, int) for layer in dense):
            raise MegacoreError(
                f"mlp_only_layers in config.json must be a list of layers, got {dense!r}"
            )
        letters = (
            "e" if (layer + 1) % step == 0 and layer not in dense else "d"
            for layer in range(values["model.num_layers"])
        )
        return {"moe.layer_pattern": pattern_of("".join(letters))}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the entries that select the same layers."""
        letters = letters_of(values["moe.layer_pattern"], values["model.num_layers"])
        dense = [layer for layer, letter in enumerate(letters) if letter == "d"]
        return {"decoder_sparse_step": 1, "mlp_only_layers": dense}


def pattern_of(letters: str) -> str:
    """Return the pattern of fewest letters that begins with these.

    Example:
        >>> pattern_of("ddeded"), pattern_of("dddeeee"), pattern_of("eded")
        ('d(de)', 'ddd(e)', 'ed')
    """
    patterns = [period_of(letters)]
    patterns += [f"{letters[:n]}({period_of(letters[n:])})" for n in range(1, len(letters))]
    return min(patterns, key=lambda pattern: len(pattern.strip("()").replace("(", "")))


def letters_of(pattern: str, num_layers: int) -> str:
    """Return the letters of all layers."""
    return "".join(letter_of_layer(pattern, layer) for layer in range(num_layers))


def period_of(letters: str) -> str:
    """Return the shortest text whose repetition begins with all letters.

    Example:
        >>> period_of("wwfwwfw")
        'wwf'
    """
    return next(
        letters[:size]
        for size in range(1, len(letters) + 1)
        if (letters[:size] * len(letters)).startswith(letters)
    )


@dataclass(frozen=True, kw_only=True)
class FirstDense:
    """Layers with experts: all after the first ``first_k_dense_replace``."""

    default: int
    names: tuple[str, ...] = ("first_k_dense_replace", "moe_layer_freq")

    def read(self, config: Mapping[str, Any], values: Values) -> Values:  # noqa: ARG002
        """Return the settings that select the same layers."""
        first = config.get("first_k_dense_replace")
        first = self.default if first is None else first
        if not isinstance(first, int) or first < 0 or (config.get("moe_layer_freq") or 1) != 1:
            raise MegacoreError(
                "first_k_dense_replace in config.json must be an integer of at least 0, and "
                f"moe_layer_freq 1, got {first!r} and {config.get('moe_layer_freq')!r}"
            )
        return {"moe.layer_pattern": f"{'d' * first}(e)" if first else "e"}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the number of first dense layers; others cannot be expressed."""
        letters = letters_of(values["moe.layer_pattern"], values["model.num_layers"])
        return {"first_k_dense_replace": len(letters) - len(letters.lstrip("d"))}


@dataclass(frozen=True, kw_only=True)
class LayerKinds:
    """Layers with experts by ``mlp_layer_types``; if it is missing, all but the first ones.

    Attributes:
        first: Number of these; an entry of it may follow the names.
    """

    first: int = 1
    names: tuple[str, ...] = ("mlp_layer_types",)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the settings that select the same layers.

        Raises:
            MegacoreError: If the entry does not name all layers.
        """
        num_layers, kinds = values["model.num_layers"], config.get("mlp_layer_types")
        if kinds is None:
            first = config.get(self.names[1], self.first) if len(self.names) > 1 else self.first
            first = checked(self.names[-1], first, int, least=0)
            return {"moe.layer_pattern": f"{'d' * first}(e)" if first else "e"}
        letters = {"dense": "d", "sparse": "e"}
        is_list = isinstance(kinds, list) and len(kinds) >= num_layers
        if not is_list or not all(isinstance(kind, str) and kind in letters for kind in kinds):
            raise MegacoreError(
                f"mlp_layer_types in config.json must name dense or sparse for each of "
                f"{num_layers} layers, got {kinds!r}"
            )
        return {"moe.layer_pattern": pattern_of("".join(letters[kind] for kind in kinds))}

    def write(self, values: Values) -> dict[str, Any]:
        """Return a kind for each layer."""
        letters = letters_of(values["moe.layer_pattern"], values["model.num_layers"])
        return {"mlp_layer_types": ["sparse" if kind == "e" else "dense" for kind in letters]}


@dataclass(frozen=True, kw_only=True)
class LayerRange:
    """Layers with experts of Ernie: every ``interval``-th from a first to a last layer."""

    names: tuple[str, ...] = (
        "moe_layer_start_index",
        "moe_layer_end_index",
        "moe_layer_interval",
    )

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the settings that select the same layers."""
        start, end, interval = (
            checked(name, config.get(name, default), int, least=least)
            for name, default, least in zip(self.names, (1, -1, 1), (0, -1, 1), strict=True)
        )
        num_layers = values["model.num_layers"]
        end = num_layers - 1 if end == -1 else end
        letters = (
            "e" if start <= layer <= end and (layer + 1) % interval == 0 else "d"
            for layer in range(num_layers)
        )
        return {"moe.layer_pattern": pattern_of("".join(letters))}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the range; other choices of layers cannot be expressed."""
        letters = letters_of(values["moe.layer_pattern"], values["model.num_layers"])
        start, end = letters.find("e"), letters.rfind("e")
        second = letters.find("e", start + 1)
        interval = second - start if second > 0 and (start + 1) % (second - start) == 0 else 1
        return dict(zip(self.names, (max(start, 0), end, interval), strict=True))


@dataclass(frozen=True, kw_only=True)
class RotaryWidth:
    """Rotated elements of a head by ``rotary_dim``, unless the rotation states their share."""

    names: tuple[str, ...] = ("rotary_dim",)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the share of a head."""
        width, share = config.get("rotary_dim"), "partial_rotary_factor"
        rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
        if width is None or share in config or share in rope:
            return {}
        width = checked("rotary_dim", width, int)
        return {"model.rotary_fraction": width / values["model.head_dim"]}

    def write(self, values: Values) -> dict[str, Any]:  # noqa: ARG002
        """Return no entries: those of the rotation state the share."""
        return {}


@dataclass(frozen=True, kw_only=True)
class GroupLimit:
    """Choice of experts in the best groups only, by ``topk_method``."""

    names: tuple[str, ...] = ("topk_method", "n_group", "topk_group")

    def read(self, config: Mapping[str, Any], values: Values) -> Values:  # noqa: ARG002
        """Return the groups; a group's score is that of its best expert.

        Raises:
            MegacoreError: If there is another method.
        """
        method = config.get("topk_method") or "greedy"
        if method == "greedy":
            return {"moe.num_groups": 1, "moe.groups_top_k": 1}
        if method != "group_limited_greedy":
            raise MegacoreError(
                f"topk_method in config.json must be greedy or group_limited_greedy, got {method!r}"
            )
        return {
            "moe.num_groups": checked("n_group", config.get("n_group"), int),
            "moe.groups_top_k": checked("topk_group", config.get("topk_group"), int),
        }

    def write(self, values: Values) -> dict[str, Any]:
        """Return the entries for the same choice."""
        groups, best = values["moe.num_groups"], values["moe.groups_top_k"]
        if groups == best:
            return {"topk_method": "greedy", "n_group": None, "topk_group": None}
        return {"topk_method": "group_limited_greedy", "n_group": groups, "topk_group": best}


@dataclass(frozen=True)
class HeadNorms:
    """Norms of the heads of queries and keys, switched by ``use_qk_norm``.

    Attributes:
        kind: Norm of the family.
        default: Whether a missing entry has it.
    """

    kind: str = "head"
    default: bool = False
    names: tuple[str, ...] = ("use_qk_norm",)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:  # noqa: ARG002
        """Return the norm of queries and keys; an empty entry has none."""
        has_norms = checked("use_qk_norm", config.get("use_qk_norm", self.default) or False, bool)
        return {"model.qk_norm": self.kind if has_norms else "none"}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the entry for the same norms."""
        return {"use_qk_norm": values["model.qk_norm"] == self.kind}


@dataclass(frozen=True, kw_only=True)
class SharedExperts:
    """Shared experts, joined to one expert of their total width.

    Attributes:
        default: Their number if no entry states it.
    """

    default: int
    names: tuple[str, ...] = ("n_shared_experts",)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the width of all shared experts."""
        (name,) = self.names
        number = config.get(name, self.default) or 0
        number = checked(name, number, int) if number else 0
        return {"moe.shared_ffn_hidden_size": number * values["moe.ffn_hidden_size"]}

    def write(self, values: Values) -> dict[str, Any]:
        """Return the number of shared experts of the width of the others."""
        width, unit = values["moe.shared_ffn_hidden_size"], values["moe.ffn_hidden_size"]
        return {self.names[0]: width // unit}


@dataclass(frozen=True, kw_only=True)
class RotatedWidth:
    """Width that `transformers` rotates in a latent attention, a copy of ``qk_rope_head_dim``."""

    names: tuple[str, ...] = ("head_dim",)

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Check the copy.

        Raises:
            MegacoreError: If it differs.
        """
        width, found = values["model.mla.rope_head_dim"], config.get("head_dim")
        if found not in (None, width):
            raise MegacoreError(
                f"head_dim in config.json of a {config['model_type']} model must be "
                f"qk_rope_head_dim = {width}, got {found!r}"
            )
        return {}

    def write(self, values: Values) -> dict[str, Any]:  # noqa: ARG002
        """Return no entries, since the width follows from another one."""
        return {}


@dataclass(frozen=True, kw_only=True)
class Windows:
    """Layers whose attention is limited to a window.

    Attributes:
        default: Window if the entry is missing.
        by_layer: Whether layers differ: by ``layer_types``, or by ``max_window_layers``.
        pattern: Kinds of layers if ``layer_types`` is missing, in place of ``max_window_layers``.
        period: Layers of which the last has full attention, if neither ``layer_types`` nor
            ``sliding_window_pattern`` is there; 0: the latter is not read.
        switch: Whether ``use_sliding_window`` must be true for a window.
        first: ``max_window_layers`` if the entry is missing.
        alternate: Whether every second of the first ``max_window_layers`` has the window, in place
            of all after them.
    """

    default: int | None = None
    by_layer: bool = False
    pattern: str | None = None
    period: int = 0
    switch: bool = False
    alternate: bool = False
    first: int = 28
    names: tuple[str, ...] = (
        "sliding_window",
        "use_sliding_window",
        "layer_types",
        "max_window_layers",
        "sliding_window_pattern",
    )

    def read(self, config: Mapping[str, Any], values: Values) -> Values:
        """Return the window and the pattern of layers that have it.

        Raises:
            MegacoreError: If the entries are not of these kinds.
        """
        window = config.get("sliding_window", self.default)
        if self.switch and not config.get("use_sliding_window"):
            window = None
        is_stated = self.by_layer and config.get("layer_types") is not None
        layers = ""
        if window is not None or is_stated:  # else no other entry counts
            layers = self._kinds(config, values["model.num_layers"])
        if window is None or "w" not in layers:
            return {"model.sliding_window": None, "model.window_pattern": "w"}
        return {
            "model.sliding_window": checked("sliding_window", window, int),
            "model.window_pattern": pattern_of(layers),
        }

    def write(self, values: Values) -> dict[str, Any]:
        """Return the entries for the same window and, if layers differ, for their kinds."""
        window, pattern = values["model.sliding_window"], values["model.window_pattern"]
        num_layers = values["model.num_layers"]
        layers = "f" * num_layers if window is None else letters_of(pattern, num_layers)
        config: dict[str, Any] = {"sliding_window": window if "w" in layers else None}
        if self.switch:
            config["use_sliding_window"] = "w" in layers
        if self.by_layer:
            config["layer_types"] = [_FULL if kind == "f" else _SLIDING for kind in layers]
        if self.by_layer and self.pattern is None and not self.period:
            config["max_window_layers"] = len(layers) - len(layers.lstrip("f"))
        return config

    def _kinds(self, config: Mapping[str, Any], num_layers: int) -> str:
        """Return a letter for each layer, as in ``model.window_pattern``."""
        kinds = config.get("layer_types") if self.by_layer else None
        if kinds is None and self.period:
            found = config.get("sliding_window_pattern", self.period)
            period: int = checked("sliding_window_pattern", found, int)
            return (("w" * (period - 1) + "f") * num_layers)[:num_layers]
        if kinds is None and self.pattern is not None:
            return (self.pattern * num_layers)[:num_layers]
        if kinds is None and self.by_layer:
            found = config.get("max_window_layers", self.first)
            first: int = min(checked("max_window_layers", found, int, least=0), num_layers)
            if self.alternate:
                return ("wf" * first)[:first] + "f" * (num_layers - first)
            return "f" * first + "w" * (num_layers - first)
        if kinds is None:
            return "w" * num_layers
        is_list = isinstance(kinds, list) and len(kinds) == num_layers
        if not is_list or not all(kind in (_FULL, _SLIDING) for kind in kinds):
            raise MegacoreError(
                f"layer_types in config.json must name {_FULL} or {_SLIDING} for each of "
                f"{num_layers} layers, got {kinds!r}"
            )
        return "".join("f" if kind == _FULL else "w" for kind in kinds)


_FULL, _SLIDING = "full_attention", "sliding_attention"
