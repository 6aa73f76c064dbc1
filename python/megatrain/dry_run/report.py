"""Text of the result of a dry run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from megatrain.dry_run.run import DryRun, StepCosts
from megatrain.plan.footprint import memory_text

# Phases of a step, in order; the others are between them.
_PHASES = ("build", "forward", "backward", "grad_reduce", "optimizer", "param_gather")
_PASSES = ("forward", "backward")


def dry_run_text(found: DryRun) -> str:
    """Format the result of a dry run, line by line."""
    where = " ".join(f"{axis} {position}" for axis, position in found.coordinates.items())
    lines = [f"rank        {found.rank:,} of {found.world_size:,}: {where}"]
    costs = found.costs
    if costs is None:
        return "\n".join([*lines, f"error       {found.error}"])
    lines += _memory_lines(found, costs)
    lines += _operation_lines(costs)
    lines += _sync_lines(costs)
    lines += _group_lines(costs)
    lines.append(
        f"start       {costs.build_s:.1f} s to build the rank here, without drawing weights; "
        f"{costs.step_s:.1f} s for the last step"
    )
    verdict = "both steps run" if found.works else "the host waits for the device where it must not"
    return "\n".join([*lines, f"result      {verdict}"])


def _memory_lines(found: DryRun, costs: StepCosts) -> list[str]:
    peaks = [
        f"{phase.replace('_', ' ')} {memory_text(costs.peak_bytes[phase])}"
        for phase in _PHASES
        if phase in costs.peak_bytes
    ]
    lines = [f"memory      at most {memory_text(costs.most_bytes)} of tensors: {', '.join(peaks)}"]
    if found.predicted:
        total = sum(found.predicted.values())
        parts = ", ".join(
            f"{kind.replace('_', ' ')} {memory_text(size)}"
            for kind, size in found.predicted.items()
        )
        lines.append(
            f"            megacore plan predicts {memory_text(total)} "
            f"({costs.most_bytes / total - 1:+.1%} here): {parts}"
        )
    return lines


def _operation_lines(costs: StepCosts) -> list[str]:
    """Format operations per layer and microbatch, of layers alike in one line."""
    by_layer: defaultdict[str, dict[str, float]] = defaultdict(dict)
    outside = 0
    for (phase, layer), number in costs.operations.items():
        if phase in _PASSES:
            by_layer[layer][phase] = number / costs.num_microbatches
        else:
            outside += number
    alike: defaultdict[str, list[str]] = defaultdict(list)
    for layer, numbers in sorted(by_layer.items(), key=lambda item: _order(item[0])):
        text = " + ".join(f"{numbers.get(phase, 0):.0f}" for phase in _PASSES)
        alike[text].append(layer or "(before the first layer)")
    lines = [
        f"operations  {sum(costs.operations.values()):,} in a step, {outside:,} of them outside of "
        "passes; of a microbatch, forward + backward:"
    ]
    return lines + [
        f"            {text:>13}  {', '.join(ranges(each))}" for text, each in alike.items()
    ]


def _order(layer: str) -> tuple[int, int, str]:
    name, _, number = layer.partition(".")
    return (1, int(number), name) if number.isdecimal() else (name != "embedding", 10**6, name)


def ranges(layers: Iterable[str]) -> list[str]:
    """Join consecutive layers.

    Example:
        >>> ranges(["embedding", "layers.0", "layers.1", "layers.2", "layers.5"])
        ['embedding', 'layers.0-2', 'layers.5']
    """
    found: list[list[str]] = []
    for layer in layers:
        name, _, number = layer.partition(".")
        last = found[-1] if found else None
        if last and number.isdecimal() and last[-1] == f"{name}.{int(number) - 1}":
            last.append(layer)
        else:
            found.append([layer])
    return [
        each[0] if len(each) == 1 else f"{each[0]}-{each[-1].rpartition('.')[2]}" for each in found
    ]


def _sync_lines(costs: StepCosts) -> list[str]:
    lines = [
        f"host reads  {number:,} of the {read.name} ({read.place})"
        for read, number in costs.reads.items()
    ]
    return lines + [
        f"host sync   {number:,} times {sync}; read values by megacore.host_values, outside of "
        "passes"
        for sync, number in costs.syncs.items()
    ]


def _group_lines(costs: StepCosts) -> list[str]:
    sizes: Mapping[str, int] = costs.groups
    listed = ", ".join(f"{name} {size:,}" for name, size in sizes.items()) or "none"
    return [f"groups      {costs.num_communicators} communicators of this rank: {listed}"]
