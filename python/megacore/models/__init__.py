"""The GPT: layers that tensor parallelism splits, chunks that pipeline stages hold, generation."""
