"""The configuration as frozen models: one class per section of the TOML file.

Every field carries its default, its range and one sentence of meaning; ``docs/configuration.md``
is made from them. A rule that concerns one section is checked here; a rule between sections, or
with the number of processes, lives in ``megacore.config.resolve``. A default of ``None`` means
"derived": ``resolve`` fills it in.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, Self

from pydantic import Field, PrivateAttr, field_validator, model_validator

from megacore._core import ScheduleInfo, schedule_catalog
from megacore.config.base import Origins, Section, filled, nearest_divisors, nearest_multiples
from megacore.config.graphs import GraphsConfig
from megacore.config.moe import MoEConfig

AXES = ("tp", "cp", "ep", "dp", "pp")
RECOMPUTE_MODULES = ("norm", "attention", "activation", "mlp", "moe")
MAX_TIMEOUT_S = 7 * 86400.0
SCHEDULES = (*(info.name for info in schedule_catalog()), "auto")

if TYPE_CHECKING:
    ScheduleName = str
else:
    ScheduleName = Literal[SCHEDULES]


class ModelConfig(Section):
    """``[model]``: the shape of the GPT."""

    hidden_size: int = Field(default=128, ge=1, description="Width of the residual stream.")
    num_layers: int = Field(default=4, ge=1, description="Number of transformer layers.")
    num_heads: int = Field(
        default=4,
        ge=1,
        description="Attention heads; must divide `hidden_size` unless `head_dim` is set.",
    )
    head_dim: int | None = Field(
        default=None,
        ge=2,
        multiple_of=2,
        description="Width of one attention head, even. Default: `hidden_size` / `num_heads`.",
    )
    num_kv_heads: int | None = Field(
        default=None,
        ge=1,
        description="Heads of keys and values (grouped-query attention); must divide `num_heads`. "
        "Default: `num_heads`.",
    )
    ffn_hidden_size: int | None = Field(
        default=None,
        ge=1,
        description="Inner width of the SwiGLU. "
        "Default: 8/3 of `hidden_size`, rounded up to a multiple of 64.",
    )
    vocab_size: int | None = Field(
        default=None,
        ge=1,
        description="Number of tokens in the vocabulary. Default: the tokenizer's.",
    )
    vocab_pad_multiple: int = Field(
        default=128,
        ge=1,
        description="The embedding gets rows up to a multiple of this number; "
        "`parallel.tp` must divide it.",
    )
    seq_length: int = Field(default=128, ge=1, description="Tokens per sequence.")
    num_mtp_layers: int = Field(
        default=0,
        ge=0,
        description="Layers for multi-token prediction: the k-th predicts the token k places after "
        "the next one. They help to train the model; generation leaves them out.",
    )
    mtp_loss_coef: float = Field(
        default=0.1, ge=0.0, description="Weight of the mean loss of multi-token prediction."
    )
    tie_embeddings: bool = Field(
        default=True, description="Use one matrix for the token embedding and the output layer."
    )
    dropout: float = Field(default=0.0, ge=0.0, lt=1.0, description="Dropout probability.")
    rope_base: float = Field(default=10000.0, gt=0.0, description="Base of the rotary embedding.")
    norm_eps: float = Field(default=1e-5, gt=0.0, description="Epsilon of RMSNorm.")
    qk_norm: bool = Field(
        default=False, description="RMSNorm of each head's query and key before the rotation."
    )
    init_std: float = Field(
        default=0.02, gt=0.0, description="Standard deviation of initial weights."
    )

    @property
    def mtp_layers(self) -> range:
        """Global indices of the layers for multi-token prediction, behind all others.

        Example:
            >>> ModelConfig(num_layers=4, num_mtp_layers=2).mtp_layers
            range(4, 6)
        """
        return range(self.num_layers, self.num_layers + self.num_mtp_layers)

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the full embedding: ``vocab_size`` up to a multiple of ``vocab_pad_multiple``.

        It does not depend on ``parallel.tp``, so a checkpoint fits every layout.

        Example:
            >>> ModelConfig(vocab_size=300).padded_vocab_size
            384
        """
        unit = self.vocab_pad_multiple
        return -(-filled(self.vocab_size) // unit) * unit

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.head_dim is None:
            self._check_derived_head_dim()
        if self.num_kv_heads is not None and self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_kv_heads = {self.num_kv_heads} does not divide num_heads = {self.num_heads}; "
                f"nearest: {nearest_divisors(self.num_kv_heads, self.num_heads)}"
            )
        return self

    def _check_derived_head_dim(self) -> None:
        if self.hidden_size % self.num_heads:
            raise ValueError(
                f"hidden_size = {self.hidden_size} is not a multiple of num_heads = "
                f"{self.num_heads}; nearest hidden_size: "
                f"{nearest_multiples(self.hidden_size, self.num_heads)}, or set head_dim"
            )
        head_dim = self.hidden_size // self.num_heads
        if head_dim % 2:
            raise ValueError(
                f"hidden_size / num_heads = {head_dim} is odd, but rotary embedding turns "
                f"pairs; nearest hidden_size: "
                f"{nearest_multiples(self.hidden_size, 2 * self.num_heads)}, or set head_dim"
            )


