"""Typed configuration: frozen sections, a TOML file, ``--section.key=value`` overrides.

All errors of a configuration are reported at once, each with its place and the nearest fix.
"""

from __future__ import annotations

from megatrain.config.base import duration_s
from megatrain.config.checkpoint import CheckpointConfig
from megatrain.config.data import DataConfig, SourceConfig
from megatrain.config.debug import DebugConfig
from megatrain.config.graphs import GraphsConfig
from megatrain.config.layers import layers_of_stages, mtp_stage, stages_of_ranks
from megatrain.config.load import (
    FOLDER_OF_FILE,
    config_from_values,
    load_config,
    setting_homes,
    split_overrides,
    with_folder_of_file,
)
from megatrain.config.lora import LoraConfig
from megatrain.config.model import ModelConfig
from megatrain.config.model_tables import MLAConfig, QueryScalingConfig, RopeScalingConfig
from megatrain.config.moe import EchoConfig, MoEConfig
from megatrain.config.optimizer import MuonConfig, OptimizerConfig, ParamGroupConfig
from megatrain.config.parallel import ParallelConfig
from megatrain.config.pipeline import PipelineConfig
from megatrain.config.preference import PreferenceConfig
from megatrain.config.resolve import resolve
from megatrain.config.resolved import (
    ResolvedConfig,
    ResolvedModelConfig,
    ResolvedMoEConfig,
    ResolvedOptimizerConfig,
    ResolvedTrainConfig,
)
from megatrain.config.run import RunConfig
from megatrain.config.sections import Config, section_classes
from megatrain.config.toml_file import config_to_toml
from megatrain.config.train import TrainSectionConfig

__all__ = [
    "FOLDER_OF_FILE",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "DebugConfig",
    "EchoConfig",
    "GraphsConfig",
    "LoraConfig",
    "MLAConfig",
    "MoEConfig",
    "ModelConfig",
    "MuonConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "ParamGroupConfig",
    "PipelineConfig",
    "PreferenceConfig",
    "QueryScalingConfig",
    "ResolvedConfig",
    "ResolvedMoEConfig",
    "ResolvedModelConfig",
    "ResolvedOptimizerConfig",
    "ResolvedTrainConfig",
    "RopeScalingConfig",
    "RunConfig",
    "SourceConfig",
    "TrainSectionConfig",
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
