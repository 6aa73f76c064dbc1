"""Launching, watching, stepping, saving: a training run."""