class ParallelConfig(Section):
    """``[parallel]``: how many ranks share what. ``dp`` follows from the number of processes."""

    tp: int = Field(
        default=1, ge=1, description="Tensor parallel size: ranks that share each layer."
    )
    cp: int = Field(
        default=1, ge=1, description="Context parallel size: ranks that share each sequence."
    )
    pp: int = Field(
        default=1, ge=1, description="Pipeline parallel size: parts of the model in a row."
    )
    ep: int = Field(
        default=1, ge=1, description="Expert parallel size: ranks that share the experts."
    )
    etp: int | None = Field(
        default=None, ge=1, description="Tensor parallel size inside an expert. Default: `tp`."
    )
    order: str = Field(
        default="tp-cp-ep-dp-pp", description="Axes from adjacent ranks to far ones, joined by `-`."
    )
    sequence_parallel: bool = Field(
        default=False,
        description="Split the activations between tensor parallel regions along the sequence.",
    )

    @field_validator("order")
    @classmethod
    def _check_order(cls, order: str) -> str:
        axes = order.split("-")
        for axis in axes:
            if axis not in AXES:
                raise ValueError(f'axis "{axis}" is unknown; the axes are {", ".join(AXES)}')
            if axes.count(axis) > 1:
                raise ValueError(f'axis "{axis}" is named {axes.count(axis)} times; name it once')
        return order

    @model_validator(mode="after")
    def _check_order_is_complete(self) -> Self:
        named = self.order.split("-")
        for axis in ("tp", "cp", "ep", "pp"):
            size = getattr(self, axis)
            if size > 1 and axis not in named:
                raise ValueError(
                    f'order = "{self.order}" leaves out {axis}, which has size {size}; '
                    f'for example "{"-".join(AXES)}"'
                )
        return self


