"""The GPT: tensor-parallel layers, model chunks of pipeline stages, generation."""
