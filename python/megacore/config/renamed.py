"""Settings of earlier versions, for messages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_LAYOUT = "pipeline.layout, as in layout = 'Et*3|t*4|t*3L'"

# The place of a setting today, by its full key in version 0.1.
RENAMED: Mapping[str, str] = MappingProxyType(
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
        "moe.shared_overlap": "moe.overlap_shared",
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
