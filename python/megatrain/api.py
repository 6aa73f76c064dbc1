"""Public names for models, losses, data and callbacks of one's own.

``model.factory``, ``train.loss``, ``data.factory`` and ``train.callbacks`` name functions and
classes of these types; docs/own-model.md describes them.
"""

from __future__ import annotations

from megacore.ops.activations import geglu, swiglu
from megacore.ops.dense import rms_norm
from megacore.ops.recompute import recompute
from megacore.parallel import Group, ProcessGroups
from megacore.parallel.batch import Microbatch
from megacore.parallel.param_info import ParamInfo
from megatrain.config import ModelConfig, MoEConfig, ResolvedConfig
from megatrain.data import Sample, TokenSource
from megatrain.data.custom import DataFactory, SampleSource
from megatrain.models.attention.context_parallel import causal_attention
from megatrain.models.attention.gqa import Attention
from megatrain.models.attention.rotary import RotaryTables
from megatrain.models.custom import ModelFactory, StageContext
from megatrain.models.gpt import Embedding, Head
from megatrain.models.group_loss import AnswerLogprobs, GroupLoss
from megatrain.models.layers import (
    ColumnLinear,
    LayerNorm,
    ModelContext,
    ResidualDropout,
    RMSNorm,
    RowLinear,
    VocabEmbedding,
)
from megatrain.models.loss import Loss, LossContext, cross_entropy, token_loss
from megatrain.models.mappings import (
    Region,
    all_gather_sequence,
    copy_to_group,
    gather_sequence,
    reduce_from_group,
    reduce_scatter_sequence,
    scatter_sequence,
)
from megatrain.models.moe_block import MoEBlock
from megatrain.models.transformer import MLP, TransformerLayer
from megatrain.train.callbacks import Callback
from megatrain.train.metrics import StepRecord
from megatrain.train.trainer import Trainer
from megatrain.train.weight_stream import adapter_config, refresh_weights, stream_weights

__all__ = [
    "MLP",
    "AnswerLogprobs",
    "Attention",
    "Callback",
    "ColumnLinear",
    "DataFactory",
    "Embedding",
    "Group",
    "GroupLoss",
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
    "adapter_config",
    "all_gather_sequence",
    "causal_attention",
    "copy_to_group",
    "cross_entropy",
    "gather_sequence",
    "geglu",
    "recompute",
    "reduce_from_group",
    "reduce_scatter_sequence",
    "refresh_weights",
    "rms_norm",
    "scatter_sequence",
    "stream_weights",
    "swiglu",
    "token_loss",
]
