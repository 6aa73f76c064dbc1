"""What the ``[moe]`` section means for a router."""

from __future__ import annotations

from megacore.config import MoEConfig
from megacore.moe.router import RouterConfig


def router_config(moe: MoEConfig) -> RouterConfig:
    """The router's part of the section.

    Raises:
        ValueError: If its settings contradict each other.

    Example:
        >>> router_config(MoEConfig(num_experts=4, score_function="sigmoid")).top_k
        2
    """
    return RouterConfig(
        num_experts=moe.num_experts,
        top_k=moe.top_k,
        score_function=moe.score_function,
        softmax_after_top_k=moe.softmax_after_top_k,
        normalize=moe.normalize,
        scaling_factor=moe.scaling_factor,
        num_groups=moe.num_groups,
        groups_top_k=moe.groups_top_k,
        group_score_top=moe.group_score_top,
        expert_bias=moe.expert_bias,
        expert_bias_rate=moe.expert_bias_rate,
        aux_loss_coef=moe.aux_loss_coef,
        aux_loss_type=moe.aux_loss_type,
        z_loss_coef=moe.z_loss_coef,
        jitter=moe.jitter,
        force_balanced=moe.force_balanced,
        fp32=moe.router_fp32,
    )
