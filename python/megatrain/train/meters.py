"""Meters of a step: expert loads, MoE losses, buffer overflow, multi-token prediction losses."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from megacore import host_values
from megacore.errors import MegacoreError
from megacore.moe.router import update_expert_biases
from megacore.ops.echo_counts import ECHO_SUMS, EchoCounts
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.process_groups import ProcessGroups
from megatrain.config import MoEConfig
from megatrain.models.gpt import GPTChunk
from megatrain.models.group_loss import GroupLossSum
from megatrain.models.stage import Stage


@dataclass(frozen=True, kw_only=True)
class ExpertMetrics:
    """MoE metrics of one step, summed over all ranks; equal on every rank.

    Attributes:
        load: Copies that each expert computed, by global index of the MoE layer.
        num_dropped: Dropped copies of all layers.
        num_over_budget: Copies dropped because a static buffer was full.
        aux_loss: Sum over layers of the load-balancing loss, with its coefficient.
        z_loss: Sum over layers of the z-loss, with its coefficient.
        num_reruns: Number of reruns of the step with a larger budget.
        echo: Clone counters by global index of the MoE layer; empty without clones. Sums over all
            ranks, each of which counts its own plans.
    """

    load: dict[int, tuple[int, ...]]
    num_dropped: int
    num_over_budget: int
    aux_loss: float
    z_loss: float
    num_reruns: int = 0
    echo: dict[int, EchoCounts] = field(default_factory=dict)

    @property
    def imbalance(self) -> float:
        """Max over layers of max expert load over mean expert load; 1 is balanced.

        Example:
            >>> ExpertMetrics(load={0: (3, 1), 1: (2, 2)}, num_dropped=0, num_over_budget=0,
            ...               aux_loss=0.0, z_loss=0.0).imbalance
            1.5
        """
        return max(max(load) * len(load) / max(1, sum(load)) for load in self.load.values())

    def as_record(self, *, with_load: bool = True) -> dict[str, Any]:
        """Convert to the fields of ``metrics.jsonl``; ``with_load`` adds every expert's load."""
        load = {str(layer): list(load) for layer, load in self.load.items()}
        echo = {str(layer): counts.as_record() for layer, counts in self.echo.items()}
        return {
            **({"expert_load": load} if with_load else {}),
            "expert_imbalance": self.imbalance,
            "num_dropped_copies": self.num_dropped,
            "num_over_budget": self.num_over_budget,
            "num_reruns": self.num_reruns,
            "aux_loss": self.aux_loss,
            "z_loss": self.z_loss,
            **({"echo": echo} if echo else {}),
        }


