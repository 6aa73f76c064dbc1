"""Text of the result of a dry run."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping

from megacore.host_values import HostRead
from megatrain.dry_run.run import CudaCheck, DryRun, StepCosts
from megatrain.plan.footprint import memory_text

# Phases of a step, in order; the others are between them.
_PHASES = ("build", "passes", "forward", "backward", "grad_reduce", "optimizer", "param_gather")
_PASSES = ("forward", "backward")


def dry_run_text(found: DryRun) -> str:
    """Format the result of a dry run, line by line."""
    where = " ".join(f"{axis} {position}" for axis, position in found.coordinates.items())
    lines = [f"rank        {found.rank:,} of {found.world_size:,}: {where}"]
    costs = found.costs
    if costs is None:
        return "\n".join([*lines, f"error       {found.error}", *_cuda_lines(found.cuda)])
    lines += _memory_lines(found, costs)
    lines += _operation_lines(costs)
    lines += _sync_lines(costs)
    lines += [f"graphs      {note}" for note in costs.notes]
    lines += _group_lines(costs)
    lines.append(
        f"start       {costs.build_s:.1f} s to build the rank here, without drawing weights; "
        f"{costs.step_s:.1f} s for the last step; {costs.num_saved:,} pieces of a checkpoint"
    )
    lines += _cuda_lines(found.cuda)
    verdict = "works" if found.works else "fails: see host sync and error"
    return "\n".join([*lines, f"result      {verdict}"])


def _cuda_lines(check: CudaCheck | None) -> list[str]:
    if check is None:
        return []
    what = "{} ({}.{}), fake".format(check.device.upper(), *check.capability)
    if check.error is not None:
        return [f"error       on {what}: {check.error}"]
    return [
        f"device      {what}: forward passes and an update, {check.num_operations:,} operations",
        f"kernels     {check.kernels}",
        *(f"note        {note}" for note in check.notes),
        *_read_lines(check.reads),
        *(f"host sync   {number:,} times {sync}" for sync, number in check.syncs.items()),
    ]


def _memory_lines(found: DryRun, costs: StepCosts) -> list[str]:
    peaks = [
        f"{phase.replace('_', ' ')} {memory_text(costs.peak_bytes[phase])}"
        for phase in _PHASES
        if phase in costs.peak_bytes and (phase != "passes" or "forward" not in costs.peak_bytes)
    ]
    lines = [f"memory      at most {memory_text(costs.most_bytes)} of tensors: {', '.join(peaks)}"]
    if found.predicted:
        total = sum(found.predicted.values())
        parts = ", ".join(
            f"{kind.replace('_', ' ')} {memory_text(size)}"
            for kind, size in found.predicted.items()
        )
        lines.append(
            f"            predicted: {memory_text(total)} "
            f"({costs.most_bytes / total - 1:+.1%} here): {parts}"
        )
    return lines


def _operation_lines(costs: StepCosts) -> list[str]:
    """Format operations per layer and microbatch, of layers with equal forward passes together."""
    by_layer: defaultdict[str, dict[str, int]] = defaultdict(dict)
    num_outside = 0
    for (phase, layer), number in costs.operations.items():
        if phase in ("passes", *_PASSES):  # the passes of a graph are not divided
            phase = "forward" if phase == "passes" else phase
            of_layer = by_layer[layer]
            of_layer[phase] = of_layer.get(phase, 0) + round(number / costs.num_microbatches)
        else:
            num_outside += number
    alike: defaultdict[int, list[str]] = defaultdict(list)
    for layer in sorted(by_layer, key=_order):
        alike[by_layer[layer].get("forward", 0)].append(layer)
    lines = [
        f"operations  {sum(costs.operations.values()):,} in a step, {num_outside:,} outside of "
        "passes; of a microbatch, forward + backward:"
    ]
    for forward, layers in alike.items():
        backwards = [by_layer[layer].get("backward", 0) for layer in layers]
        least, most = min(backwards), max(backwards)
        backward = f"{least}" if least == most else f"{least} to {most}"
        shown = ", ".join(layer or "before all layers" for layer in ranges(layers))
        lines.append(f"            {forward:>6,} + {backward}  {shown}")
    return lines


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
    return _read_lines(costs.reads) + [
        f"host sync   {number:,} times {sync}; read values by megacore.host_values, outside of "
        "passes"
        for sync, number in costs.syncs.items()
    ]


def _read_lines(reads: Mapping[HostRead, int]) -> list[str]:
    return [
        f"host reads  {number:,} of the {read.name} ({read.place})"
        for read, number in reads.items()
    ]


def _group_lines(costs: StepCosts) -> list[str]:
    sizes: Mapping[str, int] = costs.groups
    listed = ", ".join(f"{name} {size:,}" for name, size in sizes.items()) or "none"
    return [f"groups      {costs.num_communicators} communicators of this rank: {listed}"]
