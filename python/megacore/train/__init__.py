"""The training loop: steps, graphs, metrics, console and results of a run."""
