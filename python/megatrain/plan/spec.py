"""The model and the layout of a run as plain numbers: the inputs of every prediction."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from megatrain.config import EchoConfig, MLAConfig, MoEConfig
from megatrain.config.schedule_file import ScheduleFile
from megatrain.models.shape import block_columns
from megatrain.plan.updates import Updates

_NO_CLONES, _NO_LATENT, _NO_EXPERTS = EchoConfig(), MLAConfig(), MoEConfig()


@dataclass(frozen=True, kw_only=True)
class KeptInputs:
    """Share of the layers that keep the inputs of these products for the gradients of weights.

    Frozen weights need no input, unless they have an adapter.

    Attributes:
        qkv: Projections before attention.
        out: Projection after attention, whose input attention keeps in any case.
        router: Router and shared experts, which take the input of a layer with experts.
        up: First layer of an MLP or of experts.
        down: Second layer of an MLP or of experts.
    """

    qkv: float = 1.0
    out: float = 1.0
    router: float = 1.0
    up: float = 1.0
    down: float = 1.0


_ALL_KEPT = KeptInputs()


@dataclass(frozen=True, kw_only=True)
class ModelSpec:
    """Shape of a transformer; sizes are those of the whole model, named as in ``[model]``.

    Attributes:
        gated: MLPs of dense layers and shared experts have a gate (SwiGLU).
        moe_layers: Whether each layer has experts, those for multi-token prediction at the end
            included.
        windows: Windows of attention in tokens, repeated over the layers; 0 for none.
        has_chunks: The windows are chunks of the sequence, and do not slide.
        frozen_weights: Weights that a token is multiplied with and that have no gradient.
        adapter_weights: Weights of adapters that a token is multiplied with.
    """

    num_layers: int
    hidden_size: int
    ffn_hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    padded_vocab_size: int
    seq_length: int
    tie_embeddings: bool = False
    gated: bool = True
    qk_norm: bool = False
    mla: MLAConfig = _NO_LATENT
    moe: MoEConfig = _NO_EXPERTS
    moe_layers: tuple[bool, ...] = ()
    num_mtp_layers: int = 0
    windows: tuple[int, ...] = (0,)
    has_chunks: bool = False
    frozen_weights: float = 0.0
    adapter_weights: float = 0.0

    @property
    def expert_width(self) -> int:
        """Inner width of an expert."""
        return self.moe.ffn_hidden_size or self.ffn_hidden_size

    @cached_property
    def qkv_matrices(self) -> tuple[tuple[int, int, bool], ...]:
        """Projections before attention as (outputs, inputs, split over tp)."""
        heads, hidden, mla = self.num_heads, self.hidden_size, self.mla
        if not mla.kv_rank:
            return (((heads + 2 * self.num_kv_heads) * self.head_dim, hidden, True),)
        query = heads * (mla.nope_head_dim + mla.rope_head_dim)
        queries = (
            ((mla.q_rank, hidden, False), (query, mla.q_rank, True))
            if mla.q_rank
            else ((query, hidden, True),)
        )
        return (
            *queries,
            (mla.kv_rank + mla.rope_head_dim, hidden, False),
            (heads * (mla.nope_head_dim + mla.v_head_dim), mla.kv_rank, True),
        )

    @cached_property
    def head_dims(self) -> tuple[int, int]:
        """Widths of a head's query and value."""
        if self.mla.kv_rank:
            return self.mla.nope_head_dim + self.mla.rope_head_dim, self.mla.v_head_dim
        return self.head_dim, self.head_dim

    def attention_params(self, tp: int = 1) -> float:
        """Weights of attention on a rank."""
        before = sum(n * k / (tp if split else 1) for n, k, split in self.qkv_matrices)
        return before + self.hidden_size * self.num_heads * self.head_dims[1] / tp

    @property
    def expert_params(self) -> int:
        """Weights of one expert."""
        return (3 if self.moe.gated else 2) * self.expert_width * self.hidden_size

    def layer_params(self, moe: bool, tp: int = 1, expert_shards: int = 1) -> tuple[float, float]:
        """Weights of a layer on a rank: those of all ranks' data, and those of experts."""
        hidden, mla, experts = self.hidden_size, self.mla, self.moe
        latents = mla.q_rank + mla.kv_rank if mla.kv_rank else 0
        norms = 2 * hidden + 2 * self.qk_norm * self.head_dim + latents
        shared = self.attention_params(tp) + norms
        if not moe:
            return shared + (3 if self.gated else 2) * self.ffn_hidden_size * hidden / tp, 0.0
        matrices = 3 if self.gated else 2
        shared += experts.num_experts * hidden
        shared += matrices * experts.shared_ffn_hidden_size * hidden / tp
        shared += experts.shared_gate * hidden
        return shared, experts.num_experts * self.expert_params / expert_shards

    @cached_property
    def mean_keys(self) -> float:
        """Keys that a token attends to, averaged over tokens and layers; ``seq / 2`` if causal.

        In chunks of ``W`` tokens, ``W / 2``, and of a shorter last one likewise.

        Example:
            >>> spec = ModelSpec(num_layers=2, hidden_size=8, ffn_hidden_size=8, num_heads=1,
            ...                  num_kv_heads=1, head_dim=8, padded_vocab_size=8, seq_length=16,
            ...                  moe_layers=(False, False), windows=(4, 0))
            >>> spec.mean_keys  # (4 - 4 * 4 / 32 + 8) / 2
            5.75
        """
        reach = [min(window or self.seq_length, self.seq_length) for window in self.windows]
        layers = range(max(1, len(self.moe_layers)))
        keys = (reach[layer % len(reach)] for layer in layers)
        if self.has_chunks:
            length = self.seq_length
            squares = (length // count * count**2 + (length % count) ** 2 for count in keys)
            return sum(each / (2 * length) for each in squares) / len(layers)
        return sum(count - count * count / (2 * self.seq_length) for count in keys) / len(layers)

    @property
    def flops_per_token(self) -> float:
        """Operations of a training step per token: the model's, with nothing recomputed.

        ``6 * W + 12 * L * K * A``: a weight costs 2 operations forward and 4 backward. W counts the
        weights that a token is multiplied with: chosen experts only, the router, the output layer
        with the padding of its vocabulary, not the embedding. L layers attend to K keys on average
        (:attr:`mean_keys`, the causal half); A is the number of heads times the mean width of a
        query and a value. Frozen weights cost 2 operations less.

        Source:
            Chowdhery et al., arXiv:2204.02311, appendix B, with half of its attention.
        """
        depths, hidden = self.num_mtp_layers, self.hidden_size
        head = (1 + depths) * self.padded_vocab_size * hidden + depths * 2 * hidden**2
        by_kind = {moe: sum(self._forward(moe).values()) for moe in set(self.moe_layers)}
        changed = 6 * self.adapter_weights - 2 * self.frozen_weights
        return 3 * (2 * head + sum(by_kind[moe] for moe in self.moe_layers)) + changed

    def recomputed_flops_per_token(self, parts: Collection[str]) -> float:
        """Operations per token of passes that recomputation repeats.

        Args:
            parts: Recomputed parts, as in ``train.recompute``, or ``layer`` for all of one.
        """
        total = 0.0
        for moe in self.moe_layers:
            forward = self._forward(moe)
            total += sum(ops for part, ops in forward.items() if {part, "layer"} & set(parts))
        return total

    def _forward(self, moe: bool) -> dict[str, float]:
        """Operations of a layer's forward pass per token: projections, attention, MLP or MoE."""
        experts, hidden = self.moe, self.hidden_size
        if moe:
            weights = experts.top_k * self.expert_params + experts.num_experts * hidden
            matrices = 3 if self.gated else 2
            weights += (matrices * experts.shared_ffn_hidden_size + experts.shared_gate) * hidden
        else:
            weights = (3 if self.gated else 2) * self.ffn_hidden_size * hidden
        return {
            "projections": 2 * self.attention_params(),
            "attention": 2 * self.num_heads * self.mean_keys * sum(self.head_dims),
            "moe" if moe else "mlp": 2 * weights,
        }

    @property
    def num_params(self) -> float:
        """All parameters."""
        layers = sum(sum(self.layer_params(moe)) for moe in self.moe_layers)
        embeddings = (1 if self.tie_embeddings else 2) * self.padded_vocab_size * self.hidden_size
        return embeddings + self.hidden_size + layers + self.num_mtp_layers * self.mtp_params

    @property
    def mtp_params(self) -> float:
        """Weights of a multi-token prediction layer besides its transformer layer."""
        return 2 * self.hidden_size**2 + 3 * self.hidden_size


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """Layout, number formats and choices of a run; every field can move the result.

    Attributes:
        gpus: Number of ranks.
        microbatch: Sequences per forward pass.
        global_batch: Sequences per step.
        zero: Sharding over data parallel ranks: 0 nothing, 1 optimizer state, 3 everything (FSDP).
        precision: Format of matrix products: fp32, bf16, fp16, fp8, fp8-cs, fp8-ds, fp8-blk or
            mxfp8.
        param_bytes: Bytes of a weight on every rank.
        grad_bytes: Bytes of a gradient.
        state_bytes: Bytes per weight of optimizer state.
        updates: Parameters that the optimizer updates. Default: AdamW for all.
        recompute: Parts that are recomputed: ``layer``, or parts as in ``train.recompute``. Of
            published runs also ``scores`` (of attention), ``kv_up`` (the projection of latents to
            keys and values), ``expert_activation`` and ``products`` (every second one).
        recompute_keep: Microbatches in flight per chunk that keep all activations.
        offload_layers: Layers whose activations are moved to the host.
        overlap: Communication that overlaps with compute: of dp, tp, pp, ep, cp; of dp also the
            part of the gradients (``grads``) or of the parameters (``params``) alone.
        dispatcher: Transport of tokens to experts: alltoall, deepep, hybridep, allgather.
        imbalance: Load of the busiest expert rank over the mean; 1 if routing is balanced, about
            1.4 for a router that starts from scratch. Clones lower it, see `load`.
        echo: Clones of experts on ranks with spare slots.
        clones_made: Whether slots are filled in each microbatch; not if routing is forced to be
            balanced.
        fused_experts: Quantization, permutation and activation are part of the experts' products.
        graphs: CUDA graphs: off, partial or full.
        attention: flash (FlashAttention 3 or cuDNN), flash2, or unfused (scores are stored).
        loss: fused, unfused or eager; how logits are stored. megacore's own runs compute large
            ones in blocks, see `loss_columns`.
        instances: Copies of the sharded optimizer state.
        stages: Layers of each stage as counts; empty to distribute them evenly by cost.
        cp_comm: Context parallelism by a "ring" of keys and values, as published runs have it, by
            "allgather" of them, or "a2a" of heads.
        plain_autograd: Tensors are saved as megacore's layers save them: inputs gathered for
            sequence parallelism are kept instead of gathered again, and output gradients wait
            beside the activations from I to W.
        keeps_permuted: Permuted rows are kept beside the input of the experts.
        group_size: Microbatches that run through one chunk before the next (interleaving).
        memory_limit: Activations that a rank may hold in a schedule that is searched for.
        pairs: Forwards run in pairs with ``whole`` or ``split`` backwards of other microbatches, as
            with `pipeline.overlap_moe`; this holds more activations.
        placement: Placement of stages in a schedule that is searched for, else ``None``.
        schedule_file: Content of `pipeline.schedule_file`; `schedule` is its path.
        order: Axes from adjacent ranks to far ones.
        kept_inputs: Inputs of products that are kept.
    """

    gpus: int
    tp: int = 1
    sequence_parallel: bool = False
    cp: int = 1
    pp: int = 1
    chunks: int = 1
    ep: int = 1
    etp: int = 1
    microbatch: int = 1
    global_batch: int = 1
    schedule: str = "1f1b"
    zero: int = 1
    precision: str = "bf16"
    param_bytes: int = 2
    grad_bytes: int = 4
    state_bytes: float = 12
    updates: Updates | None = None
    recompute: frozenset[str] = frozenset()
    recompute_keep: int = 0
    offload_layers: int = 0
    overlap: frozenset[str] = frozenset()
    dispatcher: str = "alltoall"
    imbalance: float = 1.0
    echo: EchoConfig = _NO_CLONES
    clones_made: bool = True
    fused_experts: bool = False
    graphs: str = "off"
    attention: str = "flash"
    loss: str = "unfused"
    instances: int = 1
    stages: tuple[int, ...] = ()
    cp_comm: str = "ring"
    plain_autograd: bool = False
    keeps_permuted: bool = True
    group_size: int | None = None
    memory_limit: int | None = None
    pairs: Literal["whole", "split"] | None = None
    placement: Literal["loop", "v"] | None = None
    schedule_file: ScheduleFile | None = None
    order: str = "tp-cp-ep-dp-pp"
    kept_inputs: KeptInputs = _ALL_KEPT

    @cached_property
    def strides(self) -> dict[str, int]:
        """Distance of neighbours on each axis; etp, ep and edp are those of experts."""
        found, dense, expert = {}, 1, 1
        for axis in self.order.split("-"):
            found[axis if axis != "ep" else "none"] = dense
            dense *= {"tp": self.tp, "cp": self.cp, "dp": self.dp, "pp": self.pp}.get(axis, 1)
            found[{"tp": "etp", "dp": "edp"}.get(axis, axis if axis == "ep" else "none")] = expert
            expert *= {"tp": self.etp, "ep": self.ep, "dp": self.edp, "pp": self.pp}.get(axis, 1)
        return found

    @cached_property
    def dp(self) -> int:
        """Data parallel size."""
        return self.gpus // (self.tp * self.cp * self.pp)

    @cached_property
    def edp(self) -> int:
        """Ranks with the same experts."""
        return self.gpus // (self.pp * self.ep * self.etp)

    @cached_property
    def microbatches(self) -> int:
        """Microbatches per data parallel rank and step."""
        return max(1, self.global_batch // (self.dp * self.microbatch))

    @property
    def slots(self) -> int:
        """Slots for clones of experts on each rank; none without expert parallelism."""
        return self.echo.num_spare_slots if self.ep > 1 else 0

    @property
    def clones(self) -> int:
        """Clones of a rank in a microbatch that are counted: as many as it has slots."""
        return self.slots if self.clones_made else 0

    def load(self, experts: int) -> float:
        """Return the load of the busiest expert rank over the mean, with clones.

        Args:
            experts: Experts of the model.
        """
        bound = self.echo.options().guaranteed_factor(experts // self.ep) if self.slots else None
        return self.imbalance if bound is None else min(self.imbalance, bound)

    def owned(self, dense: float, experts: float) -> float:
        """Return the weights of a rank of which it holds the optimizer state."""
        if self.zero == 0:
            return dense + experts
        shards, expert_shards = self.dp * self.cp // self.instances, self.edp // self.instances
        return dense / shards + experts / max(1, expert_shards)

    @property
    def token_split(self) -> int:
        """Ranks that share the tokens between tensor parallel regions."""
        return self.tp if self.sequence_parallel else 1

    @property
    def width(self) -> int:
        """Bytes of an element of an activation that is not in 8 bits."""
        return 4 if self.precision == "fp32" else 2

    @property
    def is_fp8(self) -> bool:
        """True if products with weights are computed in 8 bits."""
        return "fp8" in self.precision


def loss_columns(model: ModelSpec, spec: RunSpec) -> int | None:
    """Return the columns of a block of logits, ``None`` if they are computed as a whole."""
    if not spec.plain_autograd:
        return None
    tokens = spec.microbatch * model.seq_length // spec.cp
    return block_columns(tokens, model.padded_vocab_size // spec.tp)