class PipelineConfig(Section):
    """``[pipeline]``: the schedule and the way layers are dealt to stages."""

    schedule: ScheduleName = Field(
        default="1f1b",
        description="Order of forward and backward passes; `megacore schedule --compare` shows all "
        "of them for given sizes. `auto` searches for the best one.",
    )
    num_chunks: int | None = Field(
        default=None,
        ge=1,
        description="Model chunks per pipeline rank. Default: what the schedule has; 2 where it "
        "can have any number, 1 for `no_pipelining` and `auto`.",
    )
    placement: Literal["loop", "v"] = Field(
        default="loop",
        description="Where `auto` puts the stages: in a loop over the ranks, or down the ranks and "
        "back up (needs 2 chunks). The other schedules have a placement of their own.",
    )
    memory_limit: int | None = Field(
        default=None,
        ge=1,
        description="For `auto`: stage activations that a rank may hold. Default: as many as it "
        "takes.",
    )
    overlap_p2p: bool | None = Field(
        default=None,
        description="Let messages between stages travel beside compute, with receives posted "
        "ahead. On NCCL this makes two more process groups per pipeline. Default: on with gloo, "
        "off with NCCL.",
    )
    overlap_moe: bool = Field(
        default=False,
        description="Compute one microbatch while rows of another travel to and from experts. "
        "For `dualpipe_v`, which pairs forwards with backwards, with `parallel.ep` > 1 and the "
        "dispatchers `alltoall` and `static`. Changes no bit.",
    )
    debug_messages: bool = Field(
        default=False,
        description="Let a header travel ahead of each message between stages, and stop with both "
        "names if a message is not the one expected. Slower.",
    )
    group_size: int | None = Field(
        default=None,
        ge=1,
        description="Microbatches that run through one chunk before the next (interleaved "
        "schedules). Default: the smallest with which a step is shortest.",
    )
    first_layers: int | None = Field(
        default=None,
        ge=1,
        description="Layers of the first pipeline rank, over its chunks; the others share the rest "
        "evenly, so it lets `num_layers` be uneven. Default: as many as the others.",
    )
    last_layers: int | None = Field(
        default=None,
        ge=1,
        description="Layers of the last pipeline rank, over its chunks; the others share the rest "
        "evenly. Default: as many as the others.",
    )
    account_for_embedding: bool = Field(
        default=False, description="Count the embedding as one layer when layers are dealt out."
    )
    account_for_loss: bool = Field(
        default=False,
        description="Count the output layer and loss as one layer when layers are dealt out.",
    )
    layout: str | None = Field(
        default=None,
        description="All stages as a text, instead of the four settings before: `E` embedding, `t` "
        "layer, `m` layer for multi-token prediction, `L` output layer and loss, `|` next stage, "
        "`x*3`, `( )`; as in `Et|(tt|)*2tL`. "
        "Default: layers are dealt evenly.",
    )

    @property
    def schedule_info(self) -> ScheduleInfo | None:
        """What is known of the schedule; ``None`` for ``auto``."""
        return next((info for info in schedule_catalog() if info.name == self.schedule), None)

    @property
    def is_v(self) -> bool:
        """Whether the stages go down the ranks and back up, so that one rank holds both ends."""
        info = self.schedule_info
        return self.placement == "v" if info is None else info.placement == "v"

    @property
    def chunks(self) -> int:
        """Model chunks per rank, given or derived.

        Example:
            >>> [PipelineConfig(schedule=name).chunks for name in ("1f1b", "zb_v", "looped_bfs")]
            [1, 2, 2]
        """
        if self.num_chunks is not None:
            return self.num_chunks
        info = self.schedule_info
        if info is None:
            return 2 if self.is_v else 1
        return info.num_chunks or (1 if info.name == "no_pipelining" else 2)


