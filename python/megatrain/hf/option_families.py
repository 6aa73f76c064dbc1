"""Families without experts that have options of the layer: norms, factors, rotations, positions."""

from __future__ import annotations

from megatrain.hf import common_keys as keys
from megatrain.hf import tables
from megatrain.hf.family import Family
from megatrain.hf.fine_tuning import PaddingRow
from megatrain.hf.keys import Key
from megatrain.hf.layer_rules import Windows
from megatrain.hf.option_rules import (
    EmbeddingRoot,
    InnerWidth,
    LogitDivisor,
    OnlyAttention,
    RotatedLayers,
    RotatedWindows,
    ScoreWidth,
)

_GEMMA_FIXED = {"attention_bias": False, "attention_dropout": 0.0}
_GEMMA_GATE = {"hidden_activation": "gelu_pytorch_tanh"}
_CAUSAL = {"use_bidirectional_attention": False}
_GEMMA = {"model.norm_plus_one": True, "model.activation": "geglu"}
_BOTH = {"model.norm_position": "both"}
_COHERE = {
    "model.norm": "layernorm",
    "model.norm_bias": False,
    "model.parallel_blocks": True,
}
_GEMMA_SIZES = keys.sizes(kv_heads=4, head_dim=256, tied=True)
_GLM_KEYS = (
    *keys.sizes(kv_heads=2, head_dim=128, norm_eps=0.00000015625),
    keys.FFN,
    Key(theirs=("attention_bias",), ours=("model.qkv_bias",), kind=bool, default=True),
)
_LOGIT_SCALE = keys.factor("logit_scale", "model.logit_factor", 0.0625)

