"""Conversion between ``config.json`` and the ``[model]`` and ``[moe]`` sections."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from megacore.errors import ConfigError, MegacoreError
from megatrain.config import ModelConfig, MoEConfig
from megatrain.config.toml_file import toml_value
from megatrain.hf.entries import family_of, longest_unchunked, refused_entries
from megatrain.hf.families import FAMILIES
from megatrain.hf.family import Family
from megatrain.hf.fine_tuning import TRAINING_RULES
from megatrain.hf.keys import Values
from megatrain.hf.rope import ROPE_NAMES, rope_from_hf, rope_to_hf

# Settings of the sections that do not change what the trained model computes.
_TRAINING_ONLY = frozenset(
    {
        "model.seq_length",
        "model.vocab_pad_multiple",
        "model.dropout",
        "model.init_std",
        "model.padding_idx",
        "model.mtp_loss_coef",
        "moe.layer_pattern",  # compared as the layers with experts
        "moe.dispatcher",
        "moe.static_budget",
        "moe.static_transport",
        "moe.pad_to_capacity",
        "moe.expert_bias_rate",
        "moe.over_budget",
        "moe.capacity_factor",
        "moe.drop_by",
        "moe.router_fp32",
        "moe.aux_loss_coef",
        "moe.aux_loss_type",
        "moe.z_loss_coef",
        "moe.jitter",
        "moe.echo",
    }
)


def sections_from_hf(
    config: Mapping[str, Any], *, seq_length: int | None = None
) -> tuple[ModelConfig, MoEConfig]:
    """Return the ``[model]`` and ``[moe]`` sections of a ``config.json``.

    Args:
        config: Its content.
        seq_length: Tokens per sequence. Default: the maximum of the model, without attention in
            chunks.

    Raises:
        MegacoreError: If the family is not supported, or entries are unknown, missing or have
            unsupported values: one error for all of them.
    """
    family = family_of(config)
    return _read(family, config, seq_length, refused_entries(family, config, seq_length))


def import_values(model: ModelConfig, moe: MoEConfig) -> dict[str, dict[str, Any]]:
    """Return the settings of a configuration file that describe an imported model.

    Settings without effect on it are left out.

    Args:
        model: From `sections_from_hf`.
        moe: From `sections_from_hf`.
    """
    values = model.model_dump(exclude_none=True)
    if model.num_mtp_layers == 0:
        del values["mtp_loss_coef"]
    experts = moe.model_dump(exclude_none=True, exclude_defaults=True)
    return {"model": values, "moe": experts}


def _read(
    family: Family,
    config: Mapping[str, Any],
    seq_length: int | None,
    refused: Sequence[str] = (),
) -> tuple[ModelConfig, MoEConfig]:
    """Return the sections; one error has all refusals, those that were found before included."""
    values: Values = dict(family.implied)
    refused, origins = list(refused), dict[str, tuple[str, ...]]()

    def take(names: Iterable[str], read: Callable[[], Values]) -> None:
        try:
            found = read()
        except MegacoreError as error:
            refused.append(str(error))
        else:
            values.update(found)
            origins.update(dict.fromkeys(found, tuple(names)))

    for key in family.keys:
        take(key.theirs, partial(key.settings, config))
    has_keys = all(key.ours[0] in values for key in family.keys)
    take(sorted(ROPE_NAMES), partial(rope_from_hf, config, family))
    for rule in family.rules if has_keys else ():  # they depend on the keys
        take(rule.names, partial(rule.read, config, values))
    if refused:
        raise MegacoreError("; ".join(refused))
    heads = values["model.num_heads"]
    values["model.num_kv_heads"] = values.get("model.num_kv_heads") or heads
    if values.get("model.sliding_window") is None:
        values.pop("model.window_rope_base", None)  # no layer has it
    if "model.mla.kv_rank" not in values:
        width = values["model.hidden_size"] // heads
        values["model.head_dim"] = values.get("model.head_dim") or width
    longest = values["model.seq_length"]
    limits = (longest_unchunked(config), values.get("model.mla.index_top_k"))
    values["model.seq_length"] = seq_length or min(longest, *(each or longest for each in limits))
    try:
        return _sections(values)
    except ConfigError as error:
        raise MegacoreError(
            f"config.json describes an invalid model: {error}{_origin(str(error), origins, config)}"
        ) from None


def _origin(text: str, origins: Mapping[str, tuple[str, ...]], config: Mapping[str, Any]) -> str:
    """Return the entries of the settings that a message names, as an addition to it."""
    words = set(re.findall(r"\w+", text))
    names = {
        name
        for setting, theirs in origins.items()
        if setting.rsplit(".", 1)[-1] in words
        for name in [each for each in theirs if each in config] or theirs[:1]
    }
    shown = (
        f"{name} = {config[name]!r}" if name in config else f"no {name}" for name in sorted(names)
    )
    return f" (config.json has {', '.join(shown)})" if names else ""


def config_to_hf(
    model: ModelConfig, moe: MoEConfig, *, family: str | None = None
) -> dict[str, Any]:
    """Return the entries of ``config.json`` that describe a model.

    The family is the first whose ``config.json``, read back, gives the same model.

    Args:
        model: A resolved ``[model]`` section.
        moe: A resolved ``[moe]`` section.
        family: The only ``model_type`` to try. Default: all.

    Raises:
        MegacoreError: If there is none, with the settings that differ for the two nearest families.
    """
    if model.factory is not None:
        raise MegacoreError(
            f'model.factory = "{model.factory}" is a model of your own, which no family of Hugging '
            "Face describes; its weights are in the checkpoint (megatrain.checkpoint.StoredWeights)"
        )
    if family is not None and family not in FAMILIES:
        raise MegacoreError(f"the family must be one of {', '.join(FAMILIES)}, got {family!r}")
    reasons: list[tuple[int, str]] = []
    for name in FAMILIES if family is None else [family]:
        config = _entries(FAMILIES[name], model, moe)
        try:
            found = sections_from_hf(config, seq_length=model.seq_length)
        except MegacoreError as error:
            reasons.append((1000, f"{name}: {error}"))
            continue
        different = differences(found, (model, moe))
        if not different:
            return config
        reasons.append((len(different), f"{name} has {', '.join(different)}"))
    nearest = "; ".join(reason for _, reason in sorted(reasons)[:2])
    raise MegacoreError(
        "no supported family of Hugging Face has the shape of this model; the nearest: "
        f"{nearest}; --family NAME shows what another one needs"
    )


def updated_config(
    original: Mapping[str, Any], model: ModelConfig, moe: MoEConfig
) -> dict[str, Any] | None:
    """Return the ``config.json`` of an imported model, changed only where the model has changed.

    Args:
        original: Content of the file that was imported.
        model: A resolved ``[model]`` section.
        moe: A resolved ``[moe]`` section.

    Returns:
        The entries, or ``None`` if the model is not of that family any more.
    """
    family = family_of(original)
    ours = _entries(family, model, moe)
    before = _entries(family, *_read(family, original, model.seq_length))
    changed = {name for name, value in ours.items() if value != before.get(name)}
    config = {name: value for name, value in original.items() if name != "quantization_config"}
    groups = [key.theirs for key in family.keys if not _TRAINING_ONLY.issuperset(key.ours)]
    groups += [rule.names for rule in family.rules if not isinstance(rule, TRAINING_RULES)]
    for names in (*groups, tuple(ROPE_NAMES)):
        if changed.intersection(names):
            _replace(config, ours, names)
    # Longer samples than those of the original training, which a server should accept.
    longest = config.get("max_position_embeddings")
    is_longer = isinstance(longest, int) and longest < model.seq_length
    if is_longer and model.rope_scaling.type != "dynamic":
        config["max_position_embeddings"] = model.seq_length
        if differences(_read(family, config, model.seq_length), (model, moe)):
            _replace(config, ours, tuple(ROPE_NAMES))  # they depended on it
    is_same = not differences(_read(family, config, model.seq_length), (model, moe))
    return config if is_same else None


def _replace(config: dict[str, Any], ours: Mapping[str, Any], names: tuple[str, ...]) -> None:
    """Replace a group of entries, which may have other spellings."""
    for name in names:
        config.pop(name, None)
    config.update({name: ours[name] for name in names if name in ours})


def differences(
    found: tuple[ModelConfig, MoEConfig], wanted: tuple[ModelConfig, MoEConfig]
) -> list[str]:
    """Return the settings that make two models compute different results.

    Example:
        >>> sections = ModelConfig(qk_norm="head"), MoEConfig()
        >>> differences((ModelConfig(), MoEConfig()), sections)
        ['model.qk_norm = "none" instead of "head"']
    """
    got, expected = _comparable(*found), _comparable(*wanted)
    return [
        f"{name} = {_shown(got.get(name))} instead of {_shown(expected.get(name))}"
        for name in sorted(got.keys() | expected.keys())
        if got.get(name) != expected.get(name)
    ]


def _shown(value: Any) -> str:
    """Return a value as a configuration file has it, on one line."""
    if isinstance(value, list):
        return f"[{', '.join(map(_shown, value))}]"
    return "none" if value is None else toml_value(value)


def _sections(values: Values) -> tuple[ModelConfig, MoEConfig]:
    sections: dict[str, dict[str, Any]] = {"model": {}, "moe": {}}
    for key, value in values.items():
        section, *inner, name = key.split(".")
        table = sections[section]
        for part in inner:
            table = table.setdefault(part, {})
        table[name] = value
    return ModelConfig(**sections["model"]), MoEConfig(**sections["moe"])


def _values(model: ModelConfig, moe: MoEConfig) -> Values:
    values = {f"model.{name}": value for name, value in model}
    for table in ("mla", "query_scaling"):
        section = values.pop(f"model.{table}")
        values |= {f"model.{table}.{name}": value for name, value in section}
    return values | {f"moe.{name}": value for name, value in moe}


def _entries(family: Family, model: ModelConfig, moe: MoEConfig) -> dict[str, Any]:
    values = _values(model, moe)
    config: dict[str, Any] = {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **family.fixed,
    }
    for key in family.keys:
        config |= key.write(values)
    for rule in family.rules:
        config |= rule.write(values)
    return config | rope_to_hf(values, family)


def _comparable(model: ModelConfig, moe: MoEConfig) -> Values:
    """Return the settings that determine what a model computes, in a normal form."""
    num_layers = model.mtp_layers.stop
    moe_layers = moe.moe_layers(num_layers)
    skipped = set(_TRAINING_ONLY)
    values = _values(model, moe) | {"layers with experts (moe.layer_pattern)": moe_layers}
    layers = range(model.num_layers)
    values["windows of layers (model.window_pattern)"] = [*map(model.window_of, layers)]
    values["rotations of layers (model.rotation_pattern)"] = [*map(model.rotation_of, layers)]
    scaled = [*map(model.scales_queries, layers)]
    values["layers with scaled queries (model.query_scaling.layers)"] = scaled
    skipped |= {"model.sliding_window", "model.window_pattern", "model.rotation_pattern"}
    skipped.add("model.query_scaling.layers")
    if not any(map(model.window_of, layers)):
        skipped.add("model.window_type")
    if not any(scaled):
        skipped |= {name for name in values if name.startswith("model.query_scaling.")}
    if model.learned_positions:
        skipped.add("model.rope_base")
    if not moe_layers:
        skipped |= {name for name in values if name.startswith("moe.")}
    if len(moe_layers) == num_layers:
        skipped.add("model.ffn_hidden_size")
    if model.mla.kv_rank == 0:
        skipped |= {name for name in values if name.startswith("model.mla.")} - {
            "model.mla.kv_rank"
        }
    else:
        skipped.add("model.head_dim")  # follows from the widths of [model.mla]
    if moe.shared_ffn_hidden_size == 0:
        values["moe.shared_gate"] = False
    if moe.score_function == "softmax_after_top_k":
        # Equal to the softmax over all experts, divided by the sum of the chosen ones.
        values |= {"moe.score_function": "softmax", "moe.normalize": True}
    if moe.num_groups == moe.groups_top_k:
        values |= {"moe.num_groups": 1, "moe.groups_top_k": 1}
    return {name: value for name, value in values.items() if name not in skipped}
