"""Model families: names of tensors and configuration entries, for import and export.

One `Family` describes a ``model_type`` of ``transformers`` completely. Its `Table` has the tensors,
its keys the entries of ``config.json``; `import_hf` and `export_hf` read both. Tables that several
families share are in `tables.py`, keys in `common_keys.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from megatrain.hf import common_keys as keys
from megatrain.hf import tables
from megatrain.hf.dense_families import DENSE_FAMILIES
from megatrain.hf.expert_families import EXPERT_FAMILIES
from megatrain.hf.family import Family
from megatrain.hf.fine_tuning import PaddingRow, RouterLoss
from megatrain.hf.layer_rules import (
    FirstDense,
    GroupLimit,
    HeadNorms,
    RotatedWidth,
    SharedExperts,
    SparseStep,
    Windows,
)
from megatrain.hf.option_families import OPTION_FAMILIES

_FIRST = (
    Family(
        model_type="llama",
        people="Llama 2, 3, 3.1 to 3.3, Yi, SmolLM2, DeepSeek R1-distill",
        special="the base of most others",
        architecture="LlamaForCausalLM",
        table=tables.LLAMA,
        keys=(*keys.sizes(), keys.FFN, keys.BIAS),
        fixed={**keys.FIXED, "mlp_bias": False, "pretraining_tp": 1},
        rules=(PaddingRow(),),
    ),
    Family(
        model_type="mistral",
        people="Mistral 7B, Nemo",
        special="sliding window",
        architecture="MistralForCausalLM",
        table=tables.LLAMA,
        keys=(*keys.sizes(kv_heads=8), keys.FFN),
        fixed={**keys.FIXED, **keys.NO_BIAS},
        rules=(Windows(default=4096), PaddingRow()),
    ),
    Family(
        model_type="mixtral",
        people="Mixtral",
        special="experts in every layer",
        architecture="MixtralForCausalLM",
        table=tables.MIXTRAL,
        keys=(*keys.sizes(kv_heads=8, norm_eps=1e-5), *keys.MIXTRAL_KEYS),
        fixed={**keys.FIXED, **keys.NO_BIAS, "router_jitter_noise": 0.0},
        rules=(Windows(), RouterLoss(), PaddingRow()),
        rope_base=1e6,
    ),
    Family(
        model_type="qwen3",
        people="Qwen3",
        special="norm of queries and keys per head",
        architecture="Qwen3ForCausalLM",
        table=tables.QWEN3,
        keys=(*keys.sizes(kv_heads=32, head_dim=128), keys.FFN, keys.BIAS),
        fixed=keys.FIXED,
        stated=keys.QK_NORM_STATED,
        implied={"model.qk_norm": "head"},
        rules=(Windows(default=4096, switch=True, by_layer=True), PaddingRow()),
    ),
    Family(
        model_type="qwen2",
        people="Qwen2, Qwen2.5",
        special="biases of queries, keys and values",
        architecture="Qwen2ForCausalLM",
        table=tables.LLAMA,
        keys=(*keys.sizes(kv_heads=32), keys.FFN),
        fixed=keys.FIXED,
        implied={"model.qkv_bias": True},
        rules=(Windows(default=4096, switch=True, by_layer=True), PaddingRow()),
    ),
    Family(
        model_type="qwen3_moe",
        people="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        special="norm of queries and keys, experts",
        architecture="Qwen3MoeForCausalLM",
        table=tables.QWEN3_MOE,
        keys=(*keys.sizes(kv_heads=4), *keys.QWEN3_MOE_KEYS, keys.BIAS),
        fixed=keys.FIXED,
        stated=keys.QK_NORM_STATED,
        implied={"model.qk_norm": "head"},
        rules=(SparseStep(), Windows(default=4096, switch=True), RouterLoss(), PaddingRow()),
    ),
    Family(
        model_type="qwen2_moe",
        people="Qwen1.5-MoE, Qwen2-57B-A14B",
        special="shared expert with a gate",
        architecture="Qwen2MoeForCausalLM",
        table=tables.QWEN2_MOE,
        keys=(*keys.sizes(kv_heads=16), *keys.QWEN3_MOE_KEYS, keys.QKV_BIAS, keys.SHARED_FFN),
        fixed=keys.FIXED,
        implied={"moe.shared_gate": True},
        rules=(
            SparseStep(),
            Windows(default=4096, switch=True, by_layer=True, alternate=True),
            RouterLoss(),
            PaddingRow(),
        ),
    ),
    Family(
        model_type="glm4_moe",
        people="GLM-4.5, GLM-4.6",
        special="sigmoid router with biases, half of a head rotated, multi-token prediction",
        architecture="Glm4MoeForCausalLM",
        table=tables.GLM4_MOE,
        keys=(
            *keys.sizes(kv_heads=8, norm_eps=1e-5),
            *keys.DEEPSEEK_MOE_KEYS,
            keys.scaling(1.0),
            *keys.groups(1, 1),
            *keys.GLM4_KEYS,
            keys.MTP_KEY,
        ),
        fixed=keys.FIXED,
        implied=keys.DEEPSEEK_V3,
        rules=(FirstDense(default=1), SharedExperts(default=1), HeadNorms(), PaddingRow()),
        copies=tables.MTP_COPIES,
        rotary_fraction=0.5,
    ),
    Family(
        model_type="olmo2",
        people="OLMo 2",
        special="norm after blocks, norm of all heads together",
        architecture="Olmo2ForCausalLM",
        table=tables.OLMO2,
        keys=(*keys.sizes(norm_eps=1e-5), keys.FFN, keys.BIAS),
        fixed=keys.FIXED,
        stated=keys.QK_NORM_STATED,
        implied={
            "model.norm_position": "after",
            "model.qk_norm": "full",
        },
        rules=(PaddingRow(default=1),),
    ),
    Family(
        model_type="gpt_oss",
        people="gpt-oss",
        special="attention sinks, clamped SwiGLU, biases of experts",
        architecture="GptOssForCausalLM",
        table=tables.GPT_OSS,
        keys=(
            *keys.sizes(kv_heads=8, head_dim=64, norm_eps=1e-5),
            *keys.MIXTRAL_KEYS,
            replace(keys.BIAS, default=True),
        ),
        fixed={**keys.FIXED, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
        implied={
            "model.attention_sinks": True,
            "moe.activation": "clamped_swiglu",
            "moe.biases": True,
            "moe.score_function": "softmax_after_top_k",
        },
        rules=(
            Windows(default=128, by_layer=True, pattern="wf"),
            RouterLoss(),
            PaddingRow(),
        ),
        # Repeat other entries, for other programs.
        ignored=("experts_per_token", "initial_context_length"),
        rope_base=150000.0,
        rope={
            "rope_type": "yarn",
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    ),
    Family(
        model_type="deepseek_v3",
        people="DeepSeek-V3, R1, Moonlight",
        special="latent attention, groups of experts, multi-token prediction",
        architecture="DeepseekV3ForCausalLM",
        table=tables.DEEPSEEK,
        keys=(
            *keys.mla(128),
            *keys.DEEPSEEK_MOE_KEYS,
            keys.scaling(2.5),
            *keys.groups(8, 4),
            keys.MTP_KEY,
        ),
        # vLLM reads the router's method and score function.
        fixed={
            **keys.FIXED,
            **keys.NO_BIAS,
            "topk_method": "noaux_tc",
            "scoring_func": "sigmoid",
            "rope_interleave": True,
            "pretraining_tp": 1,
        },
        implied=keys.DEEPSEEK_V3,
        rules=(FirstDense(default=3), SharedExperts(default=1), RotatedWidth(), PaddingRow()),
        ignored=keys.DEEPSEEK_IGNORED,
        copies=tables.MTP_COPIES,
    ),
    Family(
        model_type="deepseek_v2",
        people="DeepSeek-V2, V2-Lite",
        special="latent attention, softmax router",
        architecture="DeepseekV2ForCausalLM",
        table=tables.DEEPSEEK,
        keys=(*keys.mla(32), *keys.DEEPSEEK_MOE_KEYS, keys.scaling(1.0)),
        fixed={
            **keys.FIXED,
            **keys.NO_BIAS,
            "norm_topk_prob": False,
            "scoring_func": "softmax",
            "pretraining_tp": 1,
        },
        implied={"moe.normalize": False},
        rules=(
            FirstDense(default=0),
            SharedExperts(default=2),
            RotatedWidth(),
            GroupLimit(),
            PaddingRow(),
        ),
        ignored=keys.DEEPSEEK_IGNORED,
    ),
)
_BY_NAME = {family.model_type: family for family in _FIRST}
FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        *_FIRST,
        replace(_BY_NAME["deepseek_v3"], model_type="kimi_k2", people="Kimi K2"),
        *EXPERT_FAMILIES,
        *DENSE_FAMILIES,
        *OPTION_FAMILIES,
    )
}
