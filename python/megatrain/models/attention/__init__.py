"""Attention blocks, blockwise attention and context parallelism."""
