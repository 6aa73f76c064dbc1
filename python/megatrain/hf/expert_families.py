"""Families with experts beyond those of `families.py`."""

from __future__ import annotations

from dataclasses import replace

from megatrain.hf import common_keys as keys
from megatrain.hf import tables
from megatrain.hf.family import Family
from megatrain.hf.fine_tuning import PaddingRow
from megatrain.hf.keys import Key
from megatrain.hf.layer_rules import (
    FirstDense,
    LayerKinds,
    LayerRange,
    RotaryWidth,
    RotatedWidth,
    SharedExperts,
    Windows,
)

# Balancing losses of `transformers` score experts in another way than these routers.
_NO_ROUTER_LOSS = {"output_router_logits": False}

EXPERT_FAMILIES = (
    Family(
        model_type="dots1",
        people="dots.llm1",
        special="sigmoid router with biases, norm of queries and keys",
        architecture="Dots1ForCausalLM",
        table=tables.DOTS1,
        keys=(
            *keys.sizes(kv_heads=32),
            *keys.DEEPSEEK_MOE_KEYS,
            keys.scaling(1.0),
            *keys.groups(1, 1, normalize=False),
            keys.BIAS,
        ),
        fixed=keys.FIXED,
        stated=keys.QK_NORM_STATED,
        implied={**keys.DEEPSEEK_V3, "model.qk_norm": "head"},
        rules=(
            FirstDense(default=0),
            SharedExperts(default=0),
            Windows(default=4096, by_layer=True, first=62),
            PaddingRow(),
        ),
        # Names of the router, which is the same in all files.
        ignored=("scoring_func", "topk_method"),
    ),
    Family(
        model_type="glm4_moe_lite",
        people="GLM-4.7-Flash",
        special="latent attention as DeepSeek-V3",
        architecture="Glm4MoeLiteForCausalLM",
        table=tables.DEEPSEEK,
        keys=(
            *keys.mla(20, q_rank=768, norm_eps=1e-5),
            *keys.DEEPSEEK_MOE_KEYS,
            keys.scaling(1.8),
            *keys.groups(1, 1),
            keys.MTP_KEY,
        ),
        fixed={
            **keys.FIXED,
            "attention_bias": False,
            "rope_interleave": True,
            "pretraining_tp": 1,
        },
        stated={"topk_method": "noaux_tc", "first_k_dense_replace": 1, "moe_layer_freq": 1},
        implied=keys.DEEPSEEK_V3,
        rules=(LayerKinds(), SharedExperts(default=1), RotatedWidth(), PaddingRow()),
        ignored=keys.DEEPSEEK_IGNORED,
        copies=tables.MTP_COPIES,
    ),
    Family(
        model_type="minimax_m2",
        people="MiniMax-M2",
        special="sigmoid router, norm of all heads together, half of a head rotated",
        architecture="MiniMaxM2ForCausalLM",
        table=tables.MINIMAX_M2,
        keys=(*keys.sizes(kv_heads=8, head_dim=128), *keys.MIXTRAL_KEYS),
        fixed={**keys.FIXED, **_NO_ROUTER_LOSS, "router_jitter_noise": 0.0},
        stated={
            **keys.QK_NORM_STATED,
            "qk_norm_type": "per_layer",
            "scoring_func": "sigmoid",
            "use_routing_bias": True,
            "postnorm": False,
            "shared_intermediate_size": 0,
        },
        implied={**keys.DEEPSEEK_V3, "model.qk_norm": "full"},
        rules=(RotaryWidth(), PaddingRow()),
        # Of the release's own program, which has other kinds of layers, too.
        ignored=(
            "attn_type_list",
            "layernorm_full_attention_beta",
            "layernorm_linear_attention_beta",
            "layernorm_mlp_beta",
            "max_model_len",
            "mlp_intermediate_size",
            "mtp_transformer_layers",
            "num_mtp_modules",
            "router_aux_loss_coef",
            "shared_moe_mode",
            "use_mtp",
        ),
        rope_base=5e6,
        rotary_fraction=1.0,
    ),
    Family(
        model_type="hy_v3",
        people="HY 3 (Hunyuan)",
        special="sigmoid router with biases, norm of queries and keys",
        architecture="HYV3ForCausalLM",
        table=tables.HY_V3,
        keys=(
            *keys.sizes(kv_heads=8, head_dim=128, norm_eps=1e-5, init_std=0.006),
            keys.FFN,
            replace(keys.TOP_K, default=8),
            Key(theirs=("num_experts", "num_local_experts"), ours=("moe.num_experts",)),
            Key(theirs=("moe_intermediate_size",), ours=("moe.ffn_hidden_size",)),
            keys.scaling(2.826, "router_scaling_factor"),
            keys.BIAS,
        ),
        fixed={**keys.FIXED, "mlp_bias": False},
        stated=keys.QK_NORM_STATED,
        implied={**keys.DEEPSEEK_V3, "model.qk_norm": "head"},
        rules=(LayerKinds(), SharedExperts(default=1, names=("num_shared_experts",)), PaddingRow()),
        # Sums of bfloat16 in float32, as ours.
        ignored=("enable_moe_fp32_combine",),
        rope_base=11158840.0,
    ),
    Family(
        model_type="bailing_moe_v2",
        people="Ling 2, Ring 2",
        special="fused queries, keys and values, half of a head rotated, groups of experts",
        architecture="BailingMoeV2ForCausalLM",
        table=tables.BAILING_MOE_V2,
        keys=(
            *keys.sizes(),
            keys.FFN,
            keys.TOP_K,
            Key(theirs=("num_experts",), ours=("moe.num_experts",)),
            Key(theirs=("moe_intermediate_size",), ours=("moe.ffn_hidden_size",)),
            keys.scaling(1.0),
            Key(theirs=("n_group",), ours=("moe.num_groups",)),
            Key(theirs=("topk_group",), ours=("moe.groups_top_k",)),
            Key(theirs=("use_qkv_bias",), ours=("model.qkv_bias",), kind=bool, default=False),
            Key(theirs=("use_bias",), ours=("model.output_bias",), kind=bool, default=False),
        ),
        fixed={**keys.FIXED, "num_nextn_predict_layers": 0},
        stated={
            **keys.QK_NORM_STATED,
            "embedding_dropout": 0.0,
            "moe_router_enable_expert_bias": True,
            "norm_topk_prob": True,
            "output_dropout": 0.0,
            "score_function": "sigmoid",
            "use_rmsnorm": True,
            "use_sliding_window": False,
        },
        implied={**keys.DEEPSEEK_V3, "model.qk_norm": "head"},
        rules=(
            FirstDense(default=0),
            SharedExperts(default=0, names=("num_shared_experts",)),
            PaddingRow(),
        ),
        ignored=(
            "max_window_layers",
            "moe_shared_expert_intermediate_size",
            "mtp_loss_scaling_factor",
            "router_dtype",
        ),
        rope_base=600000.0,
        rotary_fraction=1.0,
    ),
    Family(
        model_type="ernie4_5_moe",
        people="ERNIE 4.5 A3B, A47B",
        special="softmax router with biases, pairs rotated side by side",
        architecture="Ernie4_5_MoeForCausalLM",
        table=tables.ERNIE4_5_MOE,
        keys=(
            *keys.sizes(kv_heads=4, norm_eps=1e-5, tied=True),
            keys.FFN,
            Key(theirs=("moe_k", "num_experts_per_tok"), ours=("moe.top_k",), default=6),
            Key(theirs=("moe_num_experts", "num_experts"), ours=("moe.num_experts",)),
            Key(theirs=("moe_intermediate_size",), ours=("moe.ffn_hidden_size",)),
        ),
        fixed={**keys.FIXED, **_NO_ROUTER_LOSS, "use_bias": False, "moe_norm_min": 1e-12},
        implied={
            "moe.expert_bias": True,
            "moe.expert_bias_rate": 0.0,
        },
        rules=(
            LayerRange(),
            SharedExperts(default=2, names=("moe_num_shared_experts",)),
            PaddingRow(default=0),
        ),
        ignored=("router_aux_loss_coef",),
        rope_base=500000.0,
    ),
)