class OptimizerConfig(Section):
    """``[optimizer]``: AdamW, the learning rate over time, gradient clipping, ZeRO-1."""

    lr: float = Field(default=3e-3, ge=0.0, description="Highest learning rate.")
    min_lr: float | None = Field(
        default=None, ge=0.0, description="Learning rate after the decay. Default: `lr` / 10."
    )
    warmup_steps: int = Field(default=0, ge=0, description="Steps of linear rise from 0 to `lr`.")
    schedule: Literal["cosine", "wsd", "constant"] = Field(
        default="cosine",
        description="Shape after the warmup: cosine decay, warmup-stable-decay, or constant.",
    )
    decay_steps: int | None = Field(
        default=None,
        ge=0,
        description="cosine: the step at which `min_lr` is reached (default `train.steps`); "
        "wsd: length of the final decay (default 20% of `train.steps`); constant: unused.",
    )
    weight_decay: float = Field(default=0.1, ge=0.0, description="AdamW weight decay of matrices.")
    beta1: float = Field(
        default=0.9, ge=0.0, lt=1.0, description="AdamW decay of the first moment."
    )
    beta2: float = Field(
        default=0.95, ge=0.0, lt=1.0, description="AdamW decay of the second moment."
    )
    eps: float = Field(default=1e-8, gt=0.0, description="AdamW epsilon.")
    clip_grad: float = Field(
        default=1.0, ge=0.0, description="Largest global gradient norm; 0 turns clipping off."
    )
    distributed: bool = Field(
        default=True, description="Shard the optimizer state over data parallel ranks (ZeRO-1)."
    )
    num_instances: int = Field(
        default=1,
        ge=1,
        description="Hybrid sharding: this many copies of the sharded optimizer state, each on "
        "neighbouring data parallel ranks.",
    )
    average_in_collective: bool = Field(
        default=True,
        description="Divide summed gradients by the number of ranks; `false` scales them before "
        "they are summed.",
    )
    grad_dtype: Literal["float32", "param"] = Field(
        default="float32",
        description="Number format in which gradients are accumulated and communicated: float32, "
        "or that of the parameters (`train.dtype`), which takes half the memory in 16 bits.",
    )
    fp32_accumulation: bool = Field(
        default=False,
        description="Add 16-bit gradients of different ranks in float32 on NCCL as well: slices "
        "are exchanged in 16 bits and added locally. On the CPU they always are.",
    )
    moments_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32", description="Number format of AdamW's moments."
    )
    loss_scale: float = Field(
        default=65536.0,
        ge=1.0,
        description="First loss scale of float16 training; it adapts itself. A power of two.",
    )
    loss_scale_interval: int = Field(
        default=1000,
        ge=1,
        description="Steps without overflow after which the loss scale doubles.",
    )
    bucket_numel: int | None = Field(
        default=None,
        ge=1,
        description="Elements per gradient bucket. Default: chosen from the data parallel size.",
    )
    pad_buckets: bool = Field(
        default=False,
        description="Pad buckets to multiples of 2^16 elements, which rings of many ranks may "
        "carry faster.",
    )
    overlap_grad_reduce: bool = Field(
        default=False,
        description="Average the gradients of a bucket while the backward pass still runs.",
    )
    overlap_param_gather: bool = Field(
        default=False,
        description="Collect updated parameters while the next forward pass runs.",
    )

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
    def _check_instances(self) -> Self:
        if self.num_instances > 1 and not self.distributed:
            raise ValueError(
                f"num_instances = {self.num_instances} needs distributed = true: without sharding "
                "every rank is an instance of its own; set num_instances = 1"
            )
        return self

    @model_validator(mode="after")
    def _check_min_lr(self) -> Self:
        if self.min_lr is not None and self.min_lr > self.lr:
            raise ValueError(
                f"min_lr = {self.min_lr:g} is above lr = {self.lr:g}; use at most {self.lr:g}"
            )
        return self


class DataConfig(Section):
    """``[data]``: the text, its tokenizer, and the part kept for validation."""

    source: str = Field(
        default="python-docs",
        min_length=1,
        description="`python-docs` or `stdlib` (text that comes with Python), a text file, a "
        "folder, or the prefix of a `.bin`/`.idx` pair.",
    )
    tokenizer: str = Field(
        default="bytes", min_length=1, description="`bytes`, or the path of a `tokenizer.json`."
    )
    split: str = Field(
        default="95,5", description="Shares of training and validation data, as weights: `95,5`."
    )

    @property
    def split_fractions(self) -> tuple[float, ...]:
        """Shares that sum to 1: training, validation and, if a third weight is given, a rest.

        Example:
            >>> DataConfig(split="3,1").split_fractions
            (0.75, 0.25)
        """
        weights = [float(part) for part in self.split.split(",")]
        return tuple(weight / sum(weights) for weight in weights)

    @field_validator("split")
    @classmethod
    def _check_split(cls, split: str) -> str:
        rule = 'expected two or three weights like "95,5", none negative, the first above 0'
        try:
            weights = [float(part) for part in split.split(",")]
        except ValueError:
            raise ValueError(rule) from None
        in_range = all(0.0 <= weight < float("inf") for weight in weights)
        if len(weights) not in (2, 3) or not in_range or weights[0] == 0.0:
            raise ValueError(rule)
        return split


