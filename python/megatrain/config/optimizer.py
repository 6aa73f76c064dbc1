"""The ``[optimizer]`` section: the optimizer, its learning rate, clipping and sharding."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from megacore.buffers.options import BufferOptions
from megacore.errors import ConfigError
from megacore.optim import learning_rate
from megacore.optim.options import RateOptions
from megacore.optim.param_group import ParamGroup
from megacore.optim.rules.adam import Adam
from megacore.optim.rules.adamw import AdamW
from megacore.optim.rules.adamw_8bit import AdamW8bit
from megacore.optim.rules.lion import Lion
from megacore.optim.rules.muon import CoefficientSet, Muon, Scale
from megacore.optim.rules.sgd import SGD
from megacore.optim.rules.torch_optimizer import TorchOptimizer
from megacore.optim.update_rule import UpdateRule
from megatrain.config.base import Section
from megatrain.config.user_objects import check_object_name, import_object


class MuonConfig(Section):
    """``[optimizer.muon]``: Muon, for the matrices of attention, MLPs, routers and experts.

    Embeddings, the output layer, norms, biases and other vectors get AdamW.
    """

    adamw_lr: float | None = Field(
        default=None,
        ge=0.0,
        description="Highest learning rate of AdamW, which follows the schedule of `optimizer.lr`. "
        "Default: `optimizer.lr`.",
    )
    momentum: float = Field(
        default=0.95, ge=0.0, lt=1.0, description="Decay of the mean of gradients."
    )
    nesterov: bool = Field(default=True, description="Look ahead by one step of the momentum.")
    coefficients: CoefficientSet = Field(
        default="simple",
        description="Coefficients of the Newton-Schulz iterations: `simple` of "
        "`torch.optim.Muon`, `quintic` of NVIDIA, `deepseekv4`, `polar_express`, or `cubic5`, "
        "which has no fifth power.",
    )
    num_iterations: int | None = Field(
        default=None,
        ge=1,
        description="Newton-Schulz iterations. Default: 5; 10 of `deepseekv4`, 8 of "
        "`polar_express`.",
    )
    scale: Scale = Field(
        default="match_rms_adamw",
        description="Size of the update of a matrix of r rows and c columns: `match_rms_adamw` "
        "(0.2 sqrt(max(r, c)): as large as AdamW's, so that its `lr` and `weight_decay` carry "
        "over), `original` (sqrt(max(1, r / c))), `spectral` (sqrt(max(r, c))), or `unit_rms_norm` "
        "(sqrt(r / c)).",
    )
    precision: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="Number format of the iterations. On GPUs `bfloat16` is faster.",
    )


@dataclass(frozen=True, kw_only=True)
class RunRate:
    """Learning rate of a run by step, whatever the unit of its schedule.

    Attributes:
        options: Shape of the rate.
        steps: Steps of the whole run.
        step_size: Length of a step in the unit of the schedule.
        offset: Length of all earlier steps beyond ``step_size`` of each, if that has changed.
    """

    options: RateOptions
    steps: int
    step_size: int
    offset: int = 0

    @property
    def total(self) -> int:
        """Length of the whole run in the unit of the schedule."""
        return self.offset + self.steps * self.step_size

    def at(self, step: int) -> float:
        """Compute the learning rate of step ``step``, from 0."""
        done = self.offset + step * self.step_size
        return learning_rate(done, options=self.options, total=self.total, step_size=self.step_size)


class ParamGroupConfig(Section):
    """``[[optimizer.groups]]``: settings of the parameters whose names match a pattern."""

    pattern: str = Field(
        min_length=1, description="Shell-style pattern of names, as in `layers.*.mlp.*`."
    )
    optimizer: Literal["none", "adamw", "adam", "sgd", "lion", "muon", "adamw_8bit"] | None = Field(
        default=None,
        description="Their optimizer; `none` freezes them. Default: that of the run.",
    )
    lr_scale: float = Field(default=1.0, ge=0.0, description="Factor on the learning rate.")
    weight_decay: float | None = Field(
        default=None, ge=0.0, description="Weight decay. Default: that of the parameter."
    )
    beta1: float | None = Field(
        default=None, ge=0.0, lt=1.0, description="As `optimizer.beta1`. Default: that of the run."
    )
    beta2: float | None = Field(
        default=None, ge=0.0, lt=1.0, description="As `optimizer.beta2`. Default: that of the run."
    )

    @model_validator(mode="after")
    def _check_frozen(self) -> Self:
        others = {"lr_scale": 1.0, "weight_decay": None, "beta1": None, "beta2": None}
        unused = [name for name, default in others.items() if getattr(self, name) != default]
        if self.optimizer == "none" and unused:
            raise ValueError(
                f'the parameters of {self.pattern!r} are frozen (optimizer = "none"), so '
                f"{' and '.join(unused)} would have no effect; leave that out"
            )
        return self

    def optimizer_of(self, run: OptimizerConfig) -> OptimizerConfig:
        """Return the settings of the run with those of the optimizer of this group."""
        own: dict[str, Any] = {
            name: value for name in ("beta1", "beta2") if (value := getattr(self, name)) is not None
        }
        if self.optimizer is not None:
            own |= {"name": self.optimizer, "factory": None}
        return run.model_copy(update=own)

    def group(self, run: OptimizerConfig) -> ParamGroup:
        """Return the group of parameters, in a run with these settings."""
        is_frozen = self.optimizer == "none"
        return ParamGroup(
            pattern=self.pattern,
            lr_scale=self.lr_scale,
            weight_decay=self.weight_decay,
            rule=None if is_frozen else self.optimizer_of(run).rule(),
            frozen=is_frozen,
        )


class OptimizerConfig(Section):
    """``[optimizer]``: update rule, learning rate schedule, gradient clipping, ZeRO-1."""

    name: Literal["adamw", "adam", "sgd", "lion", "muon", "adamw_8bit"] = Field(
        default="adamw",
        description="The optimizer. Weight decay is a part of the gradient in `adam` and `sgd`, "
        "as in `torch.optim`. `muon` has settings in `[optimizer.muon]`. `adamw_8bit` "
        "stores moments of matrices in 8 bits.",
    )
    factory: str | None = Field(
        default=None,
        description="Optimizer of your own in place of `name`: a function `module:function` that "
        "takes a list of parameters and returns a `torch.optim.Optimizer` that treats each "
        "element on its own. `lr` and `weight_decay` are set before each step. Default: `name`.",
    )
    lr: float = Field(default=3e-3, ge=0.0, description="Highest learning rate.")
    min_lr: float | None = Field(
        default=None, ge=0.0, description="Learning rate after the decay. Default: `lr` / 10."
    )
    schedule: Literal["cosine", "linear", "constant", "inverse_sqrt", "wsd"] = Field(
        default="cosine",
        description="Shape after the warmup: a cosine or linear decay, none, a fall with the "
        "inverse square root, or warmup-stable-decay, which stays at `lr` until its tail. See "
        "learning-rate.md.",
    )
    schedule_unit: Literal["steps", "samples", "tokens"] = Field(
        default="steps",
        description="Unit of `warmup`, `decay_end` and `tail_length`: optimizer steps, sequences, "
        "or tokens (sequences x `model.seq_length`).",
    )
    warmup: int = Field(
        default=0,
        ge=0,
        description="Length of the linear rise from `warmup_from` to `lr`, in `schedule_unit`; a "
        "shorter run does not reach it.",
    )
    warmup_from: float = Field(
        default=0.0, ge=0.0, description="Learning rate at which the warmup starts."
    )
    decay_end: int | None = Field(
        default=None,
        ge=1,
        description="Length of the run at which `min_lr` is reached, in `schedule_unit`. Default: "
        "the end of the run.",
    )
    tail_length: int | None = Field(
        default=None,
        ge=0,
        description="wsd: length of the decay before `decay_end`, in `schedule_unit`. Default: a "
        "fifth of `decay_end`, or what the warmup leaves of it, if that is less.",
    )
    tail_shape: Literal["linear", "cosine", "exponential", "minus_sqrt"] = Field(
        default="linear",
        description="wsd: shape of the decay; with x from 0 to 1, 1 - x, half a cosine, "
        "2 x 0.5^x - 1, or 1 - sqrt(x).",
    )
    weight_decay: float = Field(default=0.1, ge=0.0, description="Weight decay of matrices.")
    beta1: float = Field(
        default=0.9,
        ge=0.0,
        lt=1.0,
        description="Decay of the first moment; of `lion` the weight of the mean.",
    )
    beta2: float = Field(
        default=0.95,
        ge=0.0,
        lt=1.0,
        description="Decay of the second moment; of `lion` (whose authors use 0.99) that of the "
        "mean.",
    )
    eps: float = Field(default=1e-8, gt=0.0, description="Added to the root of the second moment.")
    momentum: float = Field(
        default=0.9, ge=0.0, lt=1.0, description="Decay of the sum of gradients of `sgd`."
    )
    nesterov: bool = Field(default=False, description="Nesterov's momentum in `sgd`.")
    clip_grad: float = Field(
        default=1.0, ge=0.0, description="Largest global gradient norm; 0 turns clipping off."
    )
    groups: list[ParamGroupConfig] = Field(
        default=[],
        description="Groups of parameters with settings of their own, each a table "
        "`[[optimizer.groups]]` with `pattern` (of names, as in `layers.*.mlp.*`; the first group "
        "that matches wins), `optimizer` (`adamw`, `adam`, `sgd`, `lion`, `muon`, `adamw_8bit`, or "
        "`none`, which freezes them), `lr_scale` (factor on the learning rate), `weight_decay`, "
        "`beta1` and `beta2`. See buffers.md.",
    )
    ema_decay: float = Field(
        default=0.0,
        ge=0.0,
        lt=1.0,
        description="Decay per step of a moving average of the weights, kept in float32 beside the "
        "optimizer state and in checkpoints, for `megacore export-hf --ema`; 0 for none.",
    )
    distributed: bool = Field(
        default=True,
        description="Shard the optimizer state over data parallel ranks (ZeRO-1); `false` gives "
        "every rank the whole state.",
    )
    num_instances: int = Field(
        default=1,
        ge=1,
        description="Copies of the sharded optimizer state: 1 shards it over all data parallel "
        "ranks; more are each sharded over neighbouring ranks (hybrid sharding).",
    )
    grad_dtype: Literal["float32", "param", "param_fp32_sum"] = Field(
        default="float32",
        description="Number format in which gradients are accumulated and communicated: float32, "
        "or that of the parameters (`train.dtype`), which halves the memory in 16 bits. "
        "`param_fp32_sum` adds 16-bit gradients of different ranks in float32 on NCCL, too: slices "
        "are exchanged in 16 bits and added locally, as always on the CPU.",
    )
    moments_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Number format of moments."
    )
    overlap: Literal["none", "grads", "params", "all"] | None = Field(
        default=None,
        description="Communication that overlaps with compute: the reduction of a bucket's "
        "gradients with the backward pass (`grads`), the gather of updated parameters with the "
        "next forward pass (`params`), or both (`all`). Default: `all` with `nccl`, `none` with "
        "`gloo`, whose messages take processor time.",
    )
    bucket_numel: int | None = Field(
        default=None,
        ge=1,
        description="Elements per gradient bucket. Default: chosen from the data parallel size.",
    )
    pad_for_ring: bool = Field(
        default=False,
        description="Pad gradient buckets to multiples of 2^16 elements, which can be faster in "
        "rings of many ranks.",
    )
    average_in_collective: bool = Field(
        default=True,
        description="Average gradients by a division after the sum; `false` scales them before "
        "the sum.",
    )
    loss_scale: float = Field(
        default=65536.0,
        ge=1.0,
        description="Initial loss scale of float16 training, adapted later: the factor on the mean "
        "loss of a step. A power of two.",
    )
    loss_scale_interval: int = Field(
        default=1000,
        ge=1,
        description="Steps without overflow after which the loss scale doubles.",
    )

    muon: MuonConfig = MuonConfig()

    def buffer_options(self) -> BufferOptions:
        """Return the options of gradient buffers."""
        return BufferOptions(
            distributed=self.distributed,
            grad_dtype=self.grad_dtype,
            bucket_numel=self.bucket_numel,
            pad_for_ring=self.pad_for_ring,
            average_in_collective=self.average_in_collective,
        )

    def param_groups(self) -> list[ParamGroup]:
        """Return the groups of parameters."""
        return [group.group(self) for group in self.groups]

    def rule(self) -> UpdateRule:
        """Return the update rule.

        Raises:
            ConfigError: If the function of ``factory`` cannot be imported, or its optimizer is not
                element-wise.
        """
        if self.factory is not None:
            return _own_rule(self.factory)
        dtype = self.moments_dtype
        if self.name == "sgd":
            return SGD(momentum=self.momentum, nesterov=self.nesterov, moments_dtype=dtype)
        if self.name == "lion":
            return Lion(beta1=self.beta1, beta2=self.beta2, moments_dtype=dtype)
        adam = Adam if self.name == "adam" else AdamW
        rule = adam(beta1=self.beta1, beta2=self.beta2, eps=self.eps, moments_dtype=dtype)
        if self.name == "adamw_8bit":
            return AdamW8bit(beta1=self.beta1, beta2=self.beta2, eps=self.eps, others=rule)
        return self._muon(others=rule) if self.name == "muon" else rule

    def _muon(self, *, others: UpdateRule) -> Muon:
        muon = self.muon
        adamw_lr = self.lr if muon.adamw_lr is None else muon.adamw_lr
        return Muon(
            momentum=muon.momentum,
            nesterov=muon.nesterov,
            coefficients=muon.coefficients,
            steps=muon.num_iterations,
            scale=muon.scale,
            precision=muon.precision,
            moments_dtype=self.moments_dtype,
            others=others,
            others_lr_scale=1.0 if adamw_lr == self.lr else adamw_lr / self.lr,
        )

    def has(self, hyperparameter: str) -> bool:
        """Return whether a hyperparameter is one of the optimizer."""
        is_own = self.factory is not None
        names = {"sgd": {"momentum"}, "lion": {"beta1", "beta2"}}
        return not is_own and hyperparameter in names.get(self.name, {"beta1", "beta2", "eps"})

    def of_parameters(self) -> list[OptimizerConfig]:
        """Return the settings of the run, and those that groups of trained parameters have."""
        own = [group.optimizer_of(self) for group in self.groups if group.optimizer != "none"]
        return [self, *own]

    def _uses_muon(self) -> bool:
        return any(own.name == "muon" and own.factory is None for own in self.of_parameters())

    def rate_options(self) -> RateOptions:
        """Return the shape of the learning rate."""
        return RateOptions(
            lr=self.lr,
            min_lr=self.min_lr,
            schedule=self.schedule,
            warmup=self.warmup,
            warmup_from=self.warmup_from,
            decay_end=self.decay_end,
            tail_length=self.tail_length,
            tail_shape=self.tail_shape,
        )

    def rate_of_run(
        self,
        *,
        steps: int,
        global_batch_size: int,
        seq_length: int,
        sample_offset: int = 0,
        token_offset: int = 0,
    ) -> RunRate:
        """Return the learning rate of a run by step.

        Args:
            steps: Steps of the whole run.
            global_batch_size: Samples per step.
            seq_length: Tokens per sample.
            sample_offset: Samples of earlier steps beyond ``global_batch_size`` of each.
            token_offset: Tokens of earlier steps beyond those of each step now.
        """
        offsets = {"steps": 0, "samples": sample_offset, "tokens": token_offset}
        sizes = {"samples": global_batch_size, "tokens": global_batch_size * seq_length}
        return RunRate(
            options=self.rate_options(),
            steps=steps,
            step_size=sizes.get(self.schedule_unit, 1),
            offset=offsets[self.schedule_unit],
        )

    @property
    def sharded_instances(self) -> int:
        """Instances that shard the state; 1 without sharding, where all ranks form one."""
        return self.num_instances if self.distributed else 1

    _check_factory = field_validator("factory")(check_object_name)

    @field_validator("loss_scale")
    @classmethod
    def _check_loss_scale(cls, scale: float) -> float:
        if math.frexp(scale)[0] != 0.5:
            lower = 2.0 ** math.floor(math.log2(scale))
            raise ValueError(
                f"loss_scale = {scale:g} is no power of two, so it would change bits; "
                f"nearest: {lower:g}, {2 * lower:g}"
            )
        return scale

    @model_validator(mode="after")
    def _check_muon(self) -> Self:
        muon = self.muon
        if self.lr == 0.0 and muon.adamw_lr and self._uses_muon():
            raise ValueError(
                f"muon.adamw_lr = {muon.adamw_lr:g} is a multiple of lr, which is 0; set lr above 0"
            )
        if muon.coefficients == "cubic5" and muon.num_iterations not in (None, 5):
            raise ValueError(
                f"muon.num_iterations must be 5 with the coefficients cubic5, got "
                f"{muon.num_iterations}"
            )
        return self

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        for number, group in enumerate(self.groups, start=1):
            for name in ("beta1", "beta2"):
                own = group.optimizer_of(self)
                if getattr(group, name) is not None and not own.has(name):
                    shown = "optimizer.factory" if own.factory else own.name
                    raise ValueError(
                        f"groups number {number} ({group.pattern!r}) sets {name}, which {shown} "
                        "has not; leave it out, or choose another optimizer for the group"
                    )
        return self

    @model_validator(mode="after")
    def _check_rates(self) -> Self:
        for name, rate in {"min_lr": self.min_lr, "warmup_from": self.warmup_from}.items():
            if rate is not None and rate > self.lr:
                raise ValueError(
                    f"{name} = {rate:g} is above lr = {self.lr:g}; use at most {self.lr:g}"
                )
        return self


def _own_rule(factory: str) -> TorchOptimizer:
    """Return the rule of an optimizer of the user's own, after a trial of it."""
    rule = TorchOptimizer(factory=import_object(factory, setting="optimizer.factory"))
    try:
        _ = rule.state
    except ValueError as error:
        raise ConfigError(f'optimizer.factory = "{factory}": {error}') from error
    return rule
