"""Dry runs: two training steps of one rank of any world, on a machine without its devices."""

from megatrain.dry_run.fake_cuda import CAPABILITIES
from megatrain.dry_run.report import dry_run_text
from megatrain.dry_run.run import CudaCheck, DryRun, StepCosts, dry_run, measure_steps
from megatrain.dry_run.tracker import DryRunError, StepTracker

__all__ = [
    "CAPABILITIES",
    "CudaCheck",
    "DryRun",
    "DryRunError",
    "StepCosts",
    "StepTracker",
    "dry_run",
    "dry_run_text",
    "measure_steps",
]
