"""Evaluation of all planners on given routings."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from megacore._core import DEFAULT_TOLERANCE
from megacore.moe.echo.plan import Counts, OffloadPlan, plan_offload
from megatrain.echo_study.baselines import place_by_load


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Result of one planner on one matrix of counts.

    Attributes:
        imbalance: Max load over mean load of ranks, with the plan.
        num_clones: Experts whose weights must be sent to another rank.
        num_moved_tokens: Tokens computed on another rank than their expert's home.
        remote_fraction: Fraction of all tokens that leave their source rank; None if the planner
            does not assign tokens by source rank.
        bound_holds: Whether every rank fits the planner's static buffer; None without such a bound.
        plan_us: Planning time, microseconds; 0 without a plan.
    """

    imbalance: float
    num_clones: int
    num_moved_tokens: float
    remote_fraction: float | None = None
    bound_holds: bool | None = None
    plan_us: float = 0.0


@dataclass(frozen=True, kw_only=True)
class PlannerSummary:
    """Summary of one planner over all steps of a workload; means, except fields named otherwise."""

    workload: str
    planner: str
    imbalance: float
    imbalance_worst: float
    num_clones: float
    num_moved_tokens: float
    remote_fraction: float | None
    bound_held: float | None
    plan_us_median: float


@dataclass(frozen=True, kw_only=True)
class SimulationOptions:
    """Planner options; see :func:`megacore.moe.plan_offload`."""

    num_spare_slots: int = 2
    tolerance: float = DEFAULT_TOLERANCE
    domain_size: int | None = None


PLANNERS = ("none", "echo", "balanced", "eplb-style", "eplb-style, previous step")


def simulate(
    workload: str, steps: Iterable[Counts], options: SimulationOptions
) -> list[PlannerSummary]:
    """Run every planner on every step; one summary per planner, in the order of ``PLANNERS``.

    Args:
        workload: Display name of the workload.
        steps: Counts ``(R, E)`` per step.
        options: Options of all planners.

    Raises:
        ValueError: If there are no steps, or an option or a matrix is invalid.
    """
    results: dict[str, list[StepResult]] = {planner: [] for planner in PLANNERS}
    previous: Counts | None = None
    for counts in steps:
        for planner in PLANNERS:
            results[planner].append(_run(planner, counts, previous, options))
        previous = counts
    if previous is None:
        raise ValueError("there is no step to simulate; at least 1 is needed")
    return [_summarise(workload, planner, results[planner]) for planner in PLANNERS]


def _run(
    planner: str, counts: Counts, previous: Counts | None, options: SimulationOptions
) -> StepResult:
    if planner == "none":
        return _run_native(counts, options, "echo", num_spare_slots=0, timed=False)
    if planner in ("echo", "balanced"):
        return _run_native(counts, options, planner, num_spare_slots=options.num_spare_slots)
    known = counts if previous is None or planner == "eplb-style" else previous
    return _run_eplb(counts, known, options)


def _run_native(
    counts: Counts,
    options: SimulationOptions,
    planner: str,
    *,
    num_spare_slots: int,
    timed: bool = True,
) -> StepResult:
    start = time.perf_counter_ns()
    plan = plan_offload(
        counts,
        num_spare_slots=num_spare_slots,
        planner="balanced" if planner == "balanced" else "echo",
        tolerance=options.tolerance,
        domain_size=options.domain_size if planner == "balanced" else None,
    )
    plan_us = (time.perf_counter_ns() - start) / 1e3
    return StepResult(
        imbalance=plan.imbalance_after,
        num_clones=plan.num_clones,
        num_moved_tokens=plan.num_moved_tokens,
        remote_fraction=remote_fraction(counts, plan),
        bound_holds=plan.bound_holds if timed else None,
        plan_us=plan_us if timed else 0.0,
    )


def _run_eplb(counts: Counts, known: Counts, options: SimulationOptions) -> StepResult:
    num_ranks = len(counts)
    start = time.perf_counter_ns()
    placement = place_by_load(
        known.sum(axis=0), num_ranks=num_ranks, num_spare_slots=options.num_spare_slots
    )
    plan_us = (time.perf_counter_ns() - start) / 1e3
    loads = placement.rank_loads(counts.sum(axis=0))
    return StepResult(
        imbalance=float(loads.max() / loads.mean()) if loads.any() else 1.0,
        num_clones=placement.num_moved_experts,
        num_moved_tokens=placement.num_moved_tokens(counts.sum(axis=0)),
        plan_us=plan_us,
    )


def remote_fraction(counts: Counts, plan: OffloadPlan) -> float:
    """Compute the fraction of tokens that are computed outside the rank that routed them.

    Args:
        counts: ``(R, E)``, the counts of the plan.
        plan: Plan from ``counts``.
    """
    num_ranks, num_experts = counts.shape
    source = np.arange(num_ranks)
    at_home = counts.reshape(num_ranks, num_ranks, num_experts // num_ranks)[source, source].sum()
    # Subtract a source's tokens for its own experts that clones on other ranks compute.
    home = plan.slot_expert // (num_experts // num_ranks)
    taken = sum(plan.rerouted[rank][home == rank].sum() for rank in range(num_ranks))
    local = at_home - taken + plan.rerouted[source, source].sum()
    total = counts.sum()
    return float(1.0 - local / total) if total else 0.0


def _summarise(workload: str, planner: str, results: Sequence[StepResult]) -> PlannerSummary:
    remote = [r.remote_fraction for r in results if r.remote_fraction is not None]
    held = [r.bound_holds for r in results if r.bound_holds is not None]
    return PlannerSummary(
        workload=workload,
        planner=planner,
        imbalance=float(np.mean([r.imbalance for r in results])),
        imbalance_worst=max(r.imbalance for r in results),
        num_clones=float(np.mean([r.num_clones for r in results])),
        num_moved_tokens=float(np.mean([r.num_moved_tokens for r in results])),
        remote_fraction=float(np.mean(remote)) if remote else None,
        bound_held=float(np.mean(held)) if held else None,
        plan_us_median=float(np.median([r.plan_us for r in results])),
    )


def table(summaries: Sequence[PlannerSummary]) -> str:
    """Format summaries as a table, one line each.

    Columns: max load over mean load, mean and worst over the steps; clones (expert weights sent)
    per step; tokens computed outside their home rank per step; fraction of tokens that cross ranks;
    fraction of steps in which the static buffer's bound held; planning time in microseconds.
    """
    header = (
        "workload",
        "planner",
        "max/mean",
        "worst",
        "clones",
        "moved",
        "remote",
        "bound",
        "us",
    )
    rows = [header, *(_row(summary) for summary in summaries)]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header))]
    lines = []
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def _row(summary: PlannerSummary) -> tuple[str, ...]:
    return (
        summary.workload,
        summary.planner,
        f"{summary.imbalance:.4f}",
        f"{summary.imbalance_worst:.4f}",
        f"{summary.num_clones:.1f}",
        f"{summary.num_moved_tokens:.0f}",
        "-" if summary.remote_fraction is None else f"{100 * summary.remote_fraction:.1f}%",
        "-" if summary.bound_held is None else f"{100 * summary.bound_held:.0f}%",
        f"{summary.plan_us_median:.0f}" if summary.plan_us_median else "-",
    )
