"""Parameters that the optimizer of a run updates, by layer, for predictions. Without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property, lru_cache

from megacore.optim.matrix_plan import MatrixUnit, rounds_by_owner, unit_cost, units_of
from megacore.optim.matrix_rule import MatrixRule
from megacore.optim.param_group import group_of, settings_of
from megacore.optim.update_rule import UpdateRule
from megacore.parallel.param_info import ParamInfo
from megatrain.config import LoraConfig, OptimizerConfig
from megatrain.config.lora import NO_ADAPTERS
from megatrain.config.resolved import ResolvedModelConfig, ResolvedMoEConfig
from megatrain.models.param_infos import GPTInfos
from megatrain.plan.adapter_shapes import AdapterShape

Parameters = tuple[tuple[ParamInfo, UpdateRule | None], ...]
# Whether of experts, whether partial over tp, and the rule: parameters that share a buffer.
_BufferKind = tuple[bool, bool, MatrixRule]


@dataclass(frozen=True, kw_only=True, eq=False)
class UpdatedPart:
    """Parameters of a layer, the embedding or the output layer, with their rules.

    Attributes:
        params: Parameters and their rules, ``None`` of frozen ones.
        dense: Share of the weights outside of experts that are trained.
        experts: Share of the weights of experts that are trained.
        weights: Share of all weights that are trained.
        adapters: Adapters of the weights, which the shares do not count.
    """

    params: Parameters
    dense: float
    experts: float
    weights: float
    adapters: tuple[AdapterShape, ...]

    @classmethod
    def of(cls, params: Parameters, adapters: tuple[AdapterShape, ...]) -> UpdatedPart:
        """Count the shares."""
        shares = []
        for kinds in ((False,), (True,), (False, True)):
            sizes = [
                (math.prod(info.full_shape), rule is not None)
                for info, rule in params
                if info.expert in kinds and not info.wide
            ]
            whole = sum(size for size, _ in sizes)
            trained = sum(size for size, is_trained in sizes if is_trained)
            shares.append(trained / whole if whole else 1.0)
        dense, experts, weights = shares
        return cls(params=params, dense=dense, experts=experts, weights=weights, adapters=adapters)

    @property
    def is_trained(self) -> bool:
        """Whether some parameter is trained."""
        return any(rule is not None for _, rule in self.params)


@dataclass(frozen=True, kw_only=True)
class OwnerWork:
    """Work with whole matrices of a kind of parameters on the data-parallel rank with most.

    Attributes:
        rule: The optimizer.
        is_expert: Whether the matrices are those of experts.
        flops: Operations of a step.
        numel: Elements of all matrices on a tensor-parallel rank.
        peak_bytes: Most bytes of tensors that a step holds beside the state.
    """

    rule: MatrixRule
    is_expert: bool
    flops: float
    numel: int
    peak_bytes: float


class Updates:
    """Rules of all parameters of a model; the same for each layout.

    Args:
        model: The ``[model]`` section.
        moe: The ``[moe]`` section.
        optimizer: The ``[optimizer]`` section.
        lora: The ``[lora]`` section.
    """

    def __init__(
        self,
        model: ResolvedModelConfig,
        moe: ResolvedMoEConfig,
        optimizer: OptimizerConfig,
        lora: LoraConfig = NO_ADAPTERS,
    ) -> None:
        infos = GPTInfos.of(model, moe, lora=lora)
        self._groups = lora.param_groups() + optimizer.param_groups()
        self._rule = optimizer.rule()
        self._known: dict[Parameters, UpdatedPart] = {}
        ends = infos.stage((), has_embedding=True, has_head=True)
        self.embedding = self._part({name: i for name, i in ends.items() if name in _WORDS})
        self.head = self._part({name: i for name, i in ends.items() if name not in _WORDS})
        if model.tie_embeddings:
            self.head = self.embedding
        self.layers = [self._part(infos.layer(i)) for i in range(model.num_layers)]
        self.layers += [self._part(infos.prediction_layer(i)) for i in model.mtp_layers]

    def _part(self, infos: Mapping[str, ParamInfo]) -> UpdatedPart:
        """Describe parameters; equal parts are one object."""
        params = []
        for info in infos.values():
            settings = settings_of(info, self._groups, rule=self._rule, weight_decay=0.0)
            is_frozen = group_of(info.name, self._groups).frozen
            params.append((replace(info, name=""), None if is_frozen else settings.rule))
        part = UpdatedPart.of(tuple(params), AdapterShape.of(infos))
        return self._known.setdefault(part.params, part)

    @cached_property
    def first_trained(self) -> int:
        """The lowest layer with trained parameters at or before it: no gradient passes below."""
        if self.embedding.is_trained:
            return 0
        return next((i for i, part in enumerate(self.layers) if part.is_trained), len(self.layers))

    @cached_property
    def bytes_per_weight(self) -> float:
        """Mean bytes of state per trained weight."""
        parts = [*self.layers, self.embedding]
        parts += [] if self.head is self.embedding else [self.head]
        numels, sums = 0, Fraction(0)
        for part in parts:
            for info, rule in part.params:
                if rule is not None:
                    numels += math.prod(info.full_shape)
                    sums += math.prod(info.full_shape) * rule.state_bytes
        return float(sums / max(1, numels))

    def matrix_work(
        self, layers: Sequence[int], *, sizes: tuple[int, int, int], shards: tuple[int, int]
    ) -> tuple[OwnerWork, ...]:
        """Return the work with whole matrices of a pipeline rank.

        Args:
            layers: Its layers; those for multi-token prediction follow the others.
            sizes: Tensor-parallel ranks, those of experts, and expert-parallel ranks.
            shards: Data-parallel ranks that share the buffers of dense parameters, and of experts.
        """
        if not any(isinstance(rule, MatrixRule) for part in self._known for _, rule in part):
            return ()
        return _work(tuple(self.layers[index] for index in layers), sizes, shards)


_WORDS = ("embedding", "positions")


@lru_cache(maxsize=4096)
def _work(
    parts: tuple[UpdatedPart, ...], sizes: tuple[int, int, int], shards: tuple[int, int]
) -> tuple[OwnerWork, ...]:
    by_kind: dict[_BufferKind, list[MatrixUnit]] = {}
    for part in parts:
        for kind, units in _units(part, sizes).items():
            by_kind.setdefault(kind, []).extend(units)
    tp, etp, _ = sizes
    found = []
    for (is_expert, _, rule), units in by_kind.items():
        group, ranks = (etp, shards[1]) if is_expert else (tp, shards[0])
        costs = [unit_cost(unit, rule.cost, group) for unit in units]
        rounds = rounds_by_owner(units, costs, ranks)
        found.append(
            OwnerWork(
                rule=rule,
                is_expert=is_expert,
                flops=max(
                    sum(unit_cost(unit, rule.cost, group) for each in mine for unit in each)
                    for mine in rounds
                ),
                numel=sum(unit.numel for unit in units),
                peak_bytes=max(
                    _round_bytes([mine[n] if n < len(mine) else [] for mine in rounds], rule, group)
                    for n in range(max(map(len, rounds)))
                ),
            )
        )
    return tuple(found)


@lru_cache(maxsize=4096)
def _units(part: UpdatedPart, sizes: tuple[int, int, int]) -> dict[_BufferKind, list[MatrixUnit]]:
    """List the units of a part on a rank, by buffer."""
    tp, etp, ep = sizes
    found: dict[_BufferKind, list[MatrixUnit]] = {}
    for info, rule in part.params:
        if isinstance(rule, MatrixRule) and info.matrices is not None:
            group = etp if info.expert else tp
            units = units_of(0, info, tp_size=group, ep_size=ep)
            found.setdefault((info.expert, info.sequence_parallel, rule), []).extend(units)
    return found


def _round_bytes(by_owner: Sequence[Sequence[MatrixUnit]], rule: MatrixRule, tp: int) -> float:
    """Return the most bytes of tensors in a round of `megacore.optim.matrix_update`, on any owner.

    Directions and updates are fp32; products have the precision of the rule.
    """
    sent = sum(unit.numel for units in by_owner for unit in units) / len(by_owner)
    return max(_owner_bytes(units, sent, len(by_owner), rule, tp) for units in by_owner)


def _owner_bytes(
    units: Sequence[MatrixUnit], sent: float, ranks: int, rule: MatrixRule, tp: int
) -> float:
    width = 2 if getattr(rule, "precision", "float32") == "bfloat16" else 4
    numel = fused = gathered = whole = shared = alone = 0.0
    for unit in units:
        numel += unit.numel
        fused += unit.numel if len(unit.matrices) > 1 else 0
        for rows, columns in unit.matrices:
            short, is_cut = min(rows, columns), unit.cut is not None
            own = rows * columns / (tp if is_cut else 1)
            is_gathered = is_cut and rows != columns and (unit.cut == "rows") == (rows < columns)
            if is_gathered:
                gathered += own
                own *= tp
            whole += own
            if is_cut and not is_gathered:  # at once, with the fp32 sum of their Gram matrices
                shared += 2 * width * own + 12 * short**2
            else:
                alone = max(alone, width * (own + 2 * short**2))
    # Directions or whole units, copies of fused ones, and gathered matrices with their buffers.
    inputs = 4 * (numel + fused + gathered * tp)
    in_fp32 = 4 * numel if width == 2 else 0
    products = max(shared, width * whole + max(alone, in_fp32))
    results = 4 * (2 * numel + 2 * fused)
    exchange = 4 * max(sent + numel, 2 * numel) if ranks > 1 else 0.0
    return max(inputs + products, inputs + 4 * gathered * (1 + tp), results, exchange)
