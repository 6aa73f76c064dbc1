"""Two training steps of one rank without its devices and peers, and what they cost."""

from __future__ import annotations

import time
import traceback
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from megacore.host_values import HostRead, short_place
from megacore.parallel.process_groups import Group
from megatrain.config import ResolvedConfig
from megatrain.config.base import Section
from megatrain.dry_run.fake_cuda import CAPABILITIES, fake_cuda
from megatrain.dry_run.tracker import (
    BUILD,
    OUTSIDE,
    DryRunError,
    StepTracker,
    TrackedActions,
    TrackedClock,
    is_own,
)
from megatrain.dry_run.world import fake_world, same_data
from megatrain.plan.compare_run import predicted_tensors
from megatrain.plan.layout import make_topology
from megatrain.train.kernels import gpu_kernels, kernel_notes
from megatrain.train.trainer import Trainer, build_trainer
from megatrain.train.watch import RunWatch

S = TypeVar("S", bound=Section)
# The first step also makes what later ones keep. With graphs the second one is captured.
NUM_STEPS = 2


@dataclass(frozen=True, kw_only=True)
class StepCosts:
    """Costs of one rank's start and of its last step.

    Attributes:
        build_s: Wall time of the construction, seconds.
        step_s: Wall time of the last step on this host, seconds.
        peak_bytes: Most bytes of tensors at once, by phase.
        operations: Operations of torch that the step starts, by phase and layer.
        reads: Reads of device values of the step, with their number.
        syncs: Host synchronizations past the one function for reads, by operation and place.
        groups: Ranks of each process group of more than one rank.
        num_communicators: Distinct groups of more than one rank.
        num_microbatches: Microbatches of the step.
        num_saved: Pieces of tensors that this rank has of a checkpoint.
        num_graphs: Graphs that were captured, emulated.
        notes: Notes on their capture.
    """

    build_s: float
    step_s: float
    peak_bytes: Mapping[str, int]
    operations: Mapping[tuple[str, str], int]
    reads: Mapping[HostRead, int]
    syncs: Mapping[str, int]
    groups: Mapping[str, int]
    num_communicators: int
    num_microbatches: int
    num_saved: int
    num_graphs: int = 0
    notes: tuple[str, ...] = ()

    @property
    def most_bytes(self) -> int:
        """Most bytes of tensors at once."""
        return max(self.peak_bytes.values())


