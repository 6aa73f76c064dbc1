"""Model families: names of tensors and configuration entries, for import and export.

One `Family` describes a ``model_type`` of ``transformers`` completely. Its `Table` has the tensors,
its keys the entries of ``config.json``; `import_hf` and `export_hf` read both.

Shapes: H hidden, F inner width of the MLP or of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from megatrain.hf.fine_tuning import PaddingRow, RouterLoss
from megatrain.hf.keys import Key, LayerRule
from megatrain.hf.layer_rules import (
    FirstDense,
    GroupLimit,
    HeadNorms,
    RotatedWidth,
    SharedExperts,
    SparseStep,
    Windows,
)
from megatrain.hf.rows import (
    ALTERNATING,
    ALTERNATING_BIAS,
    GATED_EXPERTS,
    GROUPED,
    HEADS,
    JOINED_EXPERTS,
    QKV,
    ROTATED_HEADS,
    ROTATED_ROWS,
    SAME,
    STACKED,
    SWAPPED,
    TRANSPOSED,
    VOCABULARY,
    Row,
    Table,
    Transform,
)

LAYER = "model.layers.{layer}"
MTP_COUNT = "num_nextn_predict_layers"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``.

    Attributes:
        model_type: The entry of this name in ``config.json``.
        architecture: Class of ``transformers`` that loads the model.
        table: Rows by parameter name; layer parameters without ``layers.N.``.
        keys: Entries that correspond to settings.
        fixed: Entries with their only supported value, which is also the default.
        stated: Entries that other programs write, with the only value that is true of the family.
        implied: Settings of every model of the family, which no entry states.
        rules: Entries that select layers, and those for training only.
        ignored: Entries that follow from others.
        copies: Names of tensors of each layer for multi-token prediction that repeat a parameter,
            and the parameter.
        rope_base: Base of the rotary embedding if no entry states it.
        rope: The rotation if no entry describes it.
        rotary_fraction: Rotated share of a head if no entry states it; ``None`` if always whole.
    """

    model_type: str
    architecture: str
    table: Table
    keys: tuple[Key, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    stated: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[LayerRule, ...] = ()
    ignored: tuple[str, ...] = ()
    copies: Mapping[str, str] = field(default_factory=dict)
    rope_base: float = 10000.0
    rope: Mapping[str, Any] = field(default_factory=dict)
    rotary_fraction: float | None = None


def _row(*theirs: str, transform: Transform = SAME, aliases: tuple[Row, ...] = ()) -> Row:
    return Row(theirs=theirs, transform=transform, aliases=aliases)


# ---- weights -------------------------------------------------------------------------------------

_ENDS = {
    "embedding": _row("model.embed_tokens.weight", transform=VOCABULARY),
    "final_norm": _row("model.norm.weight"),
    "head": _row("lm_head.weight", transform=VOCABULARY),
}
_ATTENTION = {
    "attention.norm": _row(f"{LAYER}.input_layernorm.weight"),
    "attention.qkv": _row(
        *(f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkv"), transform=QKV
    ),
    "attention.qkv_bias": _row(
        *(f"{LAYER}.self_attn.{name}_proj.bias" for name in "qkv"), transform=QKV
    ),
    "attention.output": _row(f"{LAYER}.self_attn.o_proj.weight"),
    "attention.output_bias": _row(f"{LAYER}.self_attn.o_proj.bias"),
}
_QK_NORM = {
    f"attention.{name}": _row(f"{LAYER}.self_attn.{name}.weight") for name in ("q_norm", "k_norm")
}


def _mlp(ours: str, theirs: str) -> Table:
    return {
        f"{ours}.gate_up": _row(
            f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight", transform=STACKED
        ),
        f"{ours}.down": _row(f"{theirs}.down_proj.weight"),
    }


_DENSE = {
    "mlp.norm": _row(f"{LAYER}.post_attention_layernorm.weight"),
    **_mlp("mlp", f"{LAYER}.mlp"),
}


def _experts(block: str, gate: str, up: str, down: str) -> Table:
    """Return the rows of experts that are one tensor each; joined ones are accepted too."""
    joined = f"{LAYER}.mlp"
    return {
        "moe.norm": _row(f"{LAYER}.post_attention_layernorm.weight"),
        "moe.router": _row(
            f"{LAYER}.{block}.gate.weight", aliases=(_row(f"{joined}.gate.weight"),)
        ),
        "moe.experts.fc1": _row(
            f"{LAYER}.{block}.experts.{{expert}}.{gate}.weight",
            f"{LAYER}.{block}.experts.{{expert}}.{up}.weight",
            transform=GATED_EXPERTS,
            aliases=(_row(f"{joined}.experts.gate_up_proj", transform=JOINED_EXPERTS),),
        ),
        "moe.experts.fc2": _row(
            f"{LAYER}.{block}.experts.{{expert}}.{down}.weight",
            transform=STACKED,
            aliases=(_row(f"{joined}.experts.down_proj"),),
        ),
    }


_LLAMA = {**_ENDS, **_ATTENTION, **_DENSE}
_MIXTRAL = {**_ENDS, **_ATTENTION, **_experts("block_sparse_moe", "w1", "w3", "w2")}
_QWEN3 = {**_LLAMA, **_QK_NORM}
_QWEN3_MOE = {**_QWEN3, **_experts("mlp", "gate_proj", "up_proj", "down_proj")}
_QWEN2_MOE = {
    **_QWEN3_MOE,
    **_mlp("moe.shared", f"{LAYER}.mlp.shared_expert"),
    "moe.shared_gate": _row(f"{LAYER}.mlp.shared_expert_gate.weight"),
}
# Layers for multi-token prediction. Their projection has the embedding's columns first.
_MTP = {
    "mtp.hidden_norm": _row(f"{LAYER}.hnorm.weight"),
    "mtp.embedding_norm": _row(f"{LAYER}.enorm.weight"),
    "mtp.projection": _row(f"{LAYER}.eh_proj.weight", transform=SWAPPED),
    "mtp.final_norm": _row(f"{LAYER}.shared_head.norm.weight"),
}
_MTP_COPIES = {
    f"{LAYER}.embed_tokens.weight": "embedding",
    f"{LAYER}.shared_head.head.weight": "head",
}
_GLM4_MOE = {
    **_QWEN3_MOE,
    **_MTP,
    **_mlp("moe.shared", f"{LAYER}.mlp.shared_experts"),
    "moe.expert_bias": _row(f"{LAYER}.mlp.gate.e_score_correction_bias"),
}
_LATENT_ATTENTION = {
    "attention.norm": _row(f"{LAYER}.input_layernorm.weight"),
    "attention.q": _row(f"{LAYER}.self_attn.q_proj.weight", transform=ROTATED_HEADS),
    "attention.q_down": _row(f"{LAYER}.self_attn.q_a_proj.weight"),
    "attention.q_latent_norm": _row(f"{LAYER}.self_attn.q_a_layernorm.weight"),
    "attention.q_up": _row(f"{LAYER}.self_attn.q_b_proj.weight", transform=ROTATED_HEADS),
    "attention.kv_down": _row(
        f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight", transform=ROTATED_ROWS
    ),
    "attention.kv_latent_norm": _row(f"{LAYER}.self_attn.kv_a_layernorm.weight"),
    "attention.kv_up": _row(f"{LAYER}.self_attn.kv_b_proj.weight", transform=HEADS),
    "attention.output": _row(f"{LAYER}.self_attn.o_proj.weight"),
}
_OLMO2 = {
    **_LLAMA,
    **{
        f"attention.{name}": _row(f"{LAYER}.self_attn.{name}.weight", transform=GROUPED)
        for name in ("q_norm", "k_norm")
    },
    "attention.norm": _row(f"{LAYER}.post_attention_layernorm.weight"),
    "mlp.norm": _row(f"{LAYER}.post_feedforward_layernorm.weight"),
}
_GPT_OSS = {
    **_ENDS,
    **_ATTENTION,
    "attention.sinks": _row(f"{LAYER}.self_attn.sinks", transform=GROUPED),
    "moe.norm": _row(f"{LAYER}.post_attention_layernorm.weight"),
    "moe.router": _row(f"{LAYER}.mlp.router.weight"),
    "moe.router_bias": _row(f"{LAYER}.mlp.router.bias"),
    "moe.experts.fc1": _row(f"{LAYER}.mlp.experts.gate_up_proj", transform=ALTERNATING),
    "moe.experts.fc1_bias": _row(
        f"{LAYER}.mlp.experts.gate_up_proj_bias", transform=ALTERNATING_BIAS
    ),
    "moe.experts.fc2": _row(f"{LAYER}.mlp.experts.down_proj", transform=TRANSPOSED),
    "moe.experts.fc2_bias": _row(f"{LAYER}.mlp.experts.down_proj_bias"),
}
_DEEPSEEK = {**_GLM4_MOE, **_LATENT_ATTENTION}

# ---- config.json ---------------------------------------------------------------------------------


def _sizes(
    *, kv_heads: int | None = None, head_dim: int | None = None, norm_eps: float = 1e-6
) -> tuple[Key, ...]:
    """Return the entries of all families; the arguments are the defaults of ``transformers``."""
    return (
        Key(theirs=("hidden_size",), ours=("model.hidden_size",)),
        Key(theirs=("num_hidden_layers",), ours=("model.num_layers",)),
        Key(theirs=("num_attention_heads",), ours=("model.num_heads",)),
        Key(
            theirs=("num_key_value_heads",),
            ours=("model.num_kv_heads",),
            default=kv_heads,
            empty=None,
        ),
        Key(theirs=("head_dim",), ours=("model.head_dim",), default=head_dim, empty=None),
        Key(theirs=("vocab_size",), ours=("model.vocab_size",)),
        Key(theirs=("max_position_embeddings",), ours=("model.seq_length",)),
        Key(
            theirs=("tie_word_embeddings",),
            ours=("model.tie_embeddings",),
            kind=bool,
            default=False,
        ),
        Key(theirs=("rms_norm_eps",), ours=("model.norm_eps",), kind=float, default=norm_eps),
        Key(theirs=("initializer_range",), ours=("model.init_std",), kind=float, default=0.02),
    )


_FFN = Key(theirs=("intermediate_size",), ours=("model.ffn_hidden_size",))
_TOP_K = Key(theirs=("num_experts_per_tok",), ours=("moe.top_k",))
_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}
_QK_NORM_STATED = {"use_qk_norm": True}
_BIAS = Key(
    theirs=("attention_bias",),
    ours=("model.qkv_bias", "model.output_bias"),
    kind=bool,
    default=False,
)

_MIXTRAL_KEYS = (
    Key(theirs=("intermediate_size",), ours=("moe.ffn_hidden_size", "model.ffn_hidden_size")),
    Key(theirs=("num_local_experts", "num_experts"), ours=("moe.num_experts",)),
    _TOP_K,
)
_QWEN3_MOE_KEYS = (
    _FFN,
    Key(theirs=("num_experts", "num_local_experts"), ours=("moe.num_experts",)),
    Key(theirs=("moe_intermediate_size",), ours=("moe.ffn_hidden_size",)),
    Key(theirs=("norm_topk_prob",), ours=("moe.normalize",), kind=bool, default=False),
    _TOP_K,
)

_QKV_BIAS = Key(theirs=("qkv_bias",), ours=("model.qkv_bias",), kind=bool, default=True)
_SHARED_FFN = Key(theirs=("shared_expert_intermediate_size",), ours=("moe.shared_ffn_hidden_size",))
_DEEPSEEK_MOE_KEYS = (
    _FFN,
    _TOP_K,
    Key(theirs=("n_routed_experts",), ours=("moe.num_experts",)),
    Key(theirs=("moe_intermediate_size",), ours=("moe.ffn_hidden_size",)),
)


def _scaling(default: float) -> Key:
    return Key(
        theirs=("routed_scaling_factor",),
        ours=("moe.scaling_factor",),
        kind=float,
        default=default,
    )


def _groups(number: int, best: int) -> tuple[Key, ...]:
    return (
        Key(
            theirs=("norm_topk_prob",),
            ours=("moe.normalize",),
            kind=bool,
            default=True,
            empty=False,
        ),
        Key(theirs=("n_group",), ours=("moe.num_groups",), default=number, empty=1),
        Key(theirs=("topk_group",), ours=("moe.groups_top_k",), default=best, empty=1),
    )


_MTP_KEY = Key(theirs=(MTP_COUNT,), ours=("model.num_mtp_layers",), default=0, least=0)


def _mla(kv_heads: int) -> tuple[Key, ...]:
    return (
        *(key for key in _sizes(kv_heads=kv_heads) if key.theirs != ("head_dim",)),
        Key(theirs=("q_lora_rank",), ours=("model.mla.q_rank",), default=1536, empty=0, null=0),
        Key(theirs=("kv_lora_rank",), ours=("model.mla.kv_rank",)),
        Key(theirs=("qk_nope_head_dim",), ours=("model.mla.nope_head_dim",)),
        Key(theirs=("qk_rope_head_dim",), ours=("model.mla.rope_head_dim",)),
        Key(theirs=("v_head_dim",), ours=("model.mla.v_head_dim",)),
    )


# The first follows from the widths above; the others are for training or serving.
_DEEPSEEK_IGNORED = ("qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size")
# Fine-tuning leaves biases of experts and layers for multi-token prediction as they are.
_DEEPSEEK_V3 = {
    "moe.score_function": "sigmoid",
    "moe.expert_bias": True,
    "moe.expert_bias_rate": 0.0,
    "model.mtp_loss_coef": 0.0,
}
_GLM4_KEYS = (Key(theirs=("attention_bias",), ours=("model.qkv_bias",), kind=bool, default=False),)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            table=_LLAMA,
            keys=(*_sizes(), _FFN, _BIAS),
            fixed={**_FIXED, "mlp_bias": False, "pretraining_tp": 1},
            rules=(PaddingRow(),),
        ),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            table=_LLAMA,
            keys=(*_sizes(kv_heads=8), _FFN),
            fixed={**_FIXED, **_NO_BIAS},
            rules=(Windows(default=4096), PaddingRow()),
        ),
        Family(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            table=_MIXTRAL,
            keys=(*_sizes(kv_heads=8, norm_eps=1e-5), *_MIXTRAL_KEYS),
            fixed={**_FIXED, **_NO_BIAS, "router_jitter_noise": 0.0},
            rules=(Windows(), RouterLoss(), PaddingRow()),
            rope_base=1e6,
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            table=_QWEN3,
            keys=(*_sizes(kv_heads=32, head_dim=128), _FFN, _BIAS),
            fixed=_FIXED,
            stated=_QK_NORM_STATED,
            implied={"model.qk_norm": "head"},
            rules=(Windows(default=4096, switch=True, by_layer=True), PaddingRow()),
        ),
        Family(
            model_type="qwen2",
            architecture="Qwen2ForCausalLM",
            table=_LLAMA,
            keys=(*_sizes(kv_heads=32), _FFN),
            fixed=_FIXED,
            implied={"model.qkv_bias": True},
            rules=(Windows(default=4096, switch=True, by_layer=True), PaddingRow()),
        ),
        Family(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            table=_QWEN3_MOE,
            keys=(*_sizes(kv_heads=4), *_QWEN3_MOE_KEYS, _BIAS),
            fixed=_FIXED,
            stated=_QK_NORM_STATED,
            implied={"model.qk_norm": "head"},
            rules=(SparseStep(), Windows(default=4096, switch=True), RouterLoss(), PaddingRow()),
        ),
        Family(
            model_type="qwen2_moe",
            architecture="Qwen2MoeForCausalLM",
            table=_QWEN2_MOE,
            keys=(*_sizes(kv_heads=16), *_QWEN3_MOE_KEYS, _QKV_BIAS, _SHARED_FFN),
            fixed=_FIXED,
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
            architecture="Glm4MoeForCausalLM",
            table=_GLM4_MOE,
            keys=(
                *_sizes(kv_heads=8, norm_eps=1e-5),
                *_DEEPSEEK_MOE_KEYS,
                _scaling(1.0),
                *_groups(1, 1),
                *_GLM4_KEYS,
                _MTP_KEY,
            ),
            fixed=_FIXED,
            implied=_DEEPSEEK_V3,
            rules=(FirstDense(default=1), SharedExperts(default=1), HeadNorms(), PaddingRow()),
            copies=_MTP_COPIES,
            rotary_fraction=0.5,
        ),
        Family(
            model_type="olmo2",
            architecture="Olmo2ForCausalLM",
            table=_OLMO2,
            keys=(*_sizes(norm_eps=1e-5), _FFN, _BIAS),
            fixed=_FIXED,
            stated=_QK_NORM_STATED,
            implied={
                "model.norm_position": "after",
                "model.qk_norm": "full",
            },
            rules=(PaddingRow(default=1),),
        ),
        Family(
            model_type="gpt_oss",
            architecture="GptOssForCausalLM",
            table=_GPT_OSS,
            keys=(
                *_sizes(kv_heads=8, head_dim=64, norm_eps=1e-5),
                *_MIXTRAL_KEYS,
                replace(_BIAS, default=True),
            ),
            fixed={**_FIXED, "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
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
            architecture="DeepseekV3ForCausalLM",
            table=_DEEPSEEK,
            keys=(*_mla(128), *_DEEPSEEK_MOE_KEYS, _scaling(2.5), *_groups(8, 4), _MTP_KEY),
            # vLLM reads the router's method and score function.
            fixed={
                **_FIXED,
                **_NO_BIAS,
                "topk_method": "noaux_tc",
                "scoring_func": "sigmoid",
                "rope_interleave": True,
                "pretraining_tp": 1,
            },
            implied=_DEEPSEEK_V3,
            rules=(FirstDense(default=3), SharedExperts(default=1), RotatedWidth(), PaddingRow()),
            ignored=_DEEPSEEK_IGNORED,
            copies=_MTP_COPIES,
        ),
        Family(
            model_type="deepseek_v2",
            architecture="DeepseekV2ForCausalLM",
            table=_DEEPSEEK,
            keys=(*_mla(32), *_DEEPSEEK_MOE_KEYS, _scaling(1.0)),
            fixed={
                **_FIXED,
                **_NO_BIAS,
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
            ignored=_DEEPSEEK_IGNORED,
        ),
    )
}
