"""Notes on legal settings that have no effect beside the others, or not the one they promise."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatrain.config.base import letter_of_layer, split_key
from megatrain.config.debug import FEW_SOURCES
from megatrain.config.resolved import ResolvedConfig
from megatrain.config.sections import Config, section_classes
from megatrain.config.toml_file import toml_value

# Losses before the first that can be a spike; see `megatrain.train.control`.
SPIKE_START = 20


@dataclass(frozen=True, kw_only=True)
class UnusedRule:
    """Settings that have no effect under a condition.

    Attributes:
        keys: The settings; a key that ends with ``.*`` stands for all of its table.
        reason: The setting to blame, of which the note shows the value.
        holds: The condition.
        but: Settings of ``keys`` that have an effect nevertheless.
    """

    keys: tuple[str, ...]
    reason: str
    holds: Callable[[ResolvedConfig], bool]
    but: tuple[str, ...] = ()

    def all_keys(self) -> Iterator[str]:
        """Yield the settings, tables replaced by their settings."""
        for key in self.keys:
            table, is_table, _ = key.partition(".*")
            if not is_table:
                yield key
                continue
            for section, fields in section_classes().items():
                if section == table or section.startswith(f"{table}."):
                    yield from (f"{section}.{name}" for name in fields.by_key())


def _scaling_is_not(*types: str) -> Callable[[ResolvedConfig], bool]:
    return lambda config: config.model.rope_scaling.type not in types


def _has_experts(config: ResolvedConfig) -> bool:
    return bool(config.moe.moe_layers(config.model.num_layers))


def _has_only_experts(config: ResolvedConfig) -> bool:
    return len(config.moe.moe_layers(config.model.num_layers)) == config.model.num_layers


def _has_windows(config: ResolvedConfig) -> bool:
    letters = {
        letter_of_layer(config.model.window_pattern, layer)
        for layer in range(config.model.num_layers)
    }
    return "w" in letters


def _any_has(config: ResolvedConfig, hyperparameter: str) -> bool:
    return any(each.has(hyperparameter) for each in config.optimizer.of_parameters())


_OF_EXPERTS = ("moe.*", "debug.record_routing", "debug.replay_routing", "debug.force_balanced")
_OF_SCALING = "model.rope_scaling"

UNUSED_RULES: tuple[UnusedRule, ...] = (
    UnusedRule(
        keys=("preference.*",),
        but=("preference.loss",),
        reason="preference.loss",
        holds=lambda config: config.preference.loss is None,
    ),
    UnusedRule(
        keys=("data.field", "data.separator", "train.loss_normalization"),
        reason="preference.loss",
        holds=lambda config: config.preference.loss is not None,
    ),
    UnusedRule(
        keys=("preference.reference_dir", "preference.any_reference"),
        reason="preference.loss",
        holds=lambda config: not config.preference.needs_reference,
    ),
    UnusedRule(
        keys=("model.mtp_loss_coef",),
        reason="model.num_mtp_layers",
        holds=lambda config: config.model.num_mtp_layers == 0,
    ),
    UnusedRule(
        keys=("model.query_scaling.*",),
        but=("model.query_scaling.beta",),
        reason="model.query_scaling.beta",
        holds=lambda config: config.model.query_scaling.beta == 0,
    ),
    UnusedRule(
        keys=("model.query_scaling.*",),
        reason="model.query_scaling.layers",
        holds=lambda config: (
            config.model.query_scaling.beta > 0
            and not any(map(config.model.scales_queries, range(config.model.num_layers)))
        ),
    ),
    UnusedRule(
        keys=("model.query_scaling.*",),
        reason="model.query_scaling.length",
        holds=lambda config: (
            config.model.query_scaling.beta > 0
            and config.model.seq_length - 1 + config.model.query_scaling.shift
            < config.model.query_scaling.length
        ),
    ),
    UnusedRule(
        keys=("model.window_pattern", "model.window_type"),
        reason="model.sliding_window",
        holds=lambda config: config.model.sliding_window is None,
    ),
    UnusedRule(
        keys=("model.sliding_window",),
        reason="model.window_pattern",
        holds=lambda config: not _has_windows(config),
    ),
    UnusedRule(
        keys=("model.window_rope_base",),
        reason="model.sliding_window",
        holds=lambda config: config.model.sliding_window is None,
    ),
    UnusedRule(
        keys=("model.norm_bias",),
        reason="model.norm",
        holds=lambda config: config.model.norm == "rmsnorm",
    ),
    UnusedRule(
        keys=("model.rope_base", "model.rotation_pattern", "model.rope_scaling.*"),
        reason="model.learned_positions",
        holds=lambda config: config.model.learned_positions > 0,
    ),
    UnusedRule(
        keys=("model.mla.*",),
        but=("model.mla.kv_rank",),
        reason="model.mla.kv_rank",
        holds=lambda config: config.model.mla.kv_rank == 0,
    ),
    UnusedRule(
        keys=("model.mla.index_head_dim", "model.mla.index_top_k", "model.mla.index_pattern"),
        reason="model.mla.index_heads",
        holds=lambda config: config.model.mla.index_heads == 0,
    ),
    UnusedRule(
        keys=(f"{_OF_SCALING}.*",),
        but=(f"{_OF_SCALING}.type",),
        reason=f"{_OF_SCALING}.type",
        holds=lambda config: config.model.rope_scaling.type == "none",
    ),
    UnusedRule(
        keys=(f"{_OF_SCALING}.original_seq_length",),
        reason=f"{_OF_SCALING}.type",
        holds=lambda config: config.model.rope_scaling.type == "linear",
    ),
    UnusedRule(
        keys=(f"{_OF_SCALING}.low_freq_factor", f"{_OF_SCALING}.high_freq_factor"),
        reason=f"{_OF_SCALING}.type",
        holds=_scaling_is_not("none", "llama3"),
    ),
    UnusedRule(
        keys=(
            *(f"{_OF_SCALING}.beta_fast", f"{_OF_SCALING}.beta_slow", f"{_OF_SCALING}.mscale"),
            *(f"{_OF_SCALING}.mscale_all_dim", f"{_OF_SCALING}.truncate"),
        ),
        reason=f"{_OF_SCALING}.type",
        holds=_scaling_is_not("none", "yarn"),
    ),
    UnusedRule(
        keys=(f"{_OF_SCALING}.attention_factor",),
        reason=f"{_OF_SCALING}.type",
        holds=_scaling_is_not("none", "yarn", "longrope"),
    ),
    UnusedRule(
        keys=(f"{_OF_SCALING}.short_factors", f"{_OF_SCALING}.long_factors"),
        reason=f"{_OF_SCALING}.type",
        holds=_scaling_is_not("none", "longrope"),
    ),
    UnusedRule(
        keys=(f"{_OF_SCALING}.type",),
        reason=f"{_OF_SCALING}.factor",
        holds=lambda config: (
            config.model.rope_scaling.type == "linear" and config.model.rope_scaling.factor == 1.0
        ),
    ),
    UnusedRule(
        keys=_OF_EXPERTS,
        but=("moe.num_experts",),
        reason="moe.num_experts",
        holds=lambda config: config.moe.num_experts == 0,
    ),
    UnusedRule(
        keys=("debug.load_interval",),
        reason="moe.num_experts",
        holds=lambda config: (
            config.moe.num_experts == 0 and len(config.data.sources) <= FEW_SOURCES
        ),
    ),
    UnusedRule(
        keys=("moe.echo.*",),
        but=("moe.echo.num_spare_slots",),
        reason="moe.echo.num_spare_slots",
        holds=lambda config: config.moe.echo.num_spare_slots == 0 and _has_experts(config),
    ),
    UnusedRule(
        keys=("moe.echo.*",),
        reason="parallel.ep",
        holds=lambda config: config.moe.echo.num_spare_slots > 0 and not config.has_clones,
    ),
    UnusedRule(
        keys=("moe.static_budget", "moe.over_budget", "moe.echo.receive_budget"),
        reason="moe.dispatcher",
        holds=lambda config: config.moe.dispatcher != "static" and _has_experts(config),
    ),
    UnusedRule(
        keys=("moe.aux_loss_type",),
        reason="moe.aux_loss_coef",
        holds=lambda config: config.moe.aux_loss_coef == 0 and _has_experts(config),
    ),
    UnusedRule(
        keys=("moe.num_groups",),
        reason="moe.groups_top_k",
        holds=lambda config: config.moe.groups_top_k == config.moe.num_groups > 1,
    ),
    UnusedRule(
        keys=("moe.drop_by",),
        reason="moe.capacity_factor",
        holds=lambda config: config.moe.capacity_factor is None and _has_experts(config),
    ),
    UnusedRule(
        keys=("moe.router_fp32", "optimizer.grad_dtype"),
        reason="train.dtype",
        holds=lambda config: config.train.dtype == "float32",
    ),
    UnusedRule(
        keys=("optimizer.loss_scale", "optimizer.loss_scale_interval"),
        reason="train.dtype",
        holds=lambda config: config.train.dtype != "float16",
    ),
    UnusedRule(
        keys=("graphs.on_failure", "graphs.backend", "graphs.warmup_steps"),
        reason="graphs.mode",
        holds=lambda config: config.graphs.mode == "off",
    ),
    UnusedRule(
        keys=("graphs.mode",),
        reason="graphs.warmup_steps",
        holds=lambda config: (
            config.graphs.mode != "off" and config.train.steps <= config.graphs.warmup_steps
        ),
    ),
    UnusedRule(
        keys=("train.recompute",),
        reason="train.recompute_keep",
        holds=lambda config: (
            0 < config.num_microbatches(config.run.nproc) <= config.train.recompute_keep
        ),
    ),
    UnusedRule(
        keys=("train.recompute",),
        reason="moe.layer_pattern",
        holds=lambda config: (
            bool(config.train.recomputed)
            and config.train.recomputed <= {"mlp", "activation"}
            and _has_only_experts(config)
        ),
    ),
    UnusedRule(
        keys=(
            "model.activation",
            "model.mlp_bias",
        ),
        reason="moe.layer_pattern",
        holds=lambda config: (
            _has_only_experts(config)
            and config.moe.shared_ffn_hidden_size == config.model.num_mtp_layers == 0
        ),
    ),
    UnusedRule(
        keys=("optimizer.min_lr", "optimizer.decay_end"),
        reason="optimizer.schedule",
        holds=lambda config: config.optimizer.schedule == "constant",
    ),
    UnusedRule(
        keys=("optimizer.name",),
        reason="optimizer.factory",
        holds=lambda config: config.optimizer.factory is not None,
    ),
    UnusedRule(
        keys=("optimizer.moments_dtype",),
        reason="optimizer.factory",
        holds=lambda config: all(
            each.factory is not None for each in config.optimizer.of_parameters()
        ),
    ),
    UnusedRule(
        keys=("optimizer.muon.*",),
        reason="optimizer.name",
        holds=lambda config: all(
            each.name != "muon" or each.factory is not None
            for each in config.optimizer.of_parameters()
        ),
    ),
    UnusedRule(
        keys=("optimizer.beta1", "optimizer.beta2"),
        reason="optimizer.name",
        holds=lambda config: not _any_has(config, "beta1"),
    ),
    UnusedRule(
        keys=("optimizer.eps",),
        reason="optimizer.name",
        holds=lambda config: not _any_has(config, "eps"),
    ),
    UnusedRule(
        keys=("optimizer.momentum", "optimizer.nesterov"),
        reason="optimizer.name",
        holds=lambda config: not _any_has(config, "momentum"),
    ),
    UnusedRule(
        keys=("optimizer.nesterov", "optimizer.moments_dtype"),
        reason="optimizer.momentum",
        holds=lambda config: (
            config.optimizer.momentum == 0
            and all(each.has("momentum") for each in config.optimizer.of_parameters())
        ),
    ),
    UnusedRule(
        keys=("optimizer.tail_length", "optimizer.tail_shape"),
        reason="optimizer.schedule",
        holds=lambda config: config.optimizer.schedule != "wsd",
    ),
    UnusedRule(
        keys=("optimizer.warmup_from",),
        reason="optimizer.warmup",
        holds=lambda config: config.optimizer.warmup == 0,
    ),
    UnusedRule(
        keys=("optimizer.schedule_unit",),
        reason="optimizer.warmup",
        holds=lambda config: (
            config.optimizer.warmup == 0
            and config.optimizer.decay_end is None
            and config.optimizer.tail_length is None
        ),
    ),
    UnusedRule(
        keys=("train.eval_steps",),
        reason="train.eval_interval",
        holds=lambda config: config.train.eval_interval == 0,
    ),
    UnusedRule(
        keys=("train.on_spike",),
        reason="train.steps",
        holds=lambda config: config.train.steps <= SPIKE_START,
    ),
    UnusedRule(
        keys=("data.split",),
        reason="data.validation",
        holds=lambda config: bool(config.data.validation),
    ),
    UnusedRule(
        keys=("data.source",), reason="data.sources", holds=lambda config: bool(config.data.sources)
    ),
    UnusedRule(
        keys=(
            *("data.source", "data.sources", "data.validation", "data.split", "data.field"),
            *("data.order", "data.packing", "data.cache"),
        ),
        reason="data.factory",
        holds=lambda config: config.data.factory is not None,
    ),
    UnusedRule(
        keys=("checkpoint.keep", "checkpoint.async"),
        reason="checkpoint.interval",
        holds=lambda config: not config.checkpoint.saves,
    ),
    UnusedRule(
        keys=("checkpoint.interval_time",),
        reason="checkpoint.interval",
        holds=lambda config: config.checkpoint.interval is not None,
    ),
    UnusedRule(
        keys=("graphs.scopes",),
        reason="graphs.mode",
        holds=lambda config: not config.graphs.is_partial,
    ),
    UnusedRule(
        keys=("pipeline.placement",),
        reason="pipeline.schedule",
        holds=lambda config: config.pipeline.searched_placement is None,
    ),
    UnusedRule(
        keys=("pipeline.pairs",),
        reason="pipeline.overlap_moe",
        holds=lambda config: not config.pipeline.overlap_moe,
    ),
    UnusedRule(
        keys=("moe.expert_bias_rate",),
        reason="moe.expert_bias",
        holds=lambda config: not config.moe.expert_bias and _has_experts(config),
    ),
    UnusedRule(
        keys=("moe.static_budget",),
        reason="moe.pad_to_capacity",
        holds=lambda config: config.moe.pad_to_capacity,
    ),
    UnusedRule(
        keys=("optimizer.num_instances",),
        reason="optimizer.distributed",
        holds=lambda config: not config.optimizer.distributed,
    ),
)


def unused_notes(config: Config, filled: ResolvedConfig) -> Iterator[str]:
    """Yield one sentence per reason for which settings have no effect.

    Args:
        config: The configuration before derived settings are filled; only settings that are not
            the default are noted.
        filled: The configuration with all of them.
    """
    noted: set[str] = set()
    for rule in UNUSED_RULES:
        if not rule.holds(filled):
            continue
        keys = [
            key
            for key in rule.all_keys()
            if key not in (*rule.but, rule.reason) and key not in noted and _is_set(config, key)
        ]
        noted.update(keys)
        if keys:
            shown = ", ".join(_shown(config, key) for key in keys)
            verb = "has" if len(keys) == 1 else "have"
            yield f"{shown} {verb} no effect: {_shown(filled, rule.reason)}"


def surprise_notes(filled: ResolvedConfig) -> Iterator[str]:
    """Yield one sentence per group of settings that together have another effect than alone."""
    moe, optimizer, steps = filled.moe, filled.optimizer, filled.train.steps
    is_after = moe.score_function == "softmax_after_top_k"
    constant = moe.normalize or is_after
    if _has_experts(filled) and moe.top_k == 1 and constant and moe.aux_loss_coef == 0:
        yield (
            "the router has no gradient of the loss: with moe.top_k = 1, the weight of the only "
            "expert is always the same; set moe.normalize = false"
            + (' and moe.score_function = "softmax"' if is_after else "")
            + ", or a balancing loss (moe.aux_loss_coef)"
        )
    rate = optimizer.rate_of_run(
        steps=steps,
        global_batch_size=filled.train.global_batch_size,
        seq_length=filled.model.seq_length,
    )
    if optimizer.warmup > rate.total:
        yield (
            f"optimizer.warmup = {optimizer.warmup:,} is more than the {rate.total:,} "
            f"{optimizer.schedule_unit} of the run: the learning rate ends at "
            f"{rate.at(steps - 1):.2g}, below optimizer.lr = {optimizer.lr:g}"
        )
    if optimizer.lr == 0:
        yield "optimizer.lr = 0: no weight changes"
    slow = reference_parts(filled)
    if slow:
        yield f"no fused kernel for {', '.join(slow)}: operations of torch instead"
    if filled.model.num_mtp_layers > 0 and filled.model.mtp_loss_coef == 0:
        yield "model.mtp_loss_coef = 0: the layers of model.num_mtp_layers are not trained"


def reference_parts(filled: ResolvedConfig) -> list[str]:
    """Return the settings of the model whose computation has no fused kernel."""
    model, is_wide = filled.model, filled.train.dtype == "float32"
    parts = {
        "model.norm_plus_one in this train.dtype": model.norm_plus_one and not is_wide,
        'model.activation = "relu2"': model.activation == "relu2",
        "model.query_scaling": model.query_scaling.beta > 0,
        "moe.scale_inputs": filled.moe.num_experts > 0 and filled.moe.scale_inputs,
    }
    return [name for name, holds in parts.items() if holds]


def _is_set(config: Config, key: str) -> bool:
    """Check if a setting is given and not the default."""
    section, name = split_key(key)
    default = section_classes()[section].by_key()[name].get_default(call_default_factory=True)
    return key not in config.derived and _value(config, key) != default


def _shown(config: Config, key: str) -> str:
    value = _value(config, key)
    if isinstance(value, list):
        has_names = all(isinstance(item, str) for item in value)
        return f"{key} = {toml_value(value)}" if has_names else f"{key} ({len(value)})"
    return f"{key} = {str(value).lower() if isinstance(value, bool) else value}"


def _value(config: Config, key: str) -> Any:
    """Return the value of a setting, which may have another name in files than in Python."""
    section, name = split_key(key)
    table = operator.attrgetter(section)(config)
    fields = type(table).model_fields
    field = next((each for each, info in fields.items() if (info.alias or each) == name), name)
    return getattr(table, field)
