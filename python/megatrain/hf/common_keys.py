"""Entries of ``config.json`` that several families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatrain.hf.keys import Key

MTP_COUNT = "num_nextn_predict_layers"


def sizes(
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    norm_eps: float = 1e-6,
    tied: bool = False,
    init_std: float = 0.02,
    norm_name: str = "rms_norm_eps",
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
            default=tied,
        ),
        Key(theirs=(norm_name,), ours=("model.norm_eps",), kind=float, default=norm_eps),
        Key(theirs=("initializer_range",), ours=("model.init_std",), kind=float, default=init_std),
    )


FFN = Key(theirs=("intermediate_size",), ours=("model.ffn_hidden_size",))
TOP_K = Key(theirs=("num_experts_per_tok",), ours=("moe.top_k",))
FIXED: Mapping[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0}
NO_BIAS = {"attention_bias": False, "mlp_bias": False}
QK_NORM_STATED = {"use_qk_norm": True}
BIAS = Key(
    theirs=("attention_bias",),
    ours=("model.qkv_bias", "model.output_bias"),
    kind=bool,
    default=False,
)

MIXTRAL_KEYS = (
    Key(theirs=("intermediate_size",), ours=("moe.ffn_hidden_size", "model.ffn_hidden_size")),
    Key(theirs=("num_local_experts", "num_experts"), ours=("moe.num_experts",)),
    TOP_K,
)
QWEN3_MOE_KEYS = (
    FFN,
    Key(theirs=("num_experts", "num_local_experts"), ours=("moe.num_experts",)),
    Key(theirs=("moe_intermediate_size",), ours=("moe.ffn_hidden_size",)),
    Key(theirs=("norm_topk_prob",), ours=("moe.normalize",), kind=bool, default=False),
    TOP_K,
)

QKV_BIAS = Key(theirs=("qkv_bias",), ours=("model.qkv_bias",), kind=bool, default=True)
SHARED_FFN = Key(theirs=("shared_expert_intermediate_size",), ours=("moe.shared_ffn_hidden_size",))
DEEPSEEK_MOE_KEYS = (
    FFN,
    TOP_K,
    Key(theirs=("n_routed_experts",), ours=("moe.num_experts",)),
    Key(theirs=("moe_intermediate_size",), ours=("moe.ffn_hidden_size",)),
)


def scaling(default: float, name: str = "routed_scaling_factor") -> Key:
    """Return the entry of the factor on the weights of experts."""
    return Key(
        theirs=(name,),
        ours=("moe.scaling_factor",),
        kind=float,
        default=default,
    )


def groups(number: int, best: int, *, normalize: bool = True) -> tuple[Key, ...]:
    """Return the entries of groups of experts and of the normalization of their weights."""
    return (
        Key(
            theirs=("norm_topk_prob",),
            ours=("moe.normalize",),
            kind=bool,
            default=normalize,
            empty=False,
        ),
        Key(theirs=("n_group",), ours=("moe.num_groups",), default=number, empty=1),
        Key(theirs=("topk_group",), ours=("moe.groups_top_k",), default=best, empty=1),
    )


MTP_KEY = Key(theirs=(MTP_COUNT,), ours=("model.num_mtp_layers",), default=0, least=0)


def mla(kv_heads: int, *, q_rank: int = 1536, norm_eps: float = 1e-6) -> tuple[Key, ...]:
    """Return the entries of all families with latent attention, as `sizes`."""
    all_sizes = sizes(kv_heads=kv_heads, norm_eps=norm_eps)
    return (
        *(key for key in all_sizes if key.theirs != ("head_dim",)),
        Key(theirs=("q_lora_rank",), ours=("model.mla.q_rank",), default=q_rank, empty=0, null=0),
        Key(theirs=("kv_lora_rank",), ours=("model.mla.kv_rank",)),
        Key(theirs=("qk_nope_head_dim",), ours=("model.mla.nope_head_dim",)),
        Key(theirs=("qk_rope_head_dim",), ours=("model.mla.rope_head_dim",)),
        Key(theirs=("v_head_dim",), ours=("model.mla.v_head_dim",)),
    )


# The first follows from the widths above; the others are for training or serving.
DEEPSEEK_IGNORED = ("qk_head_dim", "aux_loss_alpha", "seq_aux", "ep_size")
# Fine-tuning leaves biases of experts and layers for multi-token prediction as they are.
DEEPSEEK_V3 = {
    "moe.score_function": "sigmoid",
    "moe.expert_bias": True,
    "moe.expert_bias_rate": 0.0,
    "model.mtp_loss_coef": 0.0,
}
GLM4_KEYS = (Key(theirs=("attention_bias",), ours=("model.qkv_bias",), kind=bool, default=False),)


def factor(theirs: str, ours: str, default: float) -> Key:
    """Return the entry of a factor."""
    return Key(theirs=(theirs,), ours=(ours,), kind=float, default=default)


def limit(theirs: str, ours: str, default: float | None) -> Key:
    """Return the entry of a limit, which is off if it is empty."""
    return Key(theirs=(theirs,), ours=(ours,), kind=float, default=default, empty=None)


GRANITE_FACTORS = (
    factor("embedding_multiplier", "model.embedding_factor", 1.0),
    factor("residual_multiplier", "model.residual_factor", 1.0),
    factor("attention_multiplier", "model.attention_scale", 1.0),
)


def indexer(heads: int) -> tuple[Key, ...]:
    """Return the entries of the indexer of sparse attention."""
    return (
        Key(theirs=("index_n_heads",), ours=("model.mla.index_heads",), default=heads),
        Key(theirs=("index_head_dim",), ours=("model.mla.index_head_dim",), default=128),
        Key(theirs=("index_topk",), ours=("model.mla.index_top_k",), default=2048),
    )
