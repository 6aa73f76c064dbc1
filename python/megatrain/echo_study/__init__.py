"""Comparison of clone planners on synthetic and recorded routings; not used by training runs."""
