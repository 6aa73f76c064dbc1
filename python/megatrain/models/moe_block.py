"""MoE block of a transformer layer: parameters and integration with the model.

Shapes: S sequence, B batch, H hidden, E experts, F inner width of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from megacore.moe.balance import RealTokens, RouterGroups
from megacore.moe.dispatchers import (
    Dispatcher,
    ExpertPlacement,
    Peers,
    make_dispatcher,
    make_peers,
)
from megacore.moe.echo.clones import FC1, FC2
from megacore.moe.echo.layer import Echo, ReceiveBudget
from megacore.moe.experts import ExpertBiases, GroupedExperts
from megacore.moe.layer import InTwoParts, MoELayer
from megacore.moe.router import RoutingResult, TokenNames, TopKRouter
from megacore.ops.linear import linear
from megacore.ops.recompute import RecomputeCache
from megacore.parallel.batch import Microbatch
from megacore.parallel.params import use_params
from megacore.parallel.process_groups import ProcessGroups
from megatrain.config import MoEConfig
from megatrain.models.adapters import make_expert_adapters
from megatrain.models.layers import ModelContext
from megatrain.models.mappings import Region, gather_sequence, scatter_sequence
from megatrain.models.param_infos import Infos


class MoEBlock(nn.Module):
    """An MoE layer in place of an MLP.

    Between tensor-parallel regions each tp rank routes different tokens: its slice with sequence
    parallelism, or an equal share of the common tokens without.

    Args:
        name: Prefix of the parameters' names.
        layer: Global index of the layer.
        context: Construction context.
        shared: The shared expert, if any.
    """

    def __init__(
        self, name: str, layer: int, context: ModelContext, *, shared: nn.Module | None
    ) -> None:
        super().__init__()
        moe, groups, region = context.moe, context.groups, context.region
        self.token_region = Region(group=region.group, sequence_parallel=True, cp=region.cp)
        infos = context.infos.moe_block(name)
        bias = infos.get(f"{name}.router_bias")
        router = TopKRouter(
            moe.router_options(force_balanced=context.force_balanced),
            context.params.normal(infos[f"{name}.router"], std=context.config.init_std),
            bias=None if bias is None else context.params.zeros(bias),
            groups=RouterGroups(
                sequence_parallel=groups.tp,
                cp=groups.cp,
                dp_cp=groups.dp_cp,
                holders=groups.holders,
            ),
            seed=context.params.seed,
            layer=layer,
        )
        echo = _echo(context)
        is_split = region.sequence_parallel or region.group.size == 1
        self.moe = MoELayer(
            router=router,
            dispatcher=_dispatcher(context, echo),
            echo=echo,
            experts=_experts(f"{name}.experts", infos, context),
            shared=shared,
            scatter_tokens=None if is_split else self._scatter_tokens,
            gather_tokens=None if is_split else self._gather_tokens,
        )
        self.num_shares = 1 if region.sequence_parallel else region.group.size

    def forward(
        self, x_SBH: Tensor, batch: Microbatch, *, cache: RecomputeCache | None = None
    ) -> Tensor:
        """Compute ``(S[/tp], B, H)`` to the same shape; for ``cache`` see `MoELayer`."""
        names = self.names(x_SBH, batch)
        output: Tensor = self.moe(
            x_SBH, names, loss_factor=batch.router_factor, cache=cache, real=self.real(x_SBH, batch)
        )
        return output

    def route(
        self, x_SBH: Tensor, batch: Microbatch, *, cache: RecomputeCache | None = None
    ) -> tuple[Tensor, RoutingResult]:
        """Run the beginning of `forward`; see ``MoELayer.route``."""
        names = self.names(x_SBH, batch)
        return self.moe.route(
            x_SBH, names, loss_factor=batch.router_factor, cache=cache, real=self.real(x_SBH, batch)
        )

    def names(self, x_SBH: Tensor, batch: Microbatch) -> TokenNames | None:
        """Return identifiers of the tokens that this rank routes, if the router uses them."""
        if not self.moe.router.uses_names:
            return None
        num_tokens = x_SBH.shape[0] // self.num_shares
        return TokenNames(
            step=batch.step,
            sample_ids_B=batch.sample_ids,
            positions_S=self.token_region.positions(num_tokens, device=x_SBH.device),
            keys=batch.keys,
        )

    def real(self, x_SBH: Tensor, batch: Microbatch) -> RealTokens | None:
        """Return the tokens that this rank routes and that are not padding; ``None``: all."""
        if batch.lengths is None:
            return None
        num_tokens = x_SBH.shape[0] // self.num_shares
        positions_S = self.token_region.positions(num_tokens, device=x_SBH.device)
        mask_SB = positions_S[:, None] < batch.lengths[None, :]
        return RealTokens(mask_SB=mask_SB, lengths_B=batch.lengths)

    def _scatter_tokens(self, x_SBH: Tensor) -> Tensor:
        return scatter_sequence(x_SBH, self.token_region.group)

    def _gather_tokens(self, x_SBH: Tensor) -> Tensor:
        return gather_sequence(x_SBH, self.token_region.group)


class GatedExpert(nn.Module):
    """A shared expert whose output is scaled by a sigmoid gate per token."""

    def __init__(self, name: str, mlp: nn.Module, context: ModelContext) -> None:
        super().__init__()
        self.mlp = mlp
        info = context.infos.shared_gate(name)[name]
        self.gate = context.params.normal(info, std=context.config.init_std)

    def forward(self, x_SBH: Tensor) -> Tensor:
        """Compute ``(S[/tp], B, H)`` to the same shape."""
        return self.start(x_SBH)()

    def start(self, x_SBH: Tensor) -> Callable[[], Tensor]:
        """Compute the expert's first part; see `InTwoParts`."""
        assert isinstance(self.mlp, InTwoParts)
        finish = self.mlp.start(x_SBH)

        def gated() -> Tensor:
            use_params(self)
            return finish() * torch.sigmoid(linear(x_SBH, self.gate))

        return gated


