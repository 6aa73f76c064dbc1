"""Model families: names of tensors and configuration entries, for import and export.

One `Family` describes a ``model_type`` of ``transformers`` completely. Its `Table` has the tensors,
its keys the entries of ``config.json``; `import_hf` and `export_hf` read both.

Shapes: H hidden, F inner width of the MLP or of an expert, E experts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from megacore.models.hf.keys import Key, LayerRule
from megacore.models.hf.layer_rules import SparseStep, Windows
from megacore.models.hf.rows import (
    GATED_EXPERTS,
    JOINED_EXPERTS,
    QKV,
    SAME,
    STACKED,
    VOCABULARY,
    Row,
    Table,
    Transform,
)

LAYER = "model.layers.{layer}"


@dataclass(frozen=True, kw_only=True)
class Family:
    """One ``model_type``.

    Attributes:
        model_type: The entry of this name in ``config.json``.
        architecture: Class of ``transformers`` that loads the model.
        table: Rows by parameter name; layer parameters without ``layers.N.``.
        keys: Entries that correspond to settings.
        fixed: Entries with their only supported value, which is also the default.
        implied: Settings of every model of the family, which no entry states.
        rules: Entries that select layers.
        rope_base: Base of the rotary embedding if no entry states it.
    """

    model_type: str
    architecture: str
    table: Table
    keys: tuple[Key, ...]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    implied: Mapping[str, Any] = field(default_factory=dict)
    rules: tuple[LayerRule, ...] = ()
    rope_base: float = 10000.0


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
    "attention.output": _row(f"{LAYER}.self_attn.o_proj.weight"),
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

# ---- config.json ---------------------------------------------------------------------------------


def _sizes(*, head_dim: int | None = None, norm_eps: float = 1e-6) -> tuple[Key, ...]:
    """Return the entries of all families; the arguments are the defaults of ``transformers``."""
    return (
        Key(theirs=("hidden_size",), ours=("model.hidden_size",)),
        Key(theirs=("num_hidden_layers",), ours=("model.num_layers",)),
        Key(theirs=("num_attention_heads",), ours=("model.num_heads",)),
        Key(theirs=("num_key_value_heads",), ours=("model.num_kv_heads",), default=None),
        Key(theirs=("head_dim",), ours=("model.head_dim",), default=head_dim),
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
_AUX_LOSS = Key(
    theirs=("router_aux_loss_coef",), ours=("moe.aux_loss_coef",), kind=float, default=0.0
)
_FIXED: Mapping[str, Any] = {"hidden_act": "silu", "attention_dropout": 0.0}
_NO_BIAS = {"attention_bias": False, "mlp_bias": False}

_MIXTRAL_KEYS = (
    Key(theirs=("intermediate_size",), ours=("moe.ffn_hidden_size", "model.ffn_hidden_size")),
    Key(theirs=("num_local_experts", "num_experts"), ours=("moe.num_experts",)),
    _TOP_K,
    _AUX_LOSS,
)
_QWEN3_MOE_KEYS = (
    _FFN,
    Key(theirs=("num_experts", "num_local_experts"), ours=("moe.num_experts",)),
    Key(theirs=("moe_intermediate_size",), ours=("moe.ffn_hidden_size",)),
    Key(theirs=("norm_topk_prob",), ours=("moe.normalize",), kind=bool, default=False),
    _TOP_K,
    _AUX_LOSS,
)

FAMILIES: Mapping[str, Family] = {
    family.model_type: family
    for family in (
        Family(
            model_type="llama",
            architecture="LlamaForCausalLM",
            table=_LLAMA,
            keys=(*_sizes(), _FFN),
            fixed={**_FIXED, **_NO_BIAS, "pretraining_tp": 1},
        ),
        Family(
            model_type="mistral",
            architecture="MistralForCausalLM",
            table=_LLAMA,
            keys=(*_sizes(), _FFN),
            fixed={**_FIXED, **_NO_BIAS},
            rules=(Windows(default=4096),),
        ),
        Family(
            model_type="mixtral",
            architecture="MixtralForCausalLM",
            table=_MIXTRAL,
            keys=(*_sizes(norm_eps=1e-5), *_MIXTRAL_KEYS),
            fixed={**_FIXED, **_NO_BIAS, "router_jitter_noise": 0.0},
            rules=(Windows(),),
            rope_base=1e6,
        ),
        Family(
            model_type="qwen3",
            architecture="Qwen3ForCausalLM",
            table=_QWEN3,
            keys=(*_sizes(head_dim=128), _FFN),
            fixed={**_FIXED, "attention_bias": False},
            implied={"model.qk_norm": True},
            rules=(Windows(switch=True),),
        ),
        Family(
            model_type="qwen3_moe",
            architecture="Qwen3MoeForCausalLM",
            table=_QWEN3_MOE,
            keys=(*_sizes(head_dim=128), *_QWEN3_MOE_KEYS),
            fixed={**_FIXED, "attention_bias": False},
            implied={"model.qk_norm": True},
            rules=(SparseStep(), Windows(switch=True)),
        ),
    )
}
