"""The whole configuration: one frozen model per section of the TOML file.

The section ``[x]`` is defined in ``megacore.config.x``. Every field carries its default, its range
and one sentence of meaning; ``docs/configuration.md`` is made from them. A rule that concerns one
section is checked there; a rule between sections, or with the number of processes, lives in
``megacore.config.resolve``. A default of ``None`` means "derived": ``resolve`` fills it in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from pydantic import PrivateAttr

from megacore.config.base import Origins, Section
from megacore.config.checkpoint import CheckpointConfig
from megacore.config.data import DataConfig
from megacore.config.graphs import GraphsConfig
from megacore.config.model import ModelConfig
from megacore.config.moe import MoEConfig
from megacore.config.optimizer import OptimizerConfig
from megacore.config.parallel import ParallelConfig
from megacore.config.pipeline import PipelineConfig
from megacore.config.run import RunConfig
from megacore.config.train import TrainSectionConfig


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
