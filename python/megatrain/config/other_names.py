"""Names and values that users know from elsewhere, and the settings that they mean here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

# Values of other projects, by setting, with the sentence that answers them.
_FP8 = 'operands of 8 bits are train.fp8 = "blockwise", beside train.dtype = "bfloat16"'
VALUES: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "train.dtype": MappingProxyType(
            dict.fromkeys(("fp8", "float8", "float8_e4m3fn", "e4m3", "mxfp8"), _FP8)
        ),
    }
)

# Names that users of Megatron-LM, torchtitan, Hugging Face and megacore 0.2 know, without their
# section.
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
        "graph_backend": "graphs.backend",
        "graph_warmup_steps": "graphs.warmup_steps",
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
