"""Public names for models, losses, data and callbacks of one's own.

``model.factory``, ``train.loss``, ``data.factory`` and ``train.callbacks`` name functions and
classes of these types; docs/own-model.md describes them.
"""

from __future__ import annotations

from megacore.config import ModelConfig, MoEConfig, ResolvedConfig
from megacore.data import Sample, TokenSource
from megacore.data.own import DataFactory, SampleSource
from megacore.models.attention import Attention
from megacore.models.context_parallel import causal_attention
from megacore.models.gpt import Embedding, Head
from megacore.models.layers import (
    ColumnLinear,
    LayerNorm,
    ModelContext,
    ResidualDropout,
    RMSNorm,
    RowLinear,
    VocabEmbedding,
)
from megacore.models.loss import Loss, LossContext, cross_entropy, token_loss
from megacore.models.mappings import (
    Region,
    all_gather_sequence,
    copy_to_group,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_sequence,
)
from megacore.models.moe_block import MoEBlock
from megacore.models.own import ModelFactory, StageContext
from megacore.models.rotary import RotaryTables
from megacore.models.transformer import MLP, TransformerLayer
from megacore.ops.activations import geglu, swiglu
from megacore.ops.dense import rms_norm
from megacore.ops.recompute import recompute
from megacore.parallel import Group, ProcessGroups
from megacore.parallel.batch import Microbatch
from megacore.parallel.params import ParamInfo
from megacore.train.callbacks import Callback
from megacore.train.metrics import StepRecord
from megacore.train.trainer import Trainer

__all__ = [
    "MLP",
    "Attention",
    "Callback",
    "ColumnLinear",
    "DataFactory",
    "Embedding",
    "Group",
    "Head",
    "LayerNorm",
    "Loss",
    "LossContext",
    "Microbatch",
    "MoEBlock",
    "MoEConfig",
    "ModelConfig",
    "ModelContext",
    "ModelFactory",
    "ParamInfo",
    "ProcessGroups",
    "RMSNorm",
    "Region",
    "ResidualDropout",
    "ResolvedConfig",
    "RotaryTables",
    "RowLinear",
    "Sample",
    "SampleSource",
    "StageContext",
    "StepRecord",
    "TokenSource",
    "Trainer",
    "TransformerLayer",
    "VocabEmbedding",
    "all_gather_sequence",
    "causal_attention",
    "copy_to_group",
    "cross_entropy",
    "gather_sequence",
    "geglu",
    "recompute",
    "reduce_from_group",
    "reduce_scatter_sequence",
    "rms_norm",
    "scatter_sequence",
    "swiglu",
    "token_loss",
]
