"""Settings of earlier versions and of other projects: their places today."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any, Literal

from pydantic import Field

_LAYOUT = "pipeline.layout, as in layout = 'Et*3|t*4|t*3L'"

# Settings that are errors, by their full key in version 0.1, with their places today.
REMOVED: Mapping[str, str] = MappingProxyType(
    {
        "checkpoint.interval_time": "checkpoint.interval, which is steps or a time span",
        "graphs.backend": "debug.graph_backend",
        "graphs.include_optimizer": 'graphs.mode = "full_step"',
        "model.mla.latent_norm_eps": "1e-6 wherever model.mla.kv_rank is set",
        "moe.echo.domain": "moe.echo.domain_size",
        "moe.echo.spare_slots": "moe.echo.num_spare_slots",
        "moe.first_dense_layers": 'part of moe.layer_pattern, as in layer_pattern = "d(e)"',
        "moe.force_balanced": "debug.force_balanced",
        "moe.group_score_top": "derived from moe.score_function",
        "moe.layer_interval": 'part of moe.layer_pattern, as in layer_pattern = "de"',
        "moe.load_interval": "debug.load_interval",
        "moe.record_routing": "debug.record_routing",
        "moe.replay_routing": "debug.replay_routing",
        "moe.router_fp32": "debug.router_fp32",
        "moe.shared_overlap": "always on, with moe.shared_ffn_hidden_size",
        "moe.softmax_after_top_k": 'moe.score_function = "softmax_after_top_k"',
        "moe.static_transport": "debug.static_transport",
        "optimizer.average_in_collective": "debug.average_in_collective",
        "optimizer.fp32_accumulation": 'optimizer.grad_dtype = "param_fp32_sum"',
        "optimizer.pad_buckets": "debug.pad_for_ring",
        "pipeline.account_for_embedding": f"part of {_LAYOUT}",
        "pipeline.account_for_loss": f"part of {_LAYOUT}",
        "pipeline.debug_messages": "debug.check_messages",
        "pipeline.first_layers": f"part of {_LAYOUT}",
        "pipeline.last_layers": f"part of {_LAYOUT}",
        "run.host_memory": "debug.host_memory",
        "run.peer_timeout_s": "debug.peer_timeout_s",
        "run.trace_step": "debug.trace_step",
        "train.profile_steps": "debug.profile_steps",
        "train.recompute_modules": 'train.recompute, as in recompute = "norm,moe"',
    }
)


@dataclass(frozen=True, kw_only=True)
class Deprecated:
    """Translation of a setting that left in the latest minor version.

    The old name works as before, in files, in checkpoints and on the command line.

    Attributes:
        to: Key of today.
        kind: Type of a setting that is part of another one today. Default: that of the new key.
        merge: Value for the new key from the old setting's value and the key's own, ``None`` if it
            has none; the result ``None`` leaves the key unset. Default: the key's own value.
        without: The key's own value with nothing of the old setting in it, for a command line that
            overrides a file.
        text: Form of the old value under the new key, without ``merge``.
        note: Sentence about the old setting, in place of its new name.
    """

    to: str
    kind: Any = None
    merge: Callable[[Any, Any], Any] | None = None
    without: Callable[[Any], Any] = lambda own: own
    text: str = ""
    note: str = ""


def _words(**others: Any) -> Callable[[Any], Any]:
    """Return a function that replaces these words by other values."""
    return lambda own: others.get(own, own) if isinstance(own, str) else own


def _overlap(part: str, other: str) -> Deprecated:
    """Return the translation of a switch that is one part of ``optimizer.overlap`` today."""

    def merge(old: bool, own: Any) -> Any:
        if not old:
            return own
        return part if own in (None, "none", part) else "all"

    without = _words(**{part: "none", "all": other})
    return Deprecated(to="optimizer.overlap", kind=bool, merge=merge, without=without)


# Settings of 0.2.0 that still work. In 0.4.0, they become entries of REMOVED.
DEPRECATED: Mapping[str, Deprecated] = MappingProxyType(
    {
        "graphs.on_change": Deprecated(
            to="graphs.on_failure",
            kind=Literal["error", "recapture"],
            merge=lambda old, own: own if own == "eager" else old,
        ),
        "graphs.scopes": Deprecated(
            to="graphs.mode",
            kind=str | None,
            merge=lambda old, own: old or own if own == "partial" else own,
            without=lambda own: own if own in (None, "off", "full", "full_step") else "partial",
        ),
        "graphs.warmup_steps": Deprecated(to="debug.graph_warmup_steps"),
        "model.qk_norm_width": Deprecated(
            to="model.qk_norm",
            kind=Literal["head", "all"],
            merge=lambda old, own: "full" if own and old == "all" else own,
            without=_words(full=True),
        ),
        "moe.expert_bias_rate": Deprecated(
            to="moe.expert_bias",
            kind=Annotated[float, Field(ge=0.0)],
            merge=lambda old, own: old if own is True and old != 1e-3 else own,
            without=lambda own: bool(own) if isinstance(own, int | float) else own,
        ),
        "moe.overlap_shared": Deprecated(
            to="moe.shared_ffn_hidden_size",
            kind=bool,
            merge=lambda _, own: own,
            note="is always on",
        ),
        "moe.pad_to_capacity": Deprecated(
            to="moe.static_budget",
            kind=bool,
            merge=lambda old, own: "capacity" if old else own,
            without=_words(capacity=None),
        ),
        "moe.drop_by": Deprecated(to="debug.drop_by"),
        "optimizer.distributed": Deprecated(
            to="optimizer.num_instances",
            kind=bool,
            merge=lambda old, own: own if old else "all",
            without=_words(all=None),
        ),
        "optimizer.bucket_numel": Deprecated(to="debug.bucket_numel"),
        "optimizer.loss_scale": Deprecated(to="debug.loss_scale"),
        "optimizer.loss_scale_interval": Deprecated(to="debug.loss_scale_interval"),
        "optimizer.overlap_grad_reduce": _overlap("grads", "params"),
        "optimizer.overlap_param_gather": _overlap("params", "grads"),
        "pipeline.placement": Deprecated(
            to="pipeline.schedule",
            kind=Literal["loop", "v"],
            merge=lambda old, own: "auto_v" if own == "auto" and old == "v" else own,
            without=_words(auto_v="auto"),
        ),
        "pipeline.split_weight_grads": Deprecated(
            to="pipeline.overlap_moe",
            kind=bool,
            merge=lambda old, own: "split" if old else own,
            without=_words(split=True),
        ),
        "run.backend": Deprecated(to="debug.backend"),
        "run.name": Deprecated(to="run.dir", text="runs/{}"),
        "train.max_skipped_steps": Deprecated(to="debug.max_skipped_steps"),
    }
)

# Values of other projects, by setting, with the sentence that answers them.
_FP8 = 'operands of 8 bits are train.fp8 = "blockwise", beside train.dtype = "bfloat16"'
VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "train.dtype": MappingProxyType(
            dict.fromkeys(("fp8", "float8", "float8_e4m3fn", "e4m3", "mxfp8"), _FP8)
        ),
    }
)

# Names that users of Megatron-LM, torchtitan and Hugging Face know, without their section.
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "context_parallel": "parallel.cp",
        "context_parallel_degree": "parallel.cp",
        "context_parallel_size": "parallel.cp",
        "data_path": "data.source",
        "expert_model_parallel_size": "parallel.ep",
        "expert_parallel": "parallel.ep",
        "expert_parallel_degree": "parallel.ep",
        "expert_tensor_parallel_size": "parallel.etp",
        "gradient_clipping": "optimizer.clip_grad",
        "intermediate_size": "model.ffn_hidden_size",
        "learning_rate": "optimizer.lr",
        "local_batch_size": "train.microbatch_size",
        "lr_warmup_steps": "optimizer.warmup_steps",
        "max_grad_norm": "optimizer.clip_grad",
        "max_position_embeddings": "model.seq_length",
        "max_steps": "train.steps",
        "micro_batch_size": "train.microbatch_size",
        "moe_router_topk": "moe.top_k",
        "num_attention_heads": "model.num_heads",
        "num_experts_per_tok": "moe.top_k",
        "num_hidden_layers": "model.num_layers",
        "num_key_value_heads": "model.num_kv_heads",
        "num_local_experts": "moe.num_experts",
        "num_query_groups": "model.num_kv_heads",
        "per_device_train_batch_size": "train.microbatch_size",
        "pipeline_model_parallel_size": "parallel.pp",
        "pipeline_parallel": "parallel.pp",
        "pipeline_parallel_degree": "parallel.pp",
        "rms_norm_eps": "model.norm_eps",
        "rope_theta": "model.rope_base",
        "save_interval": "checkpoint.interval",
        "seq_len": "model.seq_length",
        "tensor_model_parallel_size": "parallel.tp",
        "tensor_parallel": "parallel.tp",
        "tensor_parallel_degree": "parallel.tp",
        "tie_word_embeddings": "model.tie_embeddings",
        "train_iters": "train.steps",
    }
)


def translate_deprecated(data: dict[str, Any], where: dict[str, str]) -> list[str]:
    """Give the values of deprecated settings to their keys of today, in place.

    Args:
        data: Values by section and key; those of deprecated settings have their type.
        where: Places of values by full key.

    Returns:
        Each such setting with its place and new key.

    Example:
        >>> values = {"graphs": {"warmup_steps": 5}}
        >>> translate_deprecated(values, {})
        ['graphs.warmup_steps is now debug.graph_warmup_steps']
        >>> values
        {'graphs': {}, 'debug': {'graph_warmup_steps': 5}}
    """
    found = []
    flags = {key for key, place in where.items() if place.startswith("--")}
    for old, entry in DEPRECATED.items():
        if not has_key(data, old):
            continue
        home, _, old_name = old.rpartition(".")
        section, _, name = entry.to.rpartition(".")
        table = table_of(data, section)
        if not isinstance(table, dict):
            continue  # the check of the section reports it
        place, own = where.pop(old, ""), table.get(name)
        new = table_of(data, home).pop(old_name)
        # The command line overrides the file; else the new name wins.
        is_flag, has_flag = old in flags, entry.to in flags
        if has_flag and not is_flag:
            new = own
        elif entry.merge is not None:
            new = entry.merge(new, entry.without(own) if is_flag and not has_flag else own)
        elif own is not None and (has_flag or not is_flag):
            new = own
        elif entry.text:
            new = entry.text.format(new)
        if new is None:
            table.pop(name, None)
        elif new != own:
            table[name] = new
            where |= {entry.to: place} if place else {}
        prefix = f"{place}: " if place else ""
        found.append(f"{prefix}{old} {entry.note or f'is now {entry.to}'}")
    return found


def has_key(values: Mapping[str, Any], key: str) -> bool:
    """Return whether nested tables have a value for a full key such as ``moe.echo.planner``."""
    *sections, name = key.split(".")
    found: Any = values
    for section in sections:
        found = found.get(section) if isinstance(found, Mapping) else None
    return isinstance(found, Mapping) and name in found


def table_of(data: dict[str, Any], section: str) -> Any:
    """Return the table of a section in ``data``; create missing tables."""
    table: Any = data
    for name in section.split("."):
        if not isinstance(table, dict):
            return table
        table = table.setdefault(name, {})
    return table