class ExpertLoadMeter:
    """Counters of all MoE layers of this rank, and the policy for buffer overflow.

    Args:
        chunks: Model chunks of this rank.
        moe: A resolved ``[moe]`` section.
        num_layers: Layers of the whole model.
        groups: Process groups of this rank.
        num_microbatches: Microbatches per data-parallel rank and step.
        device: Device of this rank.
    """

    def __init__(
        self,
        chunks: Sequence[Stage],
        *,
        moe: MoEConfig,
        num_layers: int,
        groups: ProcessGroups,
        num_microbatches: int,
        device: torch.device,
    ) -> None:
        self._moe = moe
        self._device = device
        self._groups = groups
        self._budgets = [chunk.moe_budget for chunk in chunks]
        self._peers = {chunk.moe_peers for chunk in chunks if chunk.moe_peers is not None}
        self._layers = {index: layer for c in chunks for index, layer in c.moe_layers().items()}
        self._indices = moe.moe_layers(num_layers)
        # Loss values are averaged over microbatches and the ranks of a stage.
        self._num_values = num_microbatches * groups.topology.world_size // groups.topology.pp
        self._num_reruns = 0
        self._has_clones = moe.echo.num_spare_slots > 0 and groups.ep.size > 1
        num_echo = len(ECHO_SUMS) if self._has_clones else 0
        self._row_size = moe.num_experts + 4 + num_echo

    def attempts(self, what: str) -> Iterator[None]:
        """Yield once for the first attempt, and once for each rerun of the step. Collective.

        A step is rerun with larger budgets if a buffer overflowed and the policy is ``"rerun"``.

        Args:
            what: Description of the step for the error message.

        Raises:
            MegacoreError: If a buffer overflowed and the policy is ``"error"``.
            PeerLostError: If a peer timed out in an exchange between GPUs.

        Sync:
            Waits for the device after each attempt if the dispatcher is ``static`` and the policy
            not ``"drop"``.
        """
        self._num_reruns = 0
        yield
        while self._must_rerun(what):
            yield

    def _must_rerun(self, what: str) -> bool:
        """Check for buffer overflow on any rank, and if so grow the budgets. Collective."""
        if not self._has_policy:
            return False
        total = self.num_to_rerun()
        all_reduce_(total, self._groups.world)
        num_over = int(host_values.read(total, "copies over the budget"))
        self._check_peers()
        if num_over == 0:
            return False
        if self._moe.over_budget == "error":
            raise MegacoreError(
                f"{what}: {num_over:,} copies of tokens found no room in the buffers of the static "
                f"dispatcher ({self._budget_text()}); raise it, or set moe.over_budget to "
                '"rerun" or "drop"'
            )
        for budget in self._budgets:
            budget.grow()
        self._num_reruns += 1
        return True

    def num_to_rerun(self) -> Tensor:
        """Count this rank's over-budget copies, which invalidate a step; 0-d int64, on the device.

        0 if the policy is ``"drop"``.
        """
        total = torch.zeros((), dtype=torch.int64, device=self._device)
        for layer in self._layers.values() if self._has_policy else ():
            total += layer.num_over_budget
        return total

    @property
    def _has_policy(self) -> bool:
        """True if buffer overflow raises an error or causes a rerun."""
        return self._moe.dispatcher == "static" and self._moe.over_budget != "drop"

    def extra(self) -> Tensor:
        """Collect this rank's counts for a sum over all ranks: 1-D, fp64; empty without experts."""
        zeros = torch.zeros(self._row_size, dtype=torch.float64, device=self._device)
        rows = []
        for index in self._indices:
            layer = self._layers.get(index)
            if layer is None:
                rows.append(zeros)
                continue
            counts = layer.counts()
            numbers = [
                counts.tokens_per_expert,
                torch.stack((counts.num_dropped, counts.num_over_budget)),
                counts.losses / self._num_values,
            ]
            if layer.echo is not None:
                numbers.append(layer.echo.sums)
            rows.append(torch.cat([part.double() for part in numbers]))
        return torch.cat(rows) if rows else zeros[:0]

    def metrics(self, sums: Tensor) -> ExpertMetrics | None:
        """Convert the summed :meth:`extra` to metrics.

        Returns:
            ``None`` for a model without experts.

        Raises:
            PeerLostError: If a peer timed out in an exchange between GPUs.
        """
        if not self._indices:
            return None
        self._check_peers()
        num_experts = self._moe.num_experts
        table = sums.view(len(self._indices), self._row_size)
        dropped, over, aux, z = table[:, num_experts : num_experts + 4].sum(0).tolist()
        loads = table[:, :num_experts].round().long().tolist()
        return ExpertMetrics(
            load={i: tuple(load) for i, load in zip(self._indices, loads, strict=True)},
            num_dropped=round(dropped),
            num_over_budget=round(over),
            aux_loss=aux,
            z_loss=z,
            num_reruns=self._num_reruns,
            echo={
                index: EchoCounts.of_list(row)
                for index, row in zip(
                    self._indices, table[:, num_experts + 4 :].tolist(), strict=True
                )
                if row
            },
        )

    def update_router_biases(self) -> None:
        """Update the biases of routers from the load of the step. Collective.

        Those of frozen routers stay.
        """
        routers = [layer.router for _, layer in sorted(self._layers.items())]
        update_expert_biases([router for router in routers if router.weight.requires_grad])
        for router in routers:
            if router.tokens_seen is not None:
                router.tokens_seen.zero_()

    def _budget_text(self) -> str:
        """Format the setting of the buffer size with its value."""
        if not self._has_clones:
            return f"moe.static_budget = {self._budgets[0].factor:g}"
        factor = self._moe.receive_factor(self._moe.num_experts // self._groups.ep.size)
        return f"moe.echo.receive_budget = {factor:g}"

    def _check_peers(self) -> None:
        for peers in self._peers:
            peers.check()
        for slots in {layer.echo.slots for layer in self._layers.values() if layer.echo}:
            slots.check()

    def reset_counts(self) -> None:
        """Zero the counts of all layers; call it before the passes of every attempt."""
        for layer in self._layers.values():
            layer.reset_counts()


class MTPLossMeter:
    """Sums over a step of the multi-token prediction losses of all depths.

    Args:
        chunks: Model chunks of this rank.
        num_depths: Multi-token prediction layers of the whole model.
        groups: Process groups of this rank.
        device: Device of this rank.
    """

    def __init__(
        self,
        chunks: Sequence[Stage],
        *,
        num_depths: int,
        groups: ProcessGroups,
        device: torch.device,
    ) -> None:
        # The ranks of a tp group compute the same losses, so only one of them counts.
        counts = groups.tp.position == 0
        self._sums = [
            chunk.mtp_sums
            for chunk in chunks
            if isinstance(chunk, GPTChunk) and chunk.head is not None and counts
        ]
        self._zeros = torch.zeros(2, num_depths, dtype=torch.float64, device=device)

    def reset(self) -> None:
        """Zero the sums."""
        for sums in self._sums:
            sums.zero_()

    def extra(self) -> Tensor:
        """Collect this rank's part of a global sum: 1-D, fp64; empty without MTP layers."""
        total = self._zeros.clone()
        for sums in self._sums:
            total += sums
        return total.flatten()

    def losses(self, sums: Tensor) -> tuple[float, ...]:
        """Compute each depth's mean loss from the summed :meth:`extra`, nats per token.

        NaN for a depth that predicted no token.
        """
        totals, counts = sums.view(2, -1)
        return tuple((totals / counts).tolist())


class GroupLossMeter:
    """Means over a step of the metrics of a loss of groups.

    Args:
        chunks: Model chunks of this rank.
        names: Names of the metrics; none without such a loss.
        groups: Process groups of this rank.
        device: Device of this rank.
    """

    def __init__(
        self,
        chunks: Sequence[Stage],
        *,
        names: Sequence[str],
        groups: ProcessGroups,
        device: torch.device,
    ) -> None:
        self._names = tuple(names)
        self._held = [
            chunk.head.loss.sums
            for chunk in chunks
            if isinstance(chunk, GPTChunk)
            and chunk.head is not None
            and isinstance(chunk.head.loss, GroupLossSum)
        ]
        # The ranks of a tp group compute the same, so only one of them counts.
        self._counted = self._held if groups.tp.position == 0 else []
        size = len(self._names) + 1 if self._names else 0
        self._zeros = torch.zeros(size, dtype=torch.float64, device=device)

    def reset(self) -> None:
        """Zero the sums."""
        for sums in self._held:
            sums.zero_()

    def extra(self) -> Tensor:
        """Collect this rank's part of a global sum: 1-D, fp64; empty without a loss of groups."""
        total = self._zeros.clone()
        for sums in self._counted:
            total += sums
        return total

    def means(self, sums: Tensor) -> dict[str, float]:
        """Compute the mean of each metric from the summed :meth:`extra`; NaN without a group."""
        if not self._names:
            return {}
        *totals, count = sums.tolist()
        return {
            name: total / count if count > 0 else math.nan
            for name, total in zip(self._names, totals, strict=True)
        }