class TrainSectionConfig(Section):
    """``[train]``: steps, batch sizes, number format, seed, validation."""

    steps: int = Field(default=100, ge=1, description="Number of optimizer steps.")
    microbatch_size: int = Field(
        default=4, ge=1, description="Sequences per forward pass of one rank."
    )
    global_batch_size: int = Field(
        default=32, ge=1, description="Sequences per optimizer step, all ranks."
    )
    loss_normalization: Literal["microbatch", "token"] = Field(
        default="microbatch",
        description="How losses of tokens become one: the mean over each microbatch, then over "
        "microbatches; or the mean over all tokens of the global batch. The same unless some "
        "tokens do not count (labels below 0).",
    )
    dtype: Literal["float32", "bfloat16", "float16"] = Field(
        default="float32",
        description="Number format of weights and activations; main weights are float32.",
    )
    recompute: Literal["none", "selective", "full"] = Field(
        default="none",
        description="Activations that are not kept for the backward pass but made again in it: "
        "none; those of `recompute_modules`; or all of a layer but its input. Changes no bit.",
    )
    recompute_modules: str = Field(
        default="norm,attention,activation",
        description="For `selective`, joined by commas: `norm` (those before matrix products), "
        "`attention` (all between its two products), `activation` (SwiGLU of dense MLPs), `mlp` "
        "(whole dense MLPs), `moe` (whole MoE layers). The default is cheap: no product with a "
        "weight is computed again.",
    )
    recompute_keep: int = Field(
        default=0,
        ge=0,
        description="Of the microbatches that a pipeline rank holds at once, counted per chunk, "
        "this many keep all activations; only the others are recomputed.",
    )
    seed: int = Field(default=1234, ge=0, description="Seed of weights, data order and dropout.")
    eval_interval: int = Field(
        default=50, ge=0, description="Steps between validations; 0 turns them off."
    )
    eval_steps: int = Field(default=4, ge=1, description="Global batches per validation.")

    @property
    def recomputed(self) -> frozenset[str]:
        """What is recomputed: ``{"layer"}``, or parts of layers.

        Example:
            >>> sorted(TrainSectionConfig(recompute="selective").recomputed)
            ['activation', 'attention', 'norm']
        """
        if self.recompute == "selective":
            return frozenset(self.recompute_modules.split(","))
        return frozenset({"layer"} if self.recompute == "full" else ())

    @field_validator("recompute_modules")
    @classmethod
    def _check_modules(cls, modules: str) -> str:
        for name in modules.split(","):
            if name not in RECOMPUTE_MODULES:
                raise ValueError(
                    f'"{name}" is no part that can be recomputed; join some of '
                    f"{', '.join(RECOMPUTE_MODULES)} by commas"
                )
        return modules

    @model_validator(mode="after")
    def _check_recompute(self) -> Self:
        if self.recompute_keep > 0 and self.recompute == "none":
            raise ValueError(
                f"recompute_keep = {self.recompute_keep} exempts microbatches from recomputation, "
                'but recompute = "none"; set it to "selective" or "full", or recompute_keep to 0'
            )
        return self


class CheckpointConfig(Section):
    """``[checkpoint]``: where and when to save, and what to start from."""

    dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of checkpoints. Default: `<run.dir>/checkpoints`.",
    )
    interval: int = Field(
        default=0,
        ge=-1,
        description="Steps between checkpoints; 0 saves only at the end, -1 never.",
    )
    keep: int = Field(default=2, ge=1, description="Number of newest checkpoints that are kept.")
    in_background: bool = Field(
        default=False,
        alias="async",
        description="Copy the state to host memory and go on training while it is written.",
    )
    on_failure: Literal["stop", "continue"] = Field(
        default="stop",
        description="What a checkpoint that cannot be written does to the run.",
    )
    resume: str | None = Field(
        default=None,
        min_length=1,
        description="`auto` continues from the newest checkpoint if there is one; a path continues "
        "from that checkpoint. Default: start anew.",
    )


