"""Base of the modules of pipeline stages, and the construction context of their layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypedDict

import torch
from torch import Tensor, nn

from megacore.moe.dispatchers import Peers, StaticBudget
from megacore.moe.echo.slots import SlotBuffers
from megacore.moe.layer import MoELayer
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import ProcessGroups
from megatrain.config import LoraConfig, ModelConfig, MoEConfig
from megatrain.config.lora import NO_ADAPTERS
from megatrain.models.attention.mla import Indexer
from megatrain.models.init import ParamFactory
from megatrain.models.layers import ModelContext
from megatrain.models.mappings import Region
from megatrain.models.moe_block import MoEBlock, peers_of
from megatrain.models.shape import GPTShape


class ContextOptions(TypedDict, total=False):
    """Options of `make_context`, as for all stages of a rank; described at `GPTChunk`."""

    sequence_parallel: bool
    cp_comm: str
    dtype: torch.dtype
    device: torch.device | str
    seed: int
    slots: SlotBuffers | None
    peers: Peers | None
    recompute: frozenset[str]
    fp8: bool
    force_balanced: bool
    initialize: bool
    lora: LoraConfig


def make_context(
    config: ModelConfig,
    moe: MoEConfig,
    groups: ProcessGroups,
    *,
    sequence_parallel: bool = False,
    cp_comm: str = "allgather",
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    seed: int = 1234,
    slots: SlotBuffers | None = None,
    peers: Peers | None = None,
    recompute: frozenset[str] = frozenset(),
    fp8: bool = False,
    force_balanced: bool = False,
    initialize: bool = True,
    lora: LoraConfig | None = None,
) -> ModelContext:
    """Make the construction context of one stage; for the arguments see `GPTChunk`."""
    shape, device = GPTShape.from_config(config), torch.device(device)
    if peers is None:
        peers = peers_of(
            moe,
            groups,
            hidden=shape.hidden,
            dtype=dtype,
            device=device,
            transport=moe.static_transport,
        )
    params = ParamFactory(
        seed=seed,
        tp=groups.tp,
        etp=groups.etp,
        ep=groups.ep,
        dtype=dtype,
        device=device,
        initialize=initialize,
    )
    return ModelContext(
        config=config,
        shape=shape,
        region=Region(
            group=groups.tp,
            sequence_parallel=sequence_parallel,
            cp=groups.cp,
            cp_comm=cp_comm,
        ),
        params=params,
        moe=moe,
        groups=groups,
        budget=StaticBudget(moe.first_budget),
        slots=SlotBuffers(moe.echo.num_spare_slots) if slots is None else slots,
        peers=peers,
        recompute=recompute,
        fp8=fp8,
        force_balanced=force_balanced,
        lora=NO_ADAPTERS if lora is None else lora,
    )


class Stage(nn.Module):
    """Module of one pipeline stage on one rank.

    ``forward(hidden, batch, *, keep_activations=False)`` takes the output of the stage before
    (``None`` on the first one) and the microbatch, and returns its output; the last stage returns
    the scalar mean loss over the labels of this cp rank.

    Args:
        context: Construction context of its layers.

    Attributes:
        mtp_sums: Sums of the losses of multi-token prediction and of their tokens, by depth.
    """

    mtp_sums: Tensor

    def __init__(self, context: ModelContext) -> None:
        super().__init__()
        self.region = context.region
        self.moe_budget = context.budget
        self.moe_peers = context.peers
        self._params = context.params
        depths = context.config.num_mtp_layers
        sums = torch.zeros(2, depths, dtype=torch.float64, device=context.params.device)
        self.register_buffer("mtp_sums", sums, persistent=False)

    @property
    def device(self) -> torch.device:
        """Device of the stage, also of one without parameters."""
        return self.mtp_sums.device

    @property
    def embedding_weight(self) -> nn.Parameter | None:
        """The embedding weight of this stage, or its copy, or ``None``."""
        return None

    def param_infos(self) -> list[tuple[ParamInfo, nn.Parameter]]:
        """Return the parameters of this stage with their descriptions, in order of creation."""
        return list(self._params.made)

    def moe_layers(self) -> dict[int, MoELayer]:
        """Return the MoE layers of this stage by global index."""
        return {
            block.moe.router.layer: block.moe
            for block in self.modules()
            if isinstance(block, MoEBlock)
        }

    def buffer_infos(self) -> list[tuple[ParamInfo, Tensor]]:
        """Return state that is checkpointed but not optimized: expert biases and indexers."""
        indexers = [
            pair
            for module in self.modules()
            if isinstance(module, Indexer)
            for pair in module.buffer_infos()
        ]
        return indexers + self.trained_buffer_infos()

    def trained_buffer_infos(self) -> list[tuple[ParamInfo, Tensor]]:
        """Return those of `buffer_infos` that training changes: expert biases."""
        return [
            (
                ParamInfo(
                    name=f"layers.{index}.moe.expert_bias",
                    full_shape=tuple(layer.router.expert_bias.shape),
                    tp_dim=None,
                    weight_decay=False,
                ),
                layer.router.expert_bias,
            )
            for index, layer in self.moe_layers().items()
            if layer.router.expert_bias is not None
        ]

    def ordered_modules(self) -> Iterator[tuple[int, str, nn.Module]]:
        """Yield each module with its order in the model and its name, for diagnoses."""
        for order, (name, module) in enumerate(self.named_modules()):
            yield order if name else 1 << 30, name or "this stage", module