OPTION_FAMILIES = (
    Family(
        model_type="gemma",
        people="Gemma, CodeGemma",
        special="norm weight plus one, GeGLU, scaled embedding",
        architecture="GemmaForCausalLM",
        table=tables.GEMMA,
        keys=(*keys.sizes(kv_heads=16, head_dim=256, tied=True), keys.FFN),
        fixed={**_GEMMA_FIXED, "hidden_act": "gelu_pytorch_tanh"},
        stated={**_CAUSAL, **_GEMMA_GATE},
        implied=_GEMMA,
        rules=(EmbeddingRoot(), PaddingRow(default=0)),
    ),
    Family(
        model_type="gemma2",
        people="Gemma 2",
        special="norms before and after blocks, norm weight plus one, GeGLU, limits of scores and "
        "logits, windows of every second layer",
        architecture="Gemma2ForCausalLM",
        table=tables.GEMMA2,
        keys=(
            *_GEMMA_SIZES,
            keys.FFN,
            keys.limit("attn_logit_softcapping", "model.attention_softcap", 50.0),
            keys.limit("final_logit_softcapping", "model.logit_softcap", 30.0),
        ),
        fixed={**_GEMMA_FIXED, **_GEMMA_GATE},
        stated={**_CAUSAL, "hidden_act": "gelu_pytorch_tanh"},
        implied={**_GEMMA, **_BOTH},
        rules=(
            EmbeddingRoot(),
            ScoreWidth(default=256),
            Windows(default=4096, by_layer=True, pattern="wf"),
            PaddingRow(default=0),
        ),
    ),
    Family(
        model_type="gemma3_text",
        people="Gemma 3 270M, 1B; the text of larger ones",
        special="as Gemma 2 without limits, norm of queries and keys, 5 of 6 layers with a window "
        "and a rotation of their own",
        architecture="Gemma3ForCausalLM",
        table=tables.GEMMA2,
        keys=(
            *_GEMMA_SIZES,
            keys.FFN,
            keys.limit("final_logit_softcapping", "model.logit_softcap", None),
        ),
        # An entry that `transformers` does not read.
        fixed={**_GEMMA_FIXED, **_GEMMA_GATE, "attn_logit_softcapping": None},
        stated={**_CAUSAL, "hidden_act": "gelu_pytorch_tanh"},
        implied={**_GEMMA, **_BOTH, "model.qk_norm": "head"},
        rules=(
            EmbeddingRoot(),
            ScoreWidth(default=256),
            Windows(default=4096, by_layer=True, period=6),
            PaddingRow(default=0),
        ),
        rope_base=1e6,
        window_rope_base=1e4,
        window_rope_name="rope_local_base_freq",
    ),
    Family(
        model_type="olmo3",
        people="OLMo 3",
        special="as OLMo 2, 3 of 4 layers with a window and a rotation without scaling",
        architecture="Olmo3ForCausalLM",
        table=tables.OLMO2,
        keys=(*keys.sizes(norm_eps=1e-5), keys.FFN, keys.BIAS),
        fixed=keys.FIXED,
        stated=keys.QK_NORM_STATED,
        implied={"model.norm_position": "after", "model.qk_norm": "full"},
        rules=(Windows(default=4096, by_layer=True, pattern="wwwf"), PaddingRow(default=1)),
        rope_base=500000.0,
        window_rope_base=500000.0,
    ),
    Family(
        model_type="ministral",
        people="Ministral 8B",
        special="windows of some layers",
        architecture="MinistralForCausalLM",
        table=tables.LLAMA,
        keys=(*keys.sizes(kv_heads=8), keys.FFN),
        fixed=keys.FIXED,
        rules=(Windows(default=4096, by_layer=True, pattern="w"), PaddingRow()),
    ),
    Family(
        model_type="exaone4",
        people="EXAONE 4",
        special="norm after blocks, norm of queries and keys per head, rotation in layers with a "
        "window only",
        architecture="Exaone4ForCausalLM",
        table=tables.EXAONE4,
        keys=(*keys.sizes(kv_heads=32, norm_eps=1e-5), keys.FFN),
        fixed=keys.FIXED,
        implied={"model.norm_position": "after", "model.qk_norm": "head"},
        rules=(
            RotatedWindows(default=4096, by_layer=True, period=4, rotated_without=True),
            PaddingRow(),
        ),
    ),
    Family(
        model_type="smollm3",
        people="SmolLM3",
        special="every fourth layer without rotation",
        architecture="SmolLM3ForCausalLM",
        table=tables.LLAMA,
        keys=(*keys.sizes(kv_heads=4, tied=True), keys.FFN, keys.BIAS),
        fixed={**keys.FIXED, "mlp_bias": False, "use_sliding_window": False},
        rules=(RotatedLayers(), OnlyAttention(), PaddingRow(default=128004)),
        ignored=("sliding_window", "max_window_layers"),
        rope_base=2e6,
    ),
    Family(
        model_type="granite",
        people="Granite 3 dense",
        special="factors of embeddings, scores, residuals and logits",
        architecture="GraniteForCausalLM",
        table=tables.LLAMA,
        keys=(*keys.sizes(), keys.FFN, keys.BIAS, *keys.GRANITE_FACTORS),
        fixed={**keys.FIXED, "mlp_bias": False},
        rules=(LogitDivisor(), PaddingRow()),
    ),
    Family(
        model_type="glm",
        people="GLM-4 9B, GLM-Edge",
        special="half of a head rotated in pairs side by side, fused gate and up",
        architecture="GlmForCausalLM",
        table=tables.GLM,
        keys=_GLM_KEYS,
        fixed=keys.FIXED,
        rules=(PaddingRow(default=151329),),
        rotary_fraction=0.5,
    ),
    Family(
        model_type="glm4",
        people="GLM-4-0414, GLM-Z1",
        special="as GLM-4 9B with norms before and after blocks",
        architecture="Glm4ForCausalLM",
        table=tables.GLM4,
        keys=_GLM_KEYS,
        fixed=keys.FIXED,
        implied=_BOTH,
        rules=(PaddingRow(default=151329),),
        rotary_fraction=0.5,
    ),
    Family(
        model_type="hunyuan_v1_dense",
        people="Hunyuan 0.5B to 7B",
        special="norm of queries and keys after rotation",
        architecture="HunYuanDenseV1ForCausalLM",
        table=tables.HUNYUAN,
        keys=(*keys.sizes(norm_eps=1e-5), keys.FFN, keys.BIAS),
        fixed={**keys.FIXED, "pretraining_tp": 1},
        stated=keys.QK_NORM_STATED,
        implied={"model.qk_norm": "head_after"},
        rules=(PaddingRow(default=0),),
        ignored=("eod_token_id",),
        stretches=True,
    ),
    Family(
        model_type="arcee",
        people="AFM 4.5B",
        special="squared ReLU without a gate",
        architecture="ArceeForCausalLM",
        table=tables.ARCEE,
        keys=(*keys.sizes(norm_eps=1e-5), keys.FFN, keys.BIAS),
        fixed={"hidden_act": "relu2", "attention_dropout": 0.0, "mlp_bias": False},
        implied={"model.activation": "relu2"},
        rules=(PaddingRow(),),
    ),
    Family(
        model_type="cohere",
        people="Command R",
        special="parallel blocks, LayerNorm without bias, pairs rotated side by side",
        architecture="CohereForCausalLM",
        table=tables.COHERE,
        keys=(
            *keys.sizes(tied=True, norm_eps=1e-5, norm_name="layer_norm_eps"),
            keys.FFN,
            keys.BIAS,
            _LOGIT_SCALE,
        ),
        fixed={**keys.FIXED, "use_qk_norm": False},
        implied=_COHERE,
        rules=(PaddingRow(default=0),),
        rope_base=500000.0,
    ),
    Family(
        model_type="cohere2",
        people="Command R7B, Command A",
        special="as Command R, 3 of 4 layers with a window, the others without rotation",
        architecture="Cohere2ForCausalLM",
        table=tables.COHERE,
        keys=(
            *keys.sizes(tied=True, norm_eps=1e-5, norm_name="layer_norm_eps"),
            keys.FFN,
            keys.BIAS,
            _LOGIT_SCALE,
        ),
        fixed=keys.FIXED,
        implied=_COHERE,
        rules=(
            RotatedWindows(default=4096, by_layer=True, period=4),
            PaddingRow(default=0),
        ),
    ),
    Family(
        model_type="starcoder2",
        people="StarCoder 2",
        special="LayerNorm, GELU without a gate, biases everywhere",
        architecture="Starcoder2ForCausalLM",
        table=tables.STARCODER2,
        keys=(
            *keys.sizes(
                kv_heads=2, tied=True, norm_eps=1e-5, norm_name="norm_epsilon", init_std=0.018042
            ),
            keys.FFN,
            Key(
                theirs=("use_bias",),
                ours=("model.qkv_bias", "model.output_bias", "model.mlp_bias"),
                kind=bool,
                default=True,
            ),
        ),
        fixed={
            "hidden_act": "gelu_pytorch_tanh",
            "attention_dropout": 0.0,
            "embedding_dropout": 0.0,
            "residual_dropout": 0.0,
        },
        implied={"model.norm": "layernorm", "model.activation": "gelu"},
        rules=(Windows(), PaddingRow()),
    ),
    Family(
        model_type="gpt2",
        people="GPT-2, and models of Megatron in the style of GPT-3",
        special="learned positions, LayerNorm, GELU without a gate, biases everywhere",
        architecture="GPT2LMHeadModel",
        table=tables.GPT2,
        keys=(
            Key(theirs=("n_embd", "hidden_size"), ours=("model.hidden_size",), default=768),
            Key(theirs=("n_layer", "num_hidden_layers"), ours=("model.num_layers",), default=12),
            Key(theirs=("n_head", "num_attention_heads"), ours=("model.num_heads",), default=12),
            Key(
                theirs=("n_positions", "max_position_embeddings"),
                ours=("model.learned_positions", "model.seq_length"),
                default=1024,
            ),
            Key(theirs=("vocab_size",), ours=("model.vocab_size",), default=50257),
            Key(
                theirs=("tie_word_embeddings",),
                ours=("model.tie_embeddings",),
                kind=bool,
                default=True,
            ),
            keys.factor("layer_norm_epsilon", "model.norm_eps", 1e-5),
            keys.factor("initializer_range", "model.init_std", 0.02),
        ),
        fixed={
            "activation_function": "gelu_new",
            "add_cross_attention": False,
            "scale_attn_by_inverse_layer_idx": False,
            "scale_attn_weights": True,
        },
        implied={
            "model.norm": "layernorm",
            "model.activation": "gelu",
            "model.qkv_bias": True,
            "model.output_bias": True,
            "model.mlp_bias": True,
        },
        rules=(InnerWidth(),),
        # Dropout of its training, heads for other tasks, and the order of operations.
        ignored=(
            "attn_pdrop",
            "embd_pdrop",
            "n_ctx",
            "pad_token_id",
            "reorder_and_upcast_attn",
            "resid_pdrop",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        ),
        rotates=False,
    ),
)