class RunConfig(Section):
    """``[run]``: the run's folder, its processes and their supervision."""

    dir: str | None = Field(
        default=None,
        min_length=1,
        description="Folder of all that the run writes. Default: `runs/<name>`.",
    )
    name: str = Field(
        default="default",
        min_length=1,
        description="Name of the run, without slashes; use `dir` for another folder.",
    )
    nproc: int | None = Field(
        default=None,
        ge=1,
        description="Processes to start (as `--nproc`). "
        "Default: one per GPU; without GPUs as few as the layout allows.",
    )
    backend: Literal["gloo", "nccl"] | None = Field(
        default=None,
        description="Communication library. Default: `nccl` with a GPU, else `gloo`.",
    )
    host_memory: bool = Field(
        default=True,
        description="Let `gloo` groups whose ranks share a host exchange tensors through shared "
        "memory.",
    )
    timeout_s: float = Field(
        default=300.0,
        gt=0.0,
        le=MAX_TIMEOUT_S,
        description="Seconds after which a collective operation gives up; at most a week.",
    )
    peer_timeout_s: float = Field(
        default=20.0,
        ge=1.0,
        le=MAX_TIMEOUT_S,
        description="Seconds of silence after which a rank counts as lost; at most a week.",
    )
    trace_step: int | None = Field(
        default=None,
        ge=-1,
        description="Step (from 0) whose timeline is recorded; -1 for none. Default: `steps` / 2.",
    )
    plain: bool = Field(
        default=False, description="Print plain lines instead of a live progress bar."
    )

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if "/" in name or "\0" in name or name in (".", ".."):
            raise ValueError("must be the name of one folder in runs/; set run.dir for another one")
        return name


class Config(Section):
    """A whole configuration. Made by `load_config`, completed by `resolve`."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    moe: MoEConfig = MoEConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    graphs: GraphsConfig = GraphsConfig()
    data: DataConfig = DataConfig()
    train: TrainSectionConfig = TrainSectionConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()

    _origins: Origins = PrivateAttr(default_factory=Origins)

    def origin(self, key: str) -> str:
        """Where ``"section.key"`` was set: ``file:line``, the override, or ``default``."""
        return self._origins.where.get(key, "default")

    def with_origins(self, where: Mapping[str, str]) -> Config:
        """The same configuration with the places its values came from."""
        copy = self.model_copy()
        copy._origins = Origins(MappingProxyType(dict(where)), self.derived)
        return copy

    @property
    def derived(self) -> frozenset[str]:
        """The keys, as ``"parallel.etp"``, whose value `resolve` computed because none was set."""
        return self._origins.derived

    def with_derived(self, keys: Iterable[str]) -> Config:
        """The same configuration, which knows that the values of ``keys`` were computed."""
        copy = self.model_copy()
        copy._origins = Origins(self._origins.where, self.derived | frozenset(keys))
        return copy

    def dp(self, world_size: int) -> int:
        """Data parallel size in a world of ``world_size`` ranks that the layout divides."""
        return world_size // (self.parallel.tp * self.parallel.cp * self.parallel.pp)

    def num_microbatches(self, world_size: int) -> int:
        """Microbatches per data parallel rank and optimizer step."""
        return self.train.global_batch_size // (self.train.microbatch_size * self.dp(world_size))


def section_classes() -> dict[str, type[Section]]:
    """Section name to its class, in the order of the file; ``moe.echo`` is inside of ``moe``."""
    classes: dict[str, type[Section]] = {}
    for name, outer in Config.inner_sections().items():
        classes[name] = outer
        classes |= {f"{name}.{inner}": cls for inner, cls in outer.inner_sections().items()}
    return classes
