"""Number of the parameters of a model, without torch."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatrain.config import ModelConfig, MoEConfig
from megatrain.models.param_infos import GPTInfos


@dataclass(frozen=True, kw_only=True)
class ParameterCount:
    """Parameters of the whole model, including the padding of the vocabulary.

    Attributes:
        total: All parameters.
        active: Parameters used by one token: without the experts that it is not routed to.
        padding: Parameters of rows that only pad the vocabulary.
    """

    total: int
    active: int
    padding: int


def count_parameters(config: ModelConfig, moe: MoEConfig | None = None) -> ParameterCount:
    """Count the parameters of ``[model]`` and ``[moe]`` sections.

    Example:
        >>> config = ModelConfig(hidden_size=8, num_heads=2, num_kv_heads=1, ffn_hidden_size=16,
        ...                      num_layers=3, vocab_size=10, vocab_pad_multiple=4)
        >>> count_parameters(config).total, count_parameters(config).padding
        (1880, 16)
        >>> count = count_parameters(config, MoEConfig(num_experts=4, ffn_hidden_size=16))
        >>> count.total, count.active
        (5432, 3128)
    """
    moe = MoEConfig() if moe is None else moe
    infos = GPTInfos.of(config, moe)
    total = idle = padding = 0
    for info in infos.stage(
        range(config.num_layers), has_embedding=True, has_head=True, mtp_layers=config.mtp_layers
    ).values():
        numel = math.prod(info.full_shape)
        total += numel
        if info.expert:
            idle += numel // moe.num_experts * (moe.num_experts - moe.top_k)
        if info.name in ("embedding", "head"):
            padding += (infos.shape.padded_vocab - infos.shape.vocab) * infos.shape.hidden
    return ParameterCount(total=total, active=total - idle, padding=padding)
