"""Planners of clones side by side, on synthetic and recorded routings; no run uses it."""
