"""Answer to "will it fit, and how fast": memory and step time of a run, with what would help."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from megatrain.plan.cost import LayerCosts
from megatrain.plan.device import Device
from megatrain.plan.footprint import GIB, Footprint, footprints, memory_text
from megatrain.plan.spec import ModelSpec, RunSpec
from megatrain.plan.step_time import StepTime, stage_layers, step_time

State = Sequence[Mapping[str, float]]
# A total within this share of the capacity is too close to call.
TIGHT = 0.05


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Predicted memory and time of a run.

    Attributes:
        model: Shape of the model.
        spec: Layout.
        device: Calibration that was used.
        layers: Layers of each stage.
        ranks: Memory of each pipeline position.
        step: Time of a step.
    """

    model: ModelSpec
    spec: RunSpec
    device: Device
    layers: tuple[int, ...]
    ranks: tuple[Footprint, ...]
    step: StepTime

    @property
    def fullest(self) -> Footprint:
        """The pipeline position that needs the most memory."""
        return max(self.ranks, key=lambda rank: rank.total)

    @property
    def capacity(self) -> float:
        """Bytes that a device has."""
        return self.device.peak_memory_gib * GIB

    @property
    def margin(self) -> float:
        """Bytes left on the fullest rank; negative if they are missing."""
        return self.capacity - self.fullest.total

    @property
    def verdict(self) -> Literal["fits", "tight", "does not fit"]:
        """Result for the fullest rank and its device; within 5% of the capacity it is tight."""
        if abs(self.margin) <= TIGHT * self.capacity:
            return "tight"
        return "fits" if self.margin > 0 else "does not fit"

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step, all ranks."""
        return self.spec.global_batch * self.model.seq_length

    @property
    def tokens_per_gpu(self) -> float:
        """Tokens per second and device."""
        return self.tokens_per_step / self.step.seconds / self.spec.gpus

    @property
    def flops_per_gpu(self) -> float:
        """Useful operations per second and device: causal attention, nothing counted twice."""
        return self.tokens_per_gpu * self.model.flops_per_token

    @property
    def mfu(self) -> float:
        """Share of the peak of matrix products in the format of the run."""
        return self.flops_per_gpu / self.device.peak_flops(self.spec.precision)


def forecast(
    model: ModelSpec, spec: RunSpec, device: Device, state: State | None = None
) -> Forecast:
    """Predict memory and time of a run.

    Args:
        model: Shape of the model.
        spec: Layout.
        device: Calibration.
        state: Exact bytes of each pipeline rank's weights, gradients and optimizer state.

    Raises:
        ValueError: If the schedule cannot be built for this layout.
    """
    costs = LayerCosts(model, spec, device)
    layers = stage_layers(model, spec, costs)
    return Forecast(
        model=model,
        spec=spec,
        device=device,
        layers=layers,
        ranks=tuple(footprints(model, spec, device, layers, state)),
        step=step_time(model, spec, device, costs),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Advice:
    """A change that was tried.

    Attributes:
        change: The change in words.
        saved: Bytes saved on the fullest rank.
        slower: Relative change of the step time.
        forecast: Prediction with the change.
    """

    change: str
    saved: float
    slower: float
    forecast: Forecast

    @property
    def text(self) -> str:
        """One sentence, as ``recompute the MLP: -18.0 GiB, +6% time``."""
        fits = "" if self.forecast.verdict == "fits" else f" ({self.forecast.verdict})"
        same = abs(self.saved) < 1024
        memory = "equal memory" if same else memory_text(-self.saved, sign="+")
        return f"{self.change}: {memory}, {self.slower:+.1%} time{fits}"


def advise(base: Forecast, count: int = 3) -> list[Advice]:
    """Try single changes and return the most useful ones.

    If the run does not fit, the fastest changes that make it fit come first, then those that save
    the most; if it fits, the fastest ones that still fit.
    """
    # Without padding, so that exact state bytes of the base do not count as a difference.
    plain = forecast(base.model, base.spec, base.device)
    found = []
    for change, spec in _changes(base.spec):
        try:
            other = forecast(base.model, spec, base.device)
        except ValueError:
            continue
        found.append(
            Advice(
                change=change,
                saved=plain.fullest.total - other.fullest.total,
                slower=other.step.seconds / plain.step.seconds - 1,
                forecast=other,
            )
        )
    if base.verdict == "fits":
        fitting = [each for each in found if each.forecast.verdict == "fits"]
        faster = [each for each in fitting if each.slower < -0.002]
        smaller = [each for each in fitting if each.saved > 0.01 * base.capacity]
        ranked = sorted(faster, key=_slower) + sorted(smaller, key=_slower)
        return list(dict.fromkeys(ranked))[:count]
    fitting = [each for each in found if each.forecast.verdict == "fits"]
    others = [each for each in found if each.saved > 0 and each not in fitting]
    return (sorted(fitting, key=_slower) + sorted(others, key=lambda e: -e.saved))[:count]


def _slower(advice: Advice) -> float:
    return advice.slower


def _changes(spec: RunSpec) -> list[tuple[str, RunSpec]]:
    """List single changes of a layout that keep the number of devices and the batch."""
    changes = []
    for name, words in (
        ("norm", "the norms"),
        ("activation", "the activations of MLPs"),
        ("mlp", "the MLPs"),
        ("moe", "the MoE layers"),
        ("layer", "whole layers"),
    ):
        if name not in spec.recompute and "layer" not in spec.recompute:
            if name == "moe" and spec.ep == 1 and spec.etp == 1 and spec.dispatcher == "alltoall":
                continue
            parts = frozenset({"layer"}) if name == "layer" else spec.recompute | {name}
            changes.append((f"recompute {words}", replace(spec, recompute=parts)))
    if spec.recompute:
        changes.append(("recompute nothing", replace(spec, recompute=frozenset())))
    if spec.zero == 0 and spec.dp * spec.cp > 1:
        changes.append(("shard the optimizer state (ZeRO-1)", replace(spec, zero=1)))
    if "dp" not in spec.overlap and spec.dp > 1:
        overlap = spec.overlap - {"grads", "params"} | {"dp"}
        changes.append(
            ("overlap gradient reduction and parameter gather", replace(spec, overlap=overlap))
        )
    if spec.tp > 1 and not spec.sequence_parallel:
        changes.append(("sequence parallelism", replace(spec, sequence_parallel=True)))
    if spec.grad_bytes == 4 and spec.param_bytes == 2:
        changes.append(("16-bit gradients", replace(spec, grad_bytes=2)))
    if spec.state_bytes == 12:
        changes.append(("16-bit moments", replace(spec, state_bytes=8)))
    per_rank = spec.global_batch // spec.dp
    for size in (spec.microbatch * 2, spec.microbatch // 2):
        if size and per_rank % size == 0:
            changes.append((f"microbatches of {size}", replace(spec, microbatch=size)))
    if spec.pp > 1 and spec.schedule == "1f1b":
        changes.append(("the schedule zb_h1", replace(spec, schedule="zb_h1")))
    return changes