@dataclass(frozen=True, kw_only=True)
class CudaCheck:
    """Forward passes and an update on CUDA tensors without values.

    Attributes:
        device: Name of the device.
        capability: Its compute capability.
        num_operations: Operations of torch that ran.
        reads: As in `StepCosts`.
        syncs: As in `StepCosts`.
        kernels: Kernels of this installation that the device runs.
        notes: Notes at the start of a run on products that are slower than they could be.
        error: The first error with its place; ``None`` without one.
    """

    device: str
    capability: tuple[int, int]
    num_operations: int
    reads: Mapping[HostRead, int]
    syncs: Mapping[str, int]
    kernels: str
    notes: tuple[str, ...]
    error: str | None

    @property
    def works(self) -> bool:
        """True if the passes ran, without host synchronizations past the one function for reads."""
        return self.error is None and not self.syncs


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Result of a dry run.

    Attributes:
        world_size: Number of ranks.
        rank: The rank that ran.
        coordinates: Its position on each parallel axis.
        predicted: Bytes of tensors by kind as ``megacore plan`` predicts them; empty for a model of
            one's own.
        costs: Costs of the rank; ``None`` after an error.
        error: The first error with its place; ``None`` without one.
        cuda: The same on the branches of a GPU, without backward passes; ``None`` if not asked for.
    """

    world_size: int
    rank: int
    coordinates: Mapping[str, int]
    predicted: Mapping[str, float]
    costs: StepCosts | None
    error: str | None
    cuda: CudaCheck | None = None

    @property
    def works(self) -> bool:
        """True if all ran, without host synchronizations past the one function for reads."""
        runs_on_cuda = self.cuda is None or self.cuda.works
        return self.costs is not None and not self.costs.syncs and runs_on_cuda


def dry_run(
    config: ResolvedConfig, *, world_size: int, rank: int, device: str | None = None
) -> DryRun:
    """Build one rank of a world on torch's meta device and run two steps.

    Messages and results of collectives have shapes and no values; nothing is written.

    Args:
        config: Resolved configuration for ``world_size`` ranks.
        world_size: Number of ranks.
        rank: The rank to run.
        device: Name of a GPU, of ``CAPABILITIES``: forward passes and an update are run on its
            branches too.
    """
    config = _for_dry_run(config)
    tracker = StepTracker("meta")
    costs = error = None
    with fake_world(world_size, rank):
        try:
            costs = measure_steps(
                config, world_size=world_size, device=torch.device("meta"), tracker=tracker
            )
        except Exception as found:
            error = describe_error(found, tracker)
    cuda = None if device is None else check_cuda(config, world_size, rank, device)
    coordinates = make_topology(config.parallel, world_size).coordinates(rank)
    predicted: dict[str, float] = {}
    if config.model.factory is None:
        predicted = predicted_tensors(config, world_size)[coordinates["pp"]]
    return DryRun(
        world_size=world_size,
        rank=rank,
        coordinates=coordinates,
        predicted=predicted,
        costs=costs,
        error=error,
        cuda=cuda,
    )


def measure_steps(
    config: ResolvedConfig, *, world_size: int, device: torch.device, tracker: StepTracker
) -> StepCosts:
    """Build a rank and run two steps on data of one shape; process groups must exist. Collective.

    With a real device this is the same run, for comparisons.
    """
    start = time.perf_counter()
    clock = TrackedClock(device, tracker)
    with tracker.running(), tracker.phase(BUILD):
        trainer = build_trainer(
            config, world_size=world_size, device=device, data=same_data(config), clock=clock
        )
        built = time.perf_counter()
        tracker.name_params(_named_tensors(trainer))
        graphs, recorder = trainer.graphs, TrackedActions(trainer.groups.rank, tracker)
        watch = RunWatch(trainer)
        # A graph of all passes cannot record actions.
        is_whole = config.graphs.mode.startswith("full")
        build_peak = tracker.peak_bytes[BUILD]
        with tracker.phase(OUTSIDE):
            for step in range(NUM_STEPS if graphs is None else NUM_STEPS + 1):
                tracker.clear()
                started = time.perf_counter()
                watch.before_step(step)
                metrics = trainer.train_step(step, recorder=None if is_whole else recorder)
                watch.measure(step, metrics)
    end = time.perf_counter()
    handles = {id(group.handle) for group in _groups(trainer) if group.handle is not None}
    return StepCosts(
        build_s=built - start,
        step_s=end - started,
        peak_bytes={BUILD: build_peak, **tracker.peak_bytes},
        operations=Counter(tracker.operations),
        reads=Counter(tracker.reads),
        syncs=Counter(tracker.syncs),
        groups={group.name: group.size for group in _groups(trainer) if group.size > 1},
        num_communicators=len(handles),
        num_microbatches=trainer.eager.num_microbatches,
        num_saved=sum(len(piece.tensors) for piece in trainer.pieces()),
        num_graphs=0 if graphs is None or graphs.measured is None else graphs.measured.num_graphs,
        notes=() if graphs is None else tuple(graphs.take_notes()),
    )


def check_cuda(config: ResolvedConfig, world_size: int, rank: int, device: str) -> CudaCheck:
    """Build a rank on CUDA tensors without values, and run its forward passes and an update."""
    tracker, error, kernels = StepTracker("cuda"), None, ""
    notes: tuple[str, ...] = ()
    # Forward passes are those of a validation. Graphs would need the kernels of a GPU.
    config = changed_section(
        config,
        train=changed_section(config.train, eval_steps=1),
        graphs=changed_section(config.graphs, mode="off"),
    )
    capability = CAPABILITIES[device]
    with fake_world(world_size, rank), fake_cuda(capability) as place:
        try:
            with tracker.running(), tracker.phase(BUILD):
                trainer = build_trainer(
                    config,
                    world_size=world_size,
                    device=place,
                    data=same_data(config),
                    clock=TrackedClock(torch.device("meta"), tracker),
                    initialize=False,
                )
                tracker.clear()
                tracker.name_params(_named_tensors(trainer))
                kernels = gpu_kernels(config.train, trainer.chunks, place)
                notes = kernel_notes(config.train, trainer.chunks, device=place)
                trainer.evaluate()
                trainer.optimizer.zero_grads()
                trainer.optimizer.step(lr=trainer.learning_rate(0))
        except Exception as found:  # any error is the result
            error = describe_error(found, tracker)
    return CudaCheck(
        device=device,
        capability=capability,
        num_operations=sum(tracker.operations.values()),
        reads=Counter(tracker.reads),
        syncs=Counter(tracker.syncs),
        kernels=kernels,
        notes=notes,
        error=error,
    )


def describe_error(error: BaseException, tracker: StepTracker) -> str:
    """Describe an error with its place in the code, its layer and its action."""
    kind = "" if isinstance(error, DryRunError) else f"{type(error).__name__}: "
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if is_own(frame.filename)
    ]
    place = ""
    if frames:
        last = frames[-1]
        place = f" at {short_place(last.filename, last.lineno or 0)} in {last.name}"
    near = f", after a use of {tracker.param}" if tracker.param else ""
    notes = "".join(f"\n  {note}" for note in getattr(error, "__notes__", ()))
    return f"{kind}{str(error).strip()}{place}{near}{notes}"


def _named_tensors(trainer: Trainer) -> list[tuple[str, torch.Tensor]]:
    """Return the parameters and their gradients with the parameters' names."""
    frozen = trainer.frozen.params
    found: list[tuple[str, torch.Tensor]] = [(info.name, param.detach()) for info, param in frozen]
    for buffer in trainer.optimizer.buffers:
        for index, (info, param) in enumerate(buffer.params):
            found += [(info.name, param.detach()), (info.name, buffer.main_grad(index))]
    return found


def _groups(trainer: Trainer) -> list[Group]:
    groups = [each for each in vars(trainer.groups).values() if isinstance(each, Group)]
    return groups + list((trainer.groups.pp_channels or {}).values())


def _for_dry_run(config: ResolvedConfig) -> ResolvedConfig:
    """Return the settings without files of routings, and with graphs from the second step on."""
    debug = changed_section(config.debug, record_routing=None, replay_routing=None)
    graphs = changed_section(config.graphs, warmup_steps=1)
    return changed_section(config, debug=debug, graphs=graphs)


def changed_section(section: S, **values: Any) -> S:
    """Return a section with other values of some settings.

    Raises:
        ValueError: If it has no such setting.
    """
    if unknown := set(values) - set(type(section).model_fields):
        raise ValueError(f"{type(section).__name__} has no setting {', '.join(sorted(unknown))}")
    return section.model_copy(update=values)
