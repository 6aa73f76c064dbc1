"""The whole configuration: one frozen model per section of the TOML file.

The section ``[x]`` is defined in ``megatrain.config.x``. Every field has a default, a range and a
description of one sentence or more; ``docs/configuration.md`` is generated from them. Rules within
one section are checked there; rules between sections, or with the number of processes, are in
``megatrain.config.resolve``. A default of ``None`` means "not set"; ``resolve`` fills those of
``megatrain.config.resolved``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import Self

from pydantic import PrivateAttr

from megacore.optim.param_group import ParamGroup
from megatrain.config.base import Origins, Section
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.config.data import DataConfig
from megatrain.config.debug import DebugConfig
from megatrain.config.graphs import GraphsConfig
from megatrain.config.lora import LoraConfig
from megatrain.config.model import ModelConfig
from megatrain.config.moe import MoEConfig
from megatrain.config.optimizer import OptimizerConfig
from megatrain.config.parallel import ParallelConfig
from megatrain.config.pipeline import PipelineConfig
from megatrain.config.preference import PreferenceConfig
from megatrain.config.run import RunConfig
from megatrain.config.train import TrainSectionConfig


class Config(Section):
    """A complete configuration, made by `load_config` and completed by `resolve`."""

    model: ModelConfig = ModelConfig()
    parallel: ParallelConfig = ParallelConfig()
    pipeline: PipelineConfig = PipelineConfig()
    moe: MoEConfig = MoEConfig()
    lora: LoraConfig = LoraConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    graphs: GraphsConfig = GraphsConfig()
    data: DataConfig = DataConfig()
    train: TrainSectionConfig = TrainSectionConfig()
    preference: PreferenceConfig = PreferenceConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    run: RunConfig = RunConfig()
    debug: DebugConfig = DebugConfig()

    _origins: Origins = PrivateAttr(default_factory=Origins)

    def origin(self, key: str) -> str:
        """Return the origin of ``"section.key"``: ``file:line``, the override, or ``default``."""
        return self._origins.where.get(key, "default")

    def with_origins(self, where: Mapping[str, str], notes: Iterable[str] = ()) -> Config:
        """Return a copy with the places of the values, and notes on settings that have moved."""
        copy = self.model_copy()
        copy._origins = Origins(MappingProxyType(dict(where)), self.derived, tuple(notes))
        return copy

    @property
    def derived(self) -> frozenset[str]:
        """Keys, as ``"parallel.etp"``, whose value `resolve` computed because none was set."""
        return self._origins.derived

    @property
    def notes(self) -> tuple[str, ...]:
        """Sentences on settings with old names, without effect, or with a surprising one."""
        return self._origins.notes

    def with_origins_of(self, config: Config, derived: Iterable[str]) -> Self:
        """Return a copy with the places of ``config``, and ``derived`` keys beside its own."""
        copy = self.model_copy()
        derived = config.derived | frozenset(derived)
        copy._origins = dataclasses.replace(config._origins, derived=derived)
        return copy

    def with_notes(self, notes: Iterable[str]) -> Self:
        """Return a copy with further notes; each sentence is kept once."""
        copy = self.model_copy()
        kept = tuple(dict.fromkeys((*self.notes, *notes)))
        copy._origins = dataclasses.replace(self._origins, notes=kept)
        return copy

    @property
    def has_clones(self) -> bool:
        """True if experts are cloned: there are spare slots, and ranks with different experts."""
        return self.moe.echo.num_spare_slots > 0 and self.parallel.ep > 1

    def param_groups(self) -> list[ParamGroup]:
        """Return the groups of parameters: frozen weights, then those of the optimizer."""
        return self.lora.param_groups() + self.optimizer.param_groups()

    def dp(self, world_size: int) -> int:
        """Return the data parallel size for ``world_size`` ranks, which the layout must divide."""
        return world_size // (self.parallel.tp * self.parallel.cp * self.parallel.pp)

    @property
    def num_slot_sets(self) -> int:
        """Sets of ECHO's weight slots: one per microbatch that can be inside layers at once.

        Example:
            >>> Config().num_slot_sets, Config(pipeline={"overlap_moe": True}).num_slot_sets
            (1, 2)
        """
        return 2 if self.pipeline.overlap_moe else 1

    def keeps_rounded_weights(self, world_size: int) -> bool:
        """Return whether weights stay in 8 bits for a step: not for one microbatch alone."""
        return self.train.fp8 != "off" and self.num_microbatches(world_size) > 1

    def num_microbatches(self, world_size: int) -> int:
        """Return the microbatches per data parallel rank and optimizer step."""
        return self.train.global_batch_size // (self.train.microbatch_size * self.dp(world_size))


def section_classes() -> dict[str, type[Section]]:
    """Return the section classes by name, in file order; ``moe.echo`` is nested in ``moe``."""
    classes: dict[str, type[Section]] = {}
    for name, outer in Config.inner_sections().items():
        classes[name] = outer
        classes |= {f"{name}.{inner}": cls for inner, cls in outer.inner_sections().items()}
    return classes
