"""Weight tables of families: names of Hugging Face tensors by parameter.

Parameters of layers are named without ``layers.N.``. Shapes: H hidden, F inner width of the MLP or
of an expert, E experts.
"""

from __future__ import annotations

from dataclasses import replace

from megatrain.hf.rows import (
    ALTERNATING,
    ALTERNATING_BIAS,
    FUSED_QKV,
    FUSED_QKV_INPUTS_FIRST,
    GATED_EXPERTS,
    GROUPED,
    HEADS,
    INPUTS_FIRST,
    JOINED,
    JOINED_COLUMNS,
    JOINED_EXPERTS,
    ONE_ROW,
    PAIRED_QKV,
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


def row(*theirs: str, transform: Transform = SAME, aliases: tuple[Row, ...] = ()) -> Row:
    """Make a row of a table."""
    return Row(theirs=theirs, transform=transform, aliases=aliases)


ENDS = {
    "embedding": row("model.embed_tokens.weight", transform=VOCABULARY),
    "final_norm": row("model.norm.weight"),
    "head": row("lm_head.weight", transform=VOCABULARY),
}
ATTENTION = {
    "attention.norm": row(f"{LAYER}.input_layernorm.weight"),
    "attention.qkv": row(
        *(f"{LAYER}.self_attn.{name}_proj.weight" for name in "qkv"), transform=QKV
    ),
    "attention.qkv_bias": row(
        *(f"{LAYER}.self_attn.{name}_proj.bias" for name in "qkv"), transform=QKV
    ),
    "attention.output": row(f"{LAYER}.self_attn.o_proj.weight"),
    "attention.output_bias": row(f"{LAYER}.self_attn.o_proj.bias"),
}
QK_NORM = {
    f"attention.{name}": row(f"{LAYER}.self_attn.{name}.weight") for name in ("q_norm", "k_norm")
}


def mlp(ours: str, theirs: str) -> Table:
    """Return the rows of a gated MLP."""
    return {
        f"{ours}.gate_up": row(
            f"{theirs}.gate_proj.weight", f"{theirs}.up_proj.weight", transform=STACKED
        ),
        f"{ours}.down": row(f"{theirs}.down_proj.weight"),
    }


DENSE = {
    "mlp.norm": row(f"{LAYER}.post_attention_layernorm.weight"),
    **mlp("mlp", f"{LAYER}.mlp"),
}


def experts(block: str, gate: str, up: str, down: str) -> Table:
    """Return the rows of experts that are one tensor each; joined ones are accepted too."""
    joined = f"{LAYER}.mlp"
    return {
        "moe.norm": row(f"{LAYER}.post_attention_layernorm.weight"),
        "moe.router": row(f"{LAYER}.{block}.gate.weight", aliases=(row(f"{joined}.gate.weight"),)),
        "moe.experts.fc1": row(
            f"{LAYER}.{block}.experts.{{expert}}.{gate}.weight",
            f"{LAYER}.{block}.experts.{{expert}}.{up}.weight",
            transform=GATED_EXPERTS,
            aliases=(row(f"{joined}.experts.gate_up_proj", transform=JOINED_EXPERTS),),
        ),
        "moe.experts.fc2": row(
            f"{LAYER}.{block}.experts.{{expert}}.{down}.weight",
            transform=STACKED,
            aliases=(row(f"{joined}.experts.down_proj"),),
        ),
    }


LLAMA = {**ENDS, **ATTENTION, **DENSE}
MIXTRAL = {**ENDS, **ATTENTION, **experts("block_sparse_moe", "w1", "w3", "w2")}
QWEN3 = {**LLAMA, **QK_NORM}
QWEN3_MOE = {**QWEN3, **experts("mlp", "gate_proj", "up_proj", "down_proj")}
QWEN2_MOE = {
    **QWEN3_MOE,
    **mlp("moe.shared", f"{LAYER}.mlp.shared_expert"),
    "moe.shared_gate": row(f"{LAYER}.mlp.shared_expert_gate.weight"),
}
# Layers for multi-token prediction. Their projection has the embedding's columns first.
MTP = {
    "mtp.hidden_norm": row(f"{LAYER}.hnorm.weight"),
    "mtp.embedding_norm": row(f"{LAYER}.enorm.weight"),
    "mtp.projection": row(f"{LAYER}.eh_proj.weight", transform=SWAPPED),
    "mtp.final_norm": row(f"{LAYER}.shared_head.norm.weight"),
}
MTP_COPIES = {
    f"{LAYER}.embed_tokens.weight": "embedding",
    f"{LAYER}.shared_head.head.weight": "head",
}
GLM4_MOE = {
    **QWEN3_MOE,
    **MTP,
    **mlp("moe.shared", f"{LAYER}.mlp.shared_experts"),
    "moe.expert_bias": row(f"{LAYER}.mlp.gate.e_score_correction_bias"),
}
LATENT_ATTENTION = {
    "attention.norm": row(f"{LAYER}.input_layernorm.weight"),
    "attention.q": row(f"{LAYER}.self_attn.q_proj.weight", transform=ROTATED_HEADS),
    "attention.q_down": row(f"{LAYER}.self_attn.q_a_proj.weight"),
    "attention.q_latent_norm": row(f"{LAYER}.self_attn.q_a_layernorm.weight"),
    "attention.q_up": row(f"{LAYER}.self_attn.q_b_proj.weight", transform=ROTATED_HEADS),
    "attention.kv_down": row(
        f"{LAYER}.self_attn.kv_a_proj_with_mqa.weight", transform=ROTATED_ROWS
    ),
    "attention.kv_latent_norm": row(f"{LAYER}.self_attn.kv_a_layernorm.weight"),
    "attention.kv_up": row(f"{LAYER}.self_attn.kv_b_proj.weight", transform=HEADS),
    "attention.output": row(f"{LAYER}.self_attn.o_proj.weight"),
}
OLMO2 = {
    **LLAMA,
    **{
        f"attention.{name}": row(f"{LAYER}.self_attn.{name}.weight", transform=GROUPED)
        for name in ("q_norm", "k_norm")
    },
    "attention.norm": row(f"{LAYER}.post_attention_layernorm.weight"),
    "mlp.norm": row(f"{LAYER}.post_feedforward_layernorm.weight"),
}
GPT_OSS = {
    **ENDS,
    **ATTENTION,
    "attention.sinks": row(f"{LAYER}.self_attn.sinks", transform=GROUPED),
    "moe.norm": row(f"{LAYER}.post_attention_layernorm.weight"),
    "moe.router": row(f"{LAYER}.mlp.router.weight"),
    "moe.router_bias": row(f"{LAYER}.mlp.router.bias"),
    "moe.experts.fc1": row(f"{LAYER}.mlp.experts.gate_up_proj", transform=ALTERNATING),
    "moe.experts.fc1_bias": row(
        f"{LAYER}.mlp.experts.gate_up_proj_bias", transform=ALTERNATING_BIAS
    ),
    "moe.experts.fc2": row(f"{LAYER}.mlp.experts.down_proj", transform=TRANSPOSED),
    "moe.experts.fc2_bias": row(f"{LAYER}.mlp.experts.down_proj_bias"),
}
DEEPSEEK = {**GLM4_MOE, **LATENT_ATTENTION}

# Layers without multi-token prediction, with biases on the choice of experts.
DOTS1 = {name: each for name, each in GLM4_MOE.items() if not name.startswith("mtp.")}
MINIMAX_M2 = {
    **MIXTRAL,
    **{name: OLMO2[name] for name in ("attention.q_norm", "attention.k_norm")},
    "moe.expert_bias": row(f"{LAYER}.block_sparse_moe.e_score_correction_bias"),
}
HY_V3 = {
    **QWEN3_MOE,
    **mlp("moe.shared", f"{LAYER}.mlp.shared_mlp"),
    "moe.router": row(f"{LAYER}.mlp.router.gate.weight"),
    "moe.expert_bias": row(f"{LAYER}.mlp.expert_bias"),
}
BAILING_MOE_V2 = {
    **DOTS1,
    "embedding": row("model.word_embeddings.weight", transform=VOCABULARY),
    "attention.qkv": row(f"{LAYER}.attention.query_key_value.weight", transform=FUSED_QKV),
    "attention.qkv_bias": row(f"{LAYER}.attention.query_key_value.bias", transform=FUSED_QKV),
    "attention.q_norm": row(f"{LAYER}.attention.query_layernorm.weight"),
    "attention.k_norm": row(f"{LAYER}.attention.key_layernorm.weight"),
    "attention.output": row(f"{LAYER}.attention.dense.weight"),
    "attention.output_bias": row(f"{LAYER}.attention.dense.bias"),
    "moe.expert_bias": row(f"{LAYER}.mlp.gate.expert_bias"),
}
PHI3 = {
    **LLAMA,
    "attention.qkv": row(f"{LAYER}.self_attn.qkv_proj.weight", transform=FUSED_QKV),
    "mlp.gate_up": row(f"{LAYER}.mlp.gate_up_proj.weight", transform=JOINED),
}
_PAIRED = {
    name: replace(LLAMA[name], transform=PAIRED_QKV)
    for name in ("attention.qkv", "attention.qkv_bias")
}
ERNIE4_5 = {**LLAMA, **_PAIRED}
ERNIE4_5_MOE = {
    **DOTS1,
    **_PAIRED,
    "moe.expert_bias": row(f"{LAYER}.mlp.moe_statics.e_score_correction_bias", transform=ONE_ROW),
}

# ---- families with further options ---------------------------------------------------------------


def _norms(attention: str, attention_output: str, mlp: str, mlp_output: str) -> Table:
    """Return the rows of norms before and after both blocks."""
    names = {"attention.norm": attention, "attention.output_norm": attention_output}
    names |= {"mlp.norm": mlp, "mlp.output_norm": mlp_output}
    return {ours: row(f"{LAYER}.{theirs}.weight") for ours, theirs in names.items()}


GEMMA = LLAMA
GEMMA2 = {
    **QWEN3,
    **_norms(
        "input_layernorm",
        "post_attention_layernorm",
        "pre_feedforward_layernorm",
        "post_feedforward_layernorm",
    ),
}
EXAONE4 = {
    **QWEN3,
    "attention.norm": OLMO2["attention.norm"],
    "mlp.norm": OLMO2["mlp.norm"],
}
_GLM = {**ERNIE4_5, "mlp.gate_up": PHI3["mlp.gate_up"]}
GLM = _GLM
GLM4 = {
    **_GLM,
    **_norms(
        "input_layernorm",
        "post_self_attn_layernorm",
        "post_attention_layernorm",
        "post_mlp_layernorm",
    ),
}
_JOINED_SHARED = {
    "gate_up": row(f"{LAYER}.shared_mlp.input_linear.weight", transform=JOINED),
    "down": row(f"{LAYER}.shared_mlp.output_linear.weight"),
}
GRANITEMOE = {
    **LLAMA,
    "moe.norm": MIXTRAL["moe.norm"],
    "moe.router": row(f"{LAYER}.block_sparse_moe.router.layer.weight"),
    "moe.experts.fc1": row(
        f"{LAYER}.block_sparse_moe.input_linear.weight", transform=JOINED_EXPERTS
    ),
    "moe.experts.fc2": row(f"{LAYER}.block_sparse_moe.output_linear.weight"),
    **{f"moe.shared.{name}": each for name, each in _JOINED_SHARED.items()},
}
GRANITEMOEHYBRID = {
    **GRANITEMOE,
    **{f"mlp.{name}": each for name, each in _JOINED_SHARED.items()},
}
HUNYUAN = {
    **QWEN3_MOE,
    "attention.q_norm": row(f"{LAYER}.self_attn.query_layernorm.weight"),
    "attention.k_norm": row(f"{LAYER}.self_attn.key_layernorm.weight"),
    **mlp("moe.shared", f"{LAYER}.mlp.shared_mlp"),
    "moe.router": row(f"{LAYER}.mlp.gate.wg.weight"),
}
OLMOE = {
    **QWEN3_MOE,
    **{name: OLMO2[name] for name in ("attention.q_norm", "attention.k_norm")},
}
LLAMA4 = {
    **ERNIE4_5,
    **mlp("mlp", f"{LAYER}.feed_forward"),
    **mlp("moe.shared", f"{LAYER}.feed_forward.shared_expert"),
    "moe.norm": MIXTRAL["moe.norm"],
    "moe.router": row(f"{LAYER}.feed_forward.router.weight"),
    "moe.experts.fc1": row(f"{LAYER}.feed_forward.experts.gate_up_proj", transform=JOINED_COLUMNS),
    "moe.experts.fc2": row(f"{LAYER}.feed_forward.experts.down_proj", transform=TRANSPOSED),
}
ARCEE = {**LLAMA, "mlp.up": row(f"{LAYER}.mlp.up_proj.weight")}
COHERE = ERNIE4_5
STARCODER2 = {
    **LLAMA,
    "final_norm_bias": row("model.norm.bias"),
    "attention.norm_bias": row(f"{LAYER}.input_layernorm.bias"),
    "mlp.norm_bias": row(f"{LAYER}.post_attention_layernorm.bias"),
    "mlp.up": row(f"{LAYER}.mlp.c_fc.weight"),
    "mlp.up_bias": row(f"{LAYER}.mlp.c_fc.bias"),
    "mlp.down": row(f"{LAYER}.mlp.c_proj.weight"),
    "mlp.down_bias": row(f"{LAYER}.mlp.c_proj.bias"),
}


def _without_prefix(table: Table) -> Table:
    """Accept the names of `transformers`' base model, without ``transformer.``, too."""
    return {
        name: replace(
            each,
            aliases=(
                replace(
                    each, theirs=tuple(name.removeprefix("transformer.") for name in each.theirs)
                ),
            ),
        )
        for name, each in table.items()
    }


_H = "transformer.h.{layer}"
GPT2 = _without_prefix(
    {
        "embedding": row("transformer.wte.weight", transform=VOCABULARY),
        "positions": row("transformer.wpe.weight"),
        "final_norm": row("transformer.ln_f.weight"),
        "final_norm_bias": row("transformer.ln_f.bias"),
        "head": row("lm_head.weight", transform=VOCABULARY),
        "attention.norm": row(f"{_H}.ln_1.weight"),
        "attention.norm_bias": row(f"{_H}.ln_1.bias"),
        "attention.qkv": row(f"{_H}.attn.c_attn.weight", transform=FUSED_QKV_INPUTS_FIRST),
        "attention.qkv_bias": row(f"{_H}.attn.c_attn.bias", transform=FUSED_QKV),
        "attention.output": row(f"{_H}.attn.c_proj.weight", transform=INPUTS_FIRST),
        "attention.output_bias": row(f"{_H}.attn.c_proj.bias"),
        "mlp.norm": row(f"{_H}.ln_2.weight"),
        "mlp.norm_bias": row(f"{_H}.ln_2.bias"),
        "mlp.up": row(f"{_H}.mlp.c_fc.weight", transform=INPUTS_FIRST),
        "mlp.up_bias": row(f"{_H}.mlp.c_fc.bias"),
        "mlp.down": row(f"{_H}.mlp.c_proj.weight", transform=INPUTS_FIRST),
        "mlp.down_bias": row(f"{_H}.mlp.c_proj.bias"),
    }
)

# Sparse attention, which is dense up to a length: the weights of the indexer are kept.
_I = f"{LAYER}.self_attn.indexer"
DEEPSEEK_V32 = {
    **DEEPSEEK,
    "attention.indexer.q_up": row(f"{_I}.wq_b.weight"),
    "attention.indexer.k": row(f"{_I}.wk.weight"),
    "attention.indexer.k_norm": row(f"{_I}.k_norm.weight"),
    "attention.indexer.k_norm_bias": row(f"{_I}.k_norm.bias"),
    "attention.indexer.weights": row(f"{_I}.weights_proj.weight"),
}
