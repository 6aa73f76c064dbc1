"""Conversion of the ``[moe]`` section to router and ECHO options."""

from __future__ import annotations

from megacore.config import Config, MoEConfig
from megacore.moe.echo.layer import EchoOptions
from megacore.moe.router import RouterConfig


def router_config(moe: MoEConfig) -> RouterConfig:
    """Build the router configuration from the ``[moe]`` section.

    Raises:
        ValueError: If the settings contradict each other.

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


def echo_options(moe: MoEConfig) -> EchoOptions:
    """Build the planner options from ``[moe.echo]``."""
    echo = moe.echo
    return EchoOptions(
        num_spare_slots=echo.spare_slots,
        method=echo.planner,
        tolerance=echo.tolerance,
        min_imbalance=echo.min_imbalance,
        domain_size=echo.domain,
    )


def num_slot_sets(config: Config) -> int:
    """Compute the number of weight slot sets: one per microbatch that can be inside layers at once.

    Example:
        >>> num_slot_sets(Config()), num_slot_sets(Config(pipeline={"overlap_moe": True}))
        (1, 2)
    """
    return 2 if config.pipeline.overlap_moe else 1


def echo_receive_factor(moe: MoEConfig, experts_per_rank: int) -> float:
    """Compute the rows of a ``static`` receive buffer, as a multiple of the mean load.

    ``moe.echo.receive_budget`` if set, else the planner's guaranteed factor, else
    ``moe.static_budget`` if the planner guarantees none.

    Example:
        >>> from megacore.config import MoEConfig
        >>> moe = MoEConfig(num_experts=8, echo={"spare_slots": 4, "tolerance": 0.02})
        >>> echo_receive_factor(moe, 4), echo_receive_factor(moe, 8)
        (1.02, 1.125)
    """
    if moe.echo.receive_budget is not None:
        return moe.echo.receive_budget
    return echo_options(moe).guaranteed_factor(experts_per_rank) or moe.static_budget
