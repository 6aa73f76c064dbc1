"""``adapter_config.json`` of PEFT: entries, and the modules that they select."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megacore.errors import MegacoreError
from megatrain.config import LoraConfig
from megatrain.hf_folder import ADAPTER_NAME

WEIGHTS_NAME = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
# Default of `--max-lora-rank` in vLLM.
_VLLM_RANK = 16
# Initial weights that leave the base as it is.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
# Entries that change what an adapter computes, with the reason for the refusal.
_REFUSED = {
    "alora_invocation_tokens": "the adapter is used after some tokens only",
    "arrow_config": "several adapters are mixed",
    "kasa_config": "the base weights are truncated",
    "layer_replication": "layers of the base are repeated",
    "lora_bias": "adapters have biases",
    "megatron_config": "the layers are those of Megatron",
    "monteclora_config": "adapters are random",
    "trainable_token_indices": "rows of the embedding are trained apart",
    "use_bdlora": "factors are block-diagonal",
    "use_qalora": "inputs are pooled",
    "velora_config": "the backward pass is another one",
}
_KNOWN = {
    "alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "corda_config",
    "ensure_weight_tying", "eva_config", "exclude_modules", "fan_in_fan_out", "inference_mode",
    "init_lora_weights", "layers_pattern", "layers_to_transform", "loftq_config", "lora_alpha",
    "lora_dropout", "lora_ga_config", "megatron_core", "modules_to_save", "peft_type",
    "peft_version", "qalora_group_size", "r", "rank_pattern", "revision", "runtime_config",
    "target_modules", "target_parameters", "task_type", "use_dora", "use_rslora",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PeftConfig:
    """The entries of ``adapter_config.json`` that matter here.

    Attributes:
        rank: Rank of adapters without a pattern.
        alpha: Numerator of their factor.
        ranks: Ranks by regular expression of the end of a name.
        alphas: The same for numerators.
        rs: Whether factors have the square root of the rank.
        dora: Whether there are norms of rows.
        dropout: Dropout probability of inputs.
        modules: Ends of module names, a regular expression, or `ALL_LINEAR`; ``None`` if PEFT
            chooses.
        parameters: Ends of parameter names.
        excluded: As ``modules``, without adapters.
        layers: Layers with adapters; ``None`` for all.
        saved: Modules that are saved whole.
        base: Name of the base.
    """

    rank: int
    alpha: float
    ranks: Mapping[str, int]
    alphas: Mapping[str, float]
    rs: bool
    dora: bool
    dropout: float
    modules: tuple[str, ...] | str | None
    parameters: tuple[str, ...]
    excluded: tuple[str, ...] | str
    layers: tuple[int, ...] | None
    saved: tuple[str, ...]
    base: str | None

    @classmethod
    def read(cls, content: Mapping[str, Any], *, ignore: Collection[str] = ()) -> PeftConfig:
        """Check the entries and keep those that matter.

        Args:
            content: Content of the file.
            ignore: Names of entries without effect.

        Raises:
            MegacoreError: If an entry changes what an adapter computes, is unknown, or has another
                type. One message has all that are refused.
        """
        content = _without(content, ignore)
        refused = _refusals(content)
        if refused:
            raise MegacoreError(f"{ADAPTER_NAME}: {'; '.join(refused)}")
        entries = _Entries(content)
        return cls(
            rank=entries.rank("r", content.get("r", 8)),
            alpha=entries.number("lora_alpha", content.get("lora_alpha", 8)),
            ranks=entries.pattern("rank_pattern", entries.rank),
            alphas=entries.pattern("alpha_pattern", entries.number),
            rs=bool(content.get("use_rslora")),
            dora=bool(content.get("use_dora")),
            dropout=entries.number("lora_dropout", content.get("lora_dropout") or 0.0, least=0.0),
            modules=entries.names("target_modules"),
            parameters=entries.listed("target_parameters", str),
            excluded=entries.names("exclude_modules") or (),
            layers=entries.listed("layers_to_transform", int) or None,
            saved=entries.listed("modules_to_save", str),
            base=content.get("base_model_name_or_path"),
        )

    def rank_of(self, name: str) -> int:
        """Return the rank of a module or parameter."""
        return next((n for pattern, n in self.ranks.items() if _ends(pattern, name)), self.rank)

    def scale_of(self, name: str) -> float:
        """Return the factor on the product of B and A of a module or parameter."""
        alphas = (n for pattern, n in self.alphas.items() if _ends(pattern, name))
        rank = self.rank_of(name)
        return next(alphas, self.alpha) / (math.sqrt(rank) if self.rs else rank)

    def selects_module(self, name: str) -> bool:
        """Check whether a linear module is selected."""
        if _matches(self.excluded, name):
            return False
        if self.modules is None:
            return True
        if self.modules == ALL_LINEAR:
            return name.rpartition(".")[2] != "lm_head"
        found = _matches(self.modules, name)
        if found and self.layers is not None and not isinstance(self.modules, str):
            # PEFT takes the first number for the layer.
            layer = re.match(r".*?\.[^.]*\.(\d+)\.", name)
            found = layer is not None and int(layer[1]) in self.layers
        return found

    def selects_parameter(self, name: str) -> bool:
        """Check whether a parameter is selected by ``target_parameters``."""
        return any(name == each or name.endswith(f".{each}") for each in self.parameters)


def _without(content: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    for name in ignored:
        if name not in content:
            raise MegacoreError(
                f"--ignore must name an entry of {ADAPTER_NAME}, got {name}, which it does not have"
            )
        if name in _KNOWN or name in _REFUSED:
            raise MegacoreError(
                "--ignore must name an entry that does not change what the adapter computes, got "
                f"{name}; change it in {ADAPTER_NAME}"
            )
    return {name: value for name, value in content.items() if name not in ignored}


def _refusals(content: Mapping[str, Any]) -> list[str]:
    kind = content.get("peft_type")
    if kind != "LORA":
        return [f'peft_type must be "LORA", got {json.dumps(kind)}']
    refused = [
        f"{name} = {json.dumps(content[name])} is not supported ({reason})"
        for name, reason in _REFUSED.items()
        if content.get(name)
    ]
    init = content.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        refused.append(
            f"init_lora_weights = {json.dumps(init)} is not supported (PEFT changes the base "
            "weights or the training when it loads the adapter; save it with "
            "path_initial_model_for_weight_conversion, which makes it a plain one)"
        )
    if content.get("bias", "none") != "none":
        refused.append(f'bias must be "none", got {json.dumps(content["bias"])}')
    if content.get("task_type") not in (None, "CAUSAL_LM"):
        refused.append(f'task_type must be "CAUSAL_LM", got {json.dumps(content["task_type"])}')
    unknown = sorted(name for name in content.keys() - _KNOWN - _REFUSED.keys() if content[name])
    if unknown:
        refused.append(
            f"unknown entries {', '.join(unknown)}; if they do not change what the adapter "
            f"computes, add {' '.join(f'--ignore {name}' for name in unknown)}"
        )
    return refused


@dataclass(frozen=True)
class _Entries:
    """Entries by name, checked for their types."""

    content: Mapping[str, Any]

    def rank(self, name: str, value: Any) -> int:
        """Return a rank."""
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise _wrong(name, "a positive integer", value)
        return value

    def number(self, name: str, value: Any, *, least: float = 1e-300) -> float:
        """Return a number."""
        if isinstance(value, bool) or not isinstance(value, int | float) or not value >= least:
            raise _wrong(name, "a number above 0" if least else "a number of at least 0", value)
        return float(value)

    def pattern(self, name: str, check: Callable[[str, Any], Any]) -> dict[str, Any]:
        """Return values by regular expression."""
        value = self.content.get(name) or {}
        if not isinstance(value, dict):
            raise _wrong(name, "an object", value)
        return {_regex(name, key): check(name, each) for key, each in value.items()}

    def names(self, name: str) -> tuple[str, ...] | str | None:
        """Return ends of names, or a regular expression."""
        value = self.content.get(name)
        if isinstance(value, str):
            return value if value == ALL_LINEAR else _regex(name, value)
        return None if value is None else self.listed(name, str)

    def listed(self, name: str, kind: type) -> tuple[Any, ...]:
        """Return a list, which may be a single value."""
        value = self.content.get(name)
        value = [] if value is None else value
        value = value if isinstance(value, list) else [value]
        if any(isinstance(each, bool) or not isinstance(each, kind) for each in value):
            raise _wrong(name, f"a list of {'names' if kind is str else 'integers'}", value)
        return tuple(value)


def _wrong(name: str, wanted: str, value: Any) -> MegacoreError:
    return MegacoreError(f"{ADAPTER_NAME}: {name} must be {wanted}, got {json.dumps(value)}")


def _regex(name: str, text: str) -> str:
    try:
        re.compile(text)
    except re.error as error:
        raise MegacoreError(
            f"{ADAPTER_NAME}: {name} has {json.dumps(text)}, which is not a regular expression "
            f"({error})"
        ) from error
    return text


def _ends(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def _matches(names: tuple[str, ...] | str, name: str) -> bool:
    """Check a name against a regular expression, or ends of names at a dot."""
    if isinstance(names, str):
        return re.fullmatch(names, name) is not None
    return any(name == each or name.endswith(f".{each}") for each in names)


def endings(chosen: Collection[str], every: Iterable[str]) -> list[str]:
    """Return the shortest ends, at dots, of names that select exactly the chosen ones.

    Example:
        >>> endings({"0.q", "1.q", "0.up"}, {"0.q", "1.q", "0.up", "1.up"})
        ['0.up', 'q']
    """

    def ends(name: str) -> list[str]:
        parts = name.split(".")
        return [".".join(parts[at:]) for at in range(len(parts) - 1, -1, -1)]

    all_ends = Counter(end for name in {*every, *chosen} for end in ends(name))
    own_ends = Counter(end for name in chosen for end in ends(name))
    return sorted(
        {next(end for end in ends(name) if all_ends[end] == own_ends[end]) for name in chosen}
    )


def alpha_of(lora: LoraConfig, rank: int) -> float:
    """Return the ``lora_alpha`` that gives adapters of another rank the factor of a run."""
    alpha = lora.scale * (math.sqrt(rank) if lora.rs else rank)
    if rank == lora.rank:
        alpha = float(rank if lora.alpha is None else lora.alpha)
    return int(alpha) if alpha == int(alpha) else alpha


def vllm_warnings(content: Mapping[str, Any]) -> tuple[str, ...]:
    """Return what vLLM refuses in an ``adapter_config.json``, or ignores, one sentence each."""
    found = []
    if content.get("use_dora"):
        found.append("vLLM refuses DoRA (use_dora); give it merged weights (--merge)")
    if content.get("modules_to_save"):
        names = ", ".join(content["modules_to_save"][:3])
        found.append(
            f"vLLM refuses modules that are saved whole (modules_to_save: {names}); give it merged "
            "weights (--merge)"
        )
    rank = max([content["r"], *content["rank_pattern"].values()])
    if rank > _VLLM_RANK:
        found.append(f"vLLM needs --max-lora-rank {rank}, above its default of {_VLLM_RANK}")
    return tuple(found)
