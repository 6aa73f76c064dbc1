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
        "optimizer.schedule": MappingProxyType(
            {
                "inverse-square-root": 'it is called "inverse_sqrt" here',
                "wsd": 'it is called "wsd" here',
                "warmup_stable_decay": 'it is called "wsd" here, with optimizer.tail_length',
                "constant_with_warmup": '"constant" with optimizer.warmup',
                "cosine_with_min_lr": '"cosine", with optimizer.min_lr',
                "cosine_warmup_with_min_lr": '"cosine", with optimizer.min_lr and warmup_from',
                "sqrt": 'it is optimizer.tail_shape = "minus_sqrt" of "wsd" here',
                "polynomial": '"linear", with optimizer.min_lr, is that of power 1',
            }
        ),
        "optimizer.tail_shape": MappingProxyType(
            dict.fromkeys(("sqrt", "1-sqrt", "1_sqrt"), 'it is called "minus_sqrt" here')
        ),
    }
)

# Names that users of Megatron-LM, torchtitan, Hugging Face and megacore 0.2 know, without their
# section, and the settings that they mean, separated by spaces.
ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        "context_parallel": "parallel.cp",
        "context_parallel_degree": "parallel.cp",
        "context_parallel_size": "parallel.cp",
        "data_path": "data.source",
        "decay_ratio": "optimizer.tail_length",
        "decay_steps": "optimizer.decay_end optimizer.tail_length",
        "decay_type": "optimizer.schedule optimizer.tail_shape",
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
        "log_num_zeros_in_grad": "debug.count_zeros",
        "lr_decay_iters": "optimizer.decay_end",
        "lr_decay_samples": "optimizer.decay_end",
        "lr_decay_steps": "optimizer.decay_end",
        "lr_decay_style": "optimizer.schedule",
        "lr_min": "optimizer.min_lr",
        "lr_scheduler_type": "optimizer.schedule",
        "lr_warmup_fraction": "optimizer.warmup",
        "lr_warmup_init": "optimizer.warmup_from",
        "lr_warmup_iters": "optimizer.warmup",
        "lr_warmup_samples": "optimizer.warmup",
        "lr_warmup_steps": "optimizer.warmup",
        "lr_wsd_decay_iters": "optimizer.tail_length",
        "lr_wsd_decay_samples": "optimizer.tail_length",
        "lr_wsd_decay_style": "optimizer.tail_shape",
        "max_grad_norm": "optimizer.clip_grad",
        "max_position_embeddings": "model.seq_length",
        "max_steps": "train.steps",
        "micro_batch_size": "train.microbatch_size",
        "min_lr_factor": "optimizer.min_lr",
        "moe_router_topk": "moe.top_k",
        "num_attention_heads": "model.num_heads",
        "num_decay_steps": "optimizer.tail_length",
        "num_experts_per_tok": "moe.top_k",
        "num_hidden_layers": "model.num_layers",
        "num_key_value_heads": "model.num_kv_heads",
        "num_local_experts": "moe.num_experts",
        "num_query_groups": "model.num_kv_heads",
        "num_training_steps": "train.steps",
        "num_warmup_steps": "optimizer.warmup",
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
        "total_steps": "optimizer.decay_end",
        "train_iters": "train.steps",
        "warmup_ratio": "optimizer.warmup",
        "warmup_steps": "optimizer.warmup",
    }
)
