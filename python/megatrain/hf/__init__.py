"""Models in the folder format of Hugging Face: import and export of weights and configuration."""

from megatrain.hf.export_hf import HFTensors
from megatrain.hf.fine_tuning import training_note
from megatrain.hf.import_hf import HFWeights, ImportedModel, fill_chunk, import_hf
from megatrain.hf.settings import config_to_hf, sections_from_hf, updated_config

__all__ = [
    "HFTensors",
    "HFWeights",
    "ImportedModel",
    "config_to_hf",
    "fill_chunk",
    "import_hf",
    "sections_from_hf",
    "training_note",
    "updated_config",
]