def peers_of(
    moe: MoEConfig,
    groups: ProcessGroups,
    *,
    hidden: int,
    dtype: torch.dtype,
    device: torch.device,
    transport: Literal["auto", "collective", "peer"],
) -> Peers | None:
    """Return the peer memory of a model's ``static`` dispatcher, or ``None``.

    Raises:
        ConfigError: If ``moe.static_transport`` requires peer memory but there is none.

    Sync:
        Collective on CUDA.
    """
    if moe.num_experts == 0 or moe.dispatcher != "static":
        return None
    return make_peers(
        groups.etp_ep,
        device,
        transport=transport,
        row_bytes=hidden * dtype.itemsize,
    )


def _echo(context: ModelContext) -> Echo | None:
    """Return the clones of hot experts, or ``None`` without other ranks or spare slots."""
    moe, groups = context.moe, context.groups
    if groups.ep.size == 1 or moe.echo.num_spare_slots == 0:
        return None
    placement = ExpertPlacement.of(groups, moe.num_experts)
    budget = None
    device = context.params.device
    # Processes of a host share memory in any case; memory of GPUs comes with that of `static`.
    tries_memory = device.type == "cpu"
    if moe.dispatcher == "static":
        budget = ReceiveBudget(moe.receive_factor(placement.num_local), context.budget)
        tries_memory = context.peers is not None
    return Echo(
        placement,
        moe.echo.options(),
        ep=groups.ep,
        slots=context.slots,
        capacity=moe.capacity(),
        budget=budget,
        tries_memory=tries_memory,
        device=device,
    )


def _dispatcher(context: ModelContext, echo: Echo | None) -> Dispatcher:
    moe, budget, peers = context.moe, context.budget, context.peers
    if echo is not None:  # applies the capacity before it chooses clones
        return make_dispatcher(
            moe.dispatcher, echo.places, budget=budget, peers=peers, receive_rows=echo.receive_rows
        )
    placement = ExpertPlacement.of(context.groups, moe.num_experts)
    return make_dispatcher(
        moe.dispatcher, placement, budget=budget, peers=peers, capacity=moe.capacity()
    )


def _experts(name: str, infos: Infos, context: ModelContext) -> GroupedExperts:
    params, biases = context.params, None
    fc1 = params.experts(infos[f"{name}.fc1"], std=context.config.init_std)
    fc2 = params.experts(infos[f"{name}.fc2"], std=context.output_std)
    if context.moe.biases:  # zero at the start
        made = [params.experts(infos[f"{name}.{part}_bias"], std=0.0) for part in ("fc1", "fc2")]
        biases = ExpertBiases(*made, num_shards=context.groups.etp.size)
    return GroupedExperts(
        fc1,
        fc2,
        activation=context.moe.activation,
        biases=biases,
        fp8=context.fp8,
        scale_inputs=context.moe.scale_inputs,
        adapters=make_expert_adapters(
            {FC1: infos[f"{name}.fc1"], FC2: infos[f"{name}.fc2"]},
            infos,
            lora=context.lora,
            params=params,
        ),
    )
