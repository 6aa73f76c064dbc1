"""Typed configuration: frozen sections, a TOML file, ``--section.key=value`` overrides.

All errors of a configuration are reported at once, each with its place and the nearest fix.
"""

from __future__ import annotations

from megacore.config.base import duration_s
from megacore.config.checkpoint import CheckpointConfig
from megacore.config.data import DataConfig, SourceConfig
from megacore.config.debug import DebugConfig
from megacore.config.graphs import GraphsConfig
from megacore.config.layers import layers_of_stages, mtp_stage, stages_of_ranks
from megacore.config.load import (
    FOLDER_OF_FILE,
    config_from_values,
    load_config,
    setting_homes,
    split_overrides,
    with_folder_of_file,
)
from megacore.config.model import MLAConfig, ModelConfig, RopeScalingConfig
from megacore.config.moe import EchoConfig, MoEConfig
from megacore.config.optimizer import OptimizerConfig
from megacore.config.parallel import ParallelConfig
from megacore.config.pipeline import PipelineConfig
from megacore.config.resolve import check_rules, resolve
from megacore.config.resolved import (
    ResolvedConfig,
    ResolvedModelConfig,
    ResolvedMoEConfig,
)
from megacore.config.run import RunConfig
from megacore.config.sections import Config, section_classes
from megacore.config.toml_file import config_to_toml
from megacore.config.train import TrainSectionConfig

__all__ = [
    "FOLDER_OF_FILE",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DebugConfig",
    "EchoConfig",
    "GraphsConfig",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PipelineConfig",
    "ResolvedConfig",
    "ResolvedMoEConfig",
    "ResolvedModelConfig",
    "RopeScalingConfig",
    "RunConfig",
    "SourceConfig",
    "TrainSectionConfig",
    "check_rules",
    "config_from_values",
    "config_to_toml",
    "duration_s",
    "layers_of_stages",
    "load_config",
    "mtp_stage",
    "resolve",
    "section_classes",
    "setting_homes",
    "split_overrides",
    "stages_of_ranks",
    "with_folder_of_file",
]
