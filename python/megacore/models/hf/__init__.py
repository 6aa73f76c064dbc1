"""Models in the folder format of Hugging Face: import and export of weights and configuration."""

from megacore.models.hf.export_hf import HFTensors
from megacore.models.hf.fine_tuning import training_note
from megacore.models.hf.import_hf import HFWeights, ImportedModel, fill_chunk, import_hf
from megacore.models.hf.settings import config_to_hf, sections_from_hf, updated_config

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
