"""Recorder of the collectives and messages of a rank, and its files."""
