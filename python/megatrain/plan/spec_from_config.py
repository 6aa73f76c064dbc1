"""Translation between a configuration and the inputs of a prediction, without torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megacore.optim.param_group import group_of
from megatrain.config import Config, ResolvedConfig, layers_of_stages
from megatrain.config.layers import stage_text
from megatrain.config.lora import is_adapter
from megatrain.config.resolved import ResolvedModelConfig, ResolvedMoEConfig
from megatrain.models.adapter_infos import projections_of
from megatrain.models.param_infos import GPTInfos, Infos
from megatrain.plan.spec import KeptInputs, ModelSpec, RunSpec
from megatrain.plan.state import mean_sharded_bytes, memory_rows_of
from megatrain.plan.updates import Updates

_PRECISIONS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}


def model_spec(model: ResolvedModelConfig, moe: ResolvedMoEConfig) -> ModelSpec:
    """Take the shape of the model from the sections of a resolved configuration."""
    mla, num_layers = model.mla, model.mtp_layers.stop
    return ModelSpec(
        num_layers=model.num_layers,
        hidden_size=model.hidden_size,
        ffn_hidden_size=model.ffn_hidden_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=mla.v_head_dim if mla.kv_rank else model.head_dim,
        padded_vocab_size=model.padded_vocab_size,
        seq_length=model.seq_length,
        tie_embeddings=model.tie_embeddings,
        gated=model.gated,
        qk_norm=model.qk_norm not in ("none", "unit"),
        mla=mla,
        moe=moe,
        moe_layers=tuple(moe.is_moe_layer(index) for index in range(num_layers)),
        num_mtp_layers=model.num_mtp_layers,
        windows=tuple(model.window_of(layer) or 0 for layer in range(num_layers)),
        has_chunks=model.window_type == "chunk",
    )


def model_spec_of(config: ResolvedConfig) -> ModelSpec:
    """Take the shape of the model, with its frozen weights and adapters."""
    spec, model, moe = model_spec(config.model, config.moe), config.model, config.moe
    param_groups = config.param_groups()
    if not any(group.frozen for group in param_groups):
        return spec
    frozen = adapters = 0.0
    for info in _infos(config, has_head=True).values():
        is_matrix = info.matrices is not None or info.name in ("embedding", "head")
        if not is_matrix or (info.name == "embedding" and not model.tie_embeddings):
            continue
        numel = math.prod(info.full_shape)
        used = numel * moe.top_k / moe.num_experts if info.expert else numel
        if is_adapter(info.name):
            adapters += used
        elif group_of(info.name, param_groups).frozen:
            frozen += used
    return replace(spec, frozen_weights=frozen, adapter_weights=adapters)


def _infos(config: ResolvedConfig, *, has_head: bool) -> Infos:
    model = config.model
    return GPTInfos.of(model, config.moe, lora=config.lora).stage(
        range(model.num_layers), has_embedding=has_head, has_head=has_head
    )


# Names of the parameters whose inputs `KeptInputs` counts.
_PRODUCTS = {
    "qkv": ("qkv", "q", "q_down", "kv_down"),
    "out": ("output",),
    "router": ("router", "shared.gate_up", "shared.up"),
    "up": ("mlp.gate_up", "mlp.up", "fc1"),
    "down": ("mlp.down", "fc2"),
}


def _kept_inputs(config: ResolvedConfig) -> KeptInputs:
    param_groups = config.param_groups()
    if not any(group.frozen for group in param_groups):
        return KeptInputs()
    infos = _infos(config, has_head=False)
    # Whether any of the parameters of a layer needs the input.
    kept: dict[str, dict[str, bool]] = {product: {} for product in _PRODUCTS}
    for name, info in infos.items():
        for product, ends in _PRODUCTS.items():
            if name.endswith(tuple(f".{end}" for end in ends)):
                adapted = any(f"{each.name}.lora_a" in infos for each in projections_of(info))
                needs = adapted or not group_of(name, param_groups).frozen
                layer = name.split(".")[1]
                kept[product][layer] = needs or kept[product].get(layer, False)
    return KeptInputs(
        **{name: sum(each.values()) / max(1, len(each)) for name, each in kept.items()}
    )


def run_spec(config: ResolvedConfig, gpus: int, *, imbalance: float = 1.0) -> RunSpec:
    """Take the layout and all choices from a resolved configuration."""
    parallel, pipeline, train = config.parallel, config.pipeline, config.train
    optimizer, moe = config.optimizer, config.moe
    overlap = {
        "dp": optimizer.overlap == "all",
        "grads": optimizer.overlap == "grads",
        "params": optimizer.overlap == "params",
        "pp": pipeline.overlap_p2p,
        "ep": pipeline.overlap_moe,
    }
    memory = next(iter(memory_rows_of(optimizer, dtype=train.dtype).values()))
    return RunSpec(
        gpus=gpus,
        tp=parallel.tp,
        sequence_parallel=parallel.sequence_parallel,
        cp=parallel.cp,
        cp_comm=parallel.cp_comm,
        pp=parallel.pp,
        chunks=pipeline.chunks,
        ep=parallel.ep,
        etp=parallel.etp,
        microbatch=train.microbatch_size,
        global_batch=train.global_batch_size,
        schedule=pipeline.shown_schedule,
        zero=1 if optimizer.distributed else 0,
        precision=_PRECISIONS[train.dtype],
        param_bytes=memory.param_bytes,
        grad_bytes=memory.grad_bytes,
        state_bytes=mean_sharded_bytes(config),
        updates=Updates(config.model, moe, optimizer, config.lora),
        recompute=train.recomputed,
        recompute_keep=train.recompute_keep,
        overlap=frozenset(name for name, on in overlap.items() if on),
        dispatcher="allgather" if moe.dispatcher == "allgather" else "alltoall",
        imbalance=1.0 if config.debug.force_balanced else imbalance,
        echo=moe.echo,
        clones_made=not config.debug.force_balanced,
        graphs="partial" if config.graphs.is_partial else config.graphs.mode.removesuffix("_step"),
        attention="flash2",
        loss="unfused",
        instances=optimizer.sharded_instances,
        stages=tuple(len(layers) for layers in layers_of_stages(config)),
        plain_autograd=True,
        keeps_permuted=False,
        group_size=pipeline.group_size,
        memory_limit=pipeline.memory_limit,
        pairs=pipeline.requested_pairs,
        placement=pipeline.searched_placement,
        schedule_file=pipeline.file,
        order=parallel.order,
        kept_inputs=_kept_inputs(config),
    )


def without_layout(base: Config, gpus: int) -> Config:
    """Return the configuration on one pipeline stage of single ranks."""
    return with_settings(
        base,
        {
            "parallel": {"tp": 1, "cp": 1, "pp": 1, "ep": 1, "etp": 1, "sequence_parallel": False},
            "pipeline": _PLAIN_PIPELINE,
            "train": {"microbatch_size": 1, "recompute": [], "recompute_keep": 0},
            "optimizer": {"distributed": base.optimizer.distributed, "num_instances": 1},
            "moe": {"echo": base.moe.echo.model_copy(update={"domain_size": None})},
        },
        gpus,
    )


_PLAIN_PIPELINE: dict[str, Any] = {
    "schedule": "1f1b", "schedule_file": None, "num_chunks": None, "group_size": None,
    "layout": None, "overlap_moe": False, "pairs": "whole", "placement": "loop",
    "memory_limit": None,
}  # fmt: skip


def settings_of(spec: RunSpec, stages: Sequence[int], mtp: int = 0) -> dict[str, dict[str, Any]]:
    """Return the settings of a layout that was found, by section.

    Args:
        spec: The layout.
        stages: Layers of each stage.
        mtp: Layers for multi-token prediction.
    """
    recompute = ["full"] if "layer" in spec.recompute else sorted(spec.recompute)
    return {
        "parallel": {
            "tp": spec.tp, "cp": spec.cp, "pp": spec.pp, "ep": spec.ep, "etp": spec.etp,
            "sequence_parallel": spec.sequence_parallel,
        },
        "pipeline": {
            **_PLAIN_PIPELINE,
            "schedule": spec.schedule,
            "num_chunks": spec.chunks if spec.chunks > 1 else None,
            "layout": None if len(set(stages)) == 1 else stage_text(stages, mtp),
            "overlap_moe": "ep" in spec.overlap,
        },
        "train": {"microbatch_size": spec.microbatch, "recompute": recompute},
        "optimizer": {
            "overlap": next(
                (part for part in ("grads", "params") if part in spec.overlap),
                "all" if "dp" in spec.overlap else "none",
            ),
            "distributed": bool(spec.zero),
            "num_instances": 1,
        },
    }  # fmt: skip


def with_settings(base: Config, settings: dict[str, dict[str, Any]], gpus: int) -> Config:
    """Return a configuration with other settings, by section, for ``gpus`` processes."""
    sections = {
        name: getattr(base, name).model_copy(update=values) for name, values in settings.items()
    }
    sections["run"] = base.run.model_copy(update={"nproc": gpus})
    return base.model_copy(update=sections)
