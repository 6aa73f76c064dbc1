"""Options of routers and of clones of hot experts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megacore._core import DEFAULT_TOLERANCE
from megacore.options import check_values


@dataclass(frozen=True, kw_only=True)
class RouterOptions:
    """Choice of experts for a token, and the losses that balance them.

    Attributes:
        num_experts: Experts of the layer.
        top_k: Experts per token.
        score_function: Function that maps logits to scores; ``"softmax_after_top_k"`` takes the
            softmax over the chosen experts only.
        normalize: Divide the scores of a token's experts by their sum.
        scaling_factor: Factor on the weights of a token's experts.
        num_groups: Groups of consecutive experts; only those of the best groups can be chosen.
        groups_top_k: Groups chosen per token.
        bias_rate: Change per step of the bias on scores that balances experts without a loss; 0 for
            a bias that stays, ``None`` without a bias.
        aux_loss_coef: Weight of the load-balancing loss.
        aux_loss_type: Tokens that are balanced together: those of a sequence, or those of a
            microbatch on all data-parallel ranks.
        z_loss_coef: Weight of the loss on the size of logits.
        jitter: Noise on the router's input in training, as a fraction.
        force_balanced: Assign tokens to experts in turn, regardless of scores; for benchmarks.
        fp32: Compute logits in float32, regardless of the dtype of tokens.

    Raises:
        ValueError: If a value is not valid, or ``top_k`` experts cannot be chosen.
    """

    num_experts: int
    top_k: int = 2
    score_function: Literal["softmax", "softmax_after_top_k", "sigmoid"] = "softmax"
    normalize: bool = True
    scaling_factor: float = 1.0
    num_groups: int = 1
    groups_top_k: int = 1
    bias_rate: float | None = None
    aux_loss_coef: float = 0.0
    aux_loss_type: Literal["sequence", "batch"] = "sequence"
    z_loss_coef: float = 0.0
    jitter: float = 0.0
    force_balanced: bool = False
    fp32: bool = True

    def __post_init__(self) -> None:
        least = {"num_experts": 1, "num_groups": 1, "bias_rate": 0, "jitter": 0}
        coefs = {"aux_loss_coef": 0, "z_loss_coef": 0, "scaling_factor": 0}
        check_values(self, least={**least, **coefs}, below={"jitter": 1})
        num_experts, num_groups = self.num_experts, self.num_groups
        if not 1 <= self.top_k <= num_experts:
            raise ValueError(
                f"top_k = {self.top_k}: with num_experts = {num_experts} it must lie in "
                f"[1, {num_experts}]"
            )
        if num_experts % num_groups != 0:
            legal = [n for n in range(1, num_experts + 1) if num_experts % n == 0]
            raise ValueError(
                f"num_groups = {num_groups} does not divide num_experts = {num_experts}; use one "
                f"of {legal}"
            )
        if not 1 <= self.groups_top_k <= num_groups:
            raise ValueError(
                f"groups_top_k = {self.groups_top_k}: with num_groups = {num_groups} it must lie "
                f"in [1, {num_groups}]"
            )
        group_size = num_experts // num_groups
        if self.top_k > self.groups_top_k * group_size:
            raise ValueError(
                f"top_k = {self.top_k}, but {self.groups_top_k} groups of {group_size} experts "
                f"offer {self.groups_top_k * group_size}; groups_top_k must be at least "
                f"{-(-self.top_k // group_size)}"
            )

    @property
    def softmax_after_top_k(self) -> bool:
        """True if logits rank experts and weights are the softmax over the chosen ones."""
        return self.score_function == "softmax_after_top_k"

    @property
    def group_score_top(self) -> int:
        """Number of highest scores whose sum is a group's score, as in DeepSeek-V2 and V3."""
        return 2 if self.score_function == "sigmoid" else 1


@dataclass(frozen=True, kw_only=True)
class EchoOptions:
    """Clones of hot experts in spare slots, to balance the load of ranks.

    Attributes:
        num_spare_slots: Slots for clones on each rank.
        planner: ``"balanced"``, which reaches its goal whenever slots allow it, or ``"echo"``, that
            of the ECHO documents, for comparison.
        tolerance: ``balanced``: excess load over the mean that is not worth a clone, as a fraction
            of the mean.
        min_imbalance: Make no clones while the max load of a rank over the mean load is at most
            this.
        domain_size: ``balanced``: number of consecutive ep ranks with the fastest links; clones
            stay inside where possible. Default: all ranks are alike.

    Raises:
        ValueError: If a value is not valid.
    """

    num_spare_slots: int
    planner: Literal["balanced", "echo"] = "balanced"
    tolerance: float = DEFAULT_TOLERANCE
    min_imbalance: float = 1.0
    domain_size: int | None = None

    def __post_init__(self) -> None:
        least = {"num_spare_slots": 0, "tolerance": 0, "min_imbalance": 1, "domain_size": 1}
        check_values(self, least=least)

    def guaranteed_factor(self, experts_per_rank: int) -> float | None:
        """Compute the bound of max load over mean load for any routing; ``None`` if unknown.

        It is the load at which the balanced planner stops (``tolerance``, ``min_imbalance``), but
        at least the one that no planner can prevent with fewer slots than experts per rank. The
        planner is within one percent of the latter on the loads that need it.

        Example:
            >>> EchoOptions(num_spare_slots=4).guaranteed_factor(4)
            1.01
            >>> EchoOptions(num_spare_slots=1).guaranteed_factor(4)
            1.5625
        """
        if self.planner != "balanced" or self.num_spare_slots == 0:
            return None
        share = min(1.0, self.num_spare_slots / experts_per_rank)
        worst = (1.0 + share) ** 2 / (4.0 * share)
        return max(worst, 1.0 + self.tolerance, self.min_imbalance)
