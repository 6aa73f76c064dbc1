"""The ``[moe]`` section: MoE layers, routing and dispatch of tokens, and ECHO."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, field_validator, model_validator

from megacore._core import DEFAULT_TOLERANCE
from megacore.moe.options import EchoOptions, RouterOptions
from megatrain.config.base import Section, check_pattern, letter_of_layer

if TYPE_CHECKING:
    from megacore.moe.dispatchers.capacity import Capacity


class EchoConfig(Section):
    """``[moe.echo]``: clones of hot experts in spare slots, to balance the load of ranks."""

    num_spare_slots: int = Field(
        default=0,
        ge=0,
        le=1024,
        description="Slots for clones of experts on each rank, shared by all layers; 0 turns ECHO "
        "off.",
    )
    planner: Literal["balanced", "echo"] = Field(
        default="balanced",
        description="Planner of clones: `balanced`, which reaches its goal whenever slots allow "
        "it, or `echo`, that of the ECHO documents, for comparison.",
    )
    tolerance: float = Field(
        default=DEFAULT_TOLERANCE,
        ge=0.0,
        le=1.0,
        description="`balanced`: excess load over the mean that is not worth a clone, as a "
        "fraction of the mean.",
    )
    min_imbalance: float = Field(
        default=1.0,
        ge=1.0,
        le=1000.0,
        description="Make no clones while the max load of a rank over the mean load is at most "
        "this.",
    )
    domain_size: int | None = Field(
        default=None,
        ge=1,
        description="`balanced`: number of consecutive ep ranks with the fastest links, for "
        "example NVLink; clones stay inside where possible. Default: all ranks are alike.",
    )
    receive_budget: float | None = Field(
        default=None,
        ge=1.0,
        description="`static`: receive buffer rows of a rank for its experts, as a multiple of "
        "the mean load. Default: the guarantee of the planner.",
    )

    def options(self) -> EchoOptions:
        """Return the options of slots and planner."""
        return EchoOptions(
            num_spare_slots=self.num_spare_slots,
            planner=self.planner,
            tolerance=self.tolerance,
            min_imbalance=self.min_imbalance,
            domain_size=self.domain_size,
        )


class MoEConfig(Section):
    """``[moe]``: mixture of experts."""

    num_experts: int = Field(
        default=0, ge=0, description="Experts per MoE layer; 0 makes every layer dense."
    )
    top_k: int = Field(default=2, ge=1, description="Experts per token.")
    ffn_hidden_size: int | None = Field(
        default=None,
        ge=1,
        description="Inner width of an expert. Default: `model.ffn_hidden_size`.",
    )
    activation: Literal["swiglu", "gelu", "clamped_swiglu"] = Field(
        default="swiglu",
        description="Activation of the experts; `clamped_swiglu`, of gpt-oss, is `(up + 1) gate "
        "sigmoid(1.702 gate)` with `gate` at most 7 and `up` from -7 to 7.",
    )
    biases: bool = Field(
        default=False, description="Biases of the router and of both layers of each expert."
    )
    layer_pattern: str = Field(
        default="e",
        description="Dense layers (`d`) and layers with experts (`e`), repeated over the layers; "
        "those before parentheses are not repeated: `ddd(e)` for three dense layers and experts "
        "in all others.",
    )
    shared_ffn_hidden_size: int = Field(
        default=0,
        ge=0,
        description="Inner width of the shared expert, applied to every token; 0 for none.",
    )
    shared_gate: bool = Field(
        default=False,
        description="Multiply the shared expert's output by a learnt sigmoid gate per token.",
    )
    dispatcher: Literal["allgather", "alltoall", "static"] = Field(
        default="alltoall",
        description="Transport of tokens to experts: all-gather; all-to-all of each copy to its "
        "rank; or the same in buffers of fixed size, without host sync.",
    )
    static_budget: float = Field(
        default=2.0,
        gt=0.0,
        description="`static`: rows of each buffer, as a multiple of a rank's fair share of "
        "copies, at most the largest number that can arrive.",
    )
    pad_to_capacity: bool = Field(
        default=False,
        description="`static`: give buffers exactly the rows of each expert's capacity, by "
        "`capacity_factor`, in place of `static_budget`, so that nothing can overflow.",
    )
    static_transport: Literal["auto", "collective", "peer"] = Field(
        default="auto",
        description="`static`: transport of rows, equal-split all-to-alls or direct writes to peer "
        "memory. Default: `peer` where all ranks of the group can access each other's memory.",
    )
    over_budget: Literal["error", "drop", "rerun"] = Field(
        default="rerun",
        description="`static`: reaction to copies that exceed a buffer: end the run; drop and "
        "count them; or rerun the step with twice the budget.",
    )
    capacity_factor: float | None = Field(
        default=None,
        gt=0.0,
        description="Each rank sends an expert at most its fair share of copies times this; the "
        "rest is dropped and counted. Default: no limit.",
    )
    drop_by: Literal["probs", "position"] = Field(
        default="probs",
        description="Copies that are kept under `capacity_factor`: those of the highest weight, "
        "or the first ones.",
    )
    router_fp32: bool = Field(
        default=True,
        description="Compute router logits in float32, regardless of `train.dtype`.",
    )
    score_function: Literal["softmax", "softmax_after_top_k", "sigmoid"] = Field(
        default="softmax",
        description="Function that maps router logits to scores; `softmax_after_top_k` takes the "
        "softmax over the chosen experts only.",
    )
    normalize: bool = Field(
        default=True,
        description="Divide the scores of a token's experts by their sum. With `top_k` 1 the "
        "quotient is always 1, so only a balancing loss trains the router.",
    )
    scaling_factor: float = Field(
        default=1.0, gt=0.0, description="Factor on the weights of a token's experts."
    )
    scale_inputs: bool = Field(
        default=False,
        description="Multiply the input of a token's experts by their weights, in place of their "
        "output.",
    )
    num_groups: int = Field(
        default=1,
        ge=1,
        description="Groups of consecutive experts; only those of the best groups can be chosen. "
        "A group's score is that of its best expert, or the sum of its best two with sigmoid.",
    )
    groups_top_k: int = Field(default=1, ge=1, description="Number of groups chosen per token.")
    expert_bias: bool = Field(
        default=False,
        description="Balance experts by a bias on their scores, updated from the load, instead of "
        "a loss.",
    )
    expert_bias_rate: float = Field(
        default=1e-3,
        ge=0.0,
        description="Change of the experts' bias per step; 0 for a bias that stays.",
    )
    aux_loss_coef: float = Field(
        default=0.0, ge=0.0, description="Weight of the load-balancing loss."
    )
    aux_loss_type: Literal["sequence", "batch"] = Field(
        default="sequence",
        description="Tokens that are balanced together: those of a sequence, or those of a "
        "microbatch on all data parallel ranks.",
    )
    z_loss_coef: float = Field(
        default=0.0, ge=0.0, description="Weight of the loss on the size of router logits."
    )
    jitter: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Noise on the router's input in training, as a fraction.",
    )
    echo: EchoConfig = EchoConfig()

    def is_moe_layer(self, index: int) -> bool:
        """Return whether the layer with this global index has experts.

        Example:
            >>> moe = MoEConfig(num_experts=4, layer_pattern="d(de)")
            >>> [index for index in range(6) if moe.is_moe_layer(index)]
            [2, 4]
        """
        return self.num_experts > 0 and letter_of_layer(self.layer_pattern, index) == "e"

    def moe_layers(self, num_layers: int) -> list[int]:
        """Global indices of the MoE layers of a model."""
        return [index for index in range(num_layers) if self.is_moe_layer(index)]

    def receive_factor(self, experts_per_rank: int) -> float:
        """Compute the rows of a ``static`` receive buffer, as a multiple of the mean load.

        ``echo.receive_budget`` if set, else the planner's guaranteed factor, else ``static_budget``
        if the planner guarantees none.

        Example:
            >>> moe = MoEConfig(num_experts=8, echo={"num_spare_slots": 4, "tolerance": 0.02})
            >>> moe.receive_factor(4), moe.receive_factor(8)
            (1.02, 1.125)
        """
        if self.echo.receive_budget is not None:
            return self.echo.receive_budget
        return self.echo.options().guaranteed_factor(experts_per_rank) or self.first_budget

    @property
    def first_budget(self) -> float:
        """Rows of a ``static`` buffer over the fair share; 1 if the capacity determines them."""
        return 1.0 if self.pad_to_capacity else self.static_budget

    def router_options(self, *, force_balanced: bool = False) -> RouterOptions:
        """Return the options of the routers.

        Args:
            force_balanced: ``debug.force_balanced``.

        Raises:
            ValueError: If ``top_k`` experts cannot be chosen.
        """
        return RouterOptions(
            num_experts=self.num_experts,
            top_k=self.top_k,
            score_function=self.score_function,
            normalize=self.normalize,
            scaling_factor=self.scaling_factor,
            num_groups=self.num_groups,
            groups_top_k=self.groups_top_k,
            bias_rate=self.expert_bias_rate if self.expert_bias else None,
            aux_loss_coef=self.aux_loss_coef,
            aux_loss_type=self.aux_loss_type,
            z_loss_coef=self.z_loss_coef,
            jitter=self.jitter,
            force_balanced=force_balanced,
            fp32=self.router_fp32,
        )

    def capacity(self) -> Capacity | None:
        """Return the limit of copies per expert, if there is one; imports torch."""
        from megacore.moe.dispatchers.capacity import Capacity

        if self.capacity_factor is None:
            return None
        return Capacity(factor=self.capacity_factor, drop_by=self.drop_by, pad=self.pad_to_capacity)

    @property
    def gated(self) -> bool:
        """Return whether experts have a gate, and so three matrices instead of two."""
        return self.activation != "gelu"

    @field_validator("layer_pattern")
    @classmethod
    def _check_pattern(cls, pattern: str) -> str:
        return check_pattern(pattern, "de")

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.num_experts > 0:
            self.router_options()  # raises if the choices are inconsistent
        is_padded = self.pad_to_capacity
        if is_padded and (self.capacity_factor is None or self.dispatcher != "static"):
            raise ValueError(
                'pad_to_capacity needs capacity_factor and dispatcher = "static"; set both, or '
                "leave pad_to_capacity out"
            )
        if self.echo.num_spare_slots > 0 and is_padded:
            raise ValueError(
                "echo.num_spare_slots bounds the load of ranks, pad_to_capacity that of each "
                "expert; set echo.num_spare_slots = 0, or pad_to_capacity = false"
            )
        if self.echo.num_spare_slots > 0 and self.num_experts == 0:
            raise ValueError(
                f"echo.num_spare_slots = {self.echo.num_spare_slots} is for experts, but "
                "num_experts = 0; leave num_spare_slots out, or set num_experts"
            )
        if self.echo.num_spare_slots > 0 and self.biases:
            raise ValueError(
                "echo.num_spare_slots clones matrices of experts, not their biases; set "
                "echo.num_spare_slots = 0, or biases = false"
            )
        if self.echo.domain_size is not None and self.echo.planner == "echo":
            raise ValueError(
                'echo.domain_size is for echo.planner = "balanced"; leave domain_size out, or '
                "change planner"
            )
        if self.shared_ffn_hidden_size == 0 and self.shared_gate:
            raise ValueError(
                "shared_gate needs a shared expert; set shared_ffn_hidden_size above 0"
            )
        return self
