"""Families without experts beyond those of `families.py`."""

from __future__ import annotations

from megatrain.hf import common_keys as keys
from megatrain.hf import tables
from megatrain.hf.family import Family
from megatrain.hf.fine_tuning import PaddingRow
from megatrain.hf.keys import Key
from megatrain.hf.layer_rules import Windows

DENSE_FAMILIES = (
    Family(
        model_type="seed_oss",
        people="Seed-OSS",
        special="biases of queries, keys and values",
        architecture="SeedOssForCausalLM",
        table=tables.LLAMA,
        keys=(
            *keys.sizes(kv_heads=8, head_dim=128),
            keys.FFN,
            Key(theirs=("attention_bias",), ours=("model.qkv_bias",), kind=bool, default=True),
            Key(
                theirs=("attention_out_bias",),
                ours=("model.output_bias",),
                kind=bool,
                default=False,
            ),
        ),
        fixed={"hidden_act": "silu", "mlp_bias": False, "pretraining_tp": 1},
        rules=(PaddingRow(default=1),),
        # Of its training, and stated by every file.
        ignored=("attention_dropout", "residual_dropout"),
    ),
    Family(
        model_type="phi3",
        people="Phi-3, Phi-3.5 mini, Phi-4",
        special="fused queries, keys and values, fused gate and up, longrope",
        architecture="Phi3ForCausalLM",
        table=tables.PHI3,
        keys=(*keys.sizes(norm_eps=1e-5), keys.FFN),
        fixed={**keys.FIXED, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
        rules=(Windows(), PaddingRow(default=32000)),
        rope_names={"su": "longrope", "yarn": "longrope"},
        rope_original=4096,
        rotary_fraction=1.0,
    ),
    Family(
        model_type="ernie4_5",
        people="ERNIE 4.5 0.3B",
        special="pairs rotated side by side",
        architecture="Ernie4_5ForCausalLM",
        table=tables.ERNIE4_5,
        keys=(*keys.sizes(kv_heads=2, head_dim=128, norm_eps=1e-5, tied=True), keys.FFN),
        fixed={**keys.FIXED, "use_bias": False},
        rules=(PaddingRow(default=0),),
        rope_base=500000.0,
    ),
)
