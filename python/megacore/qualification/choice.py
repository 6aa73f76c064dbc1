"""The choice between our kernels and torch's operations for a run, which all ranks share."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch

from megacore import host_values
from megacore.ops.cuda_module import is_assumed, runs_kernels
from megacore.ops.kernel_choice import MEASURED, NARROW_DTYPES, PRODUCT_NAMES, leave_to_torch
from megacore.parallel.collectives import all_reduce_
from megacore.parallel.process_groups import Group
from megacore.qualification.cases import Sizes, operation_names
from megacore.qualification.verdict import Verdict, facts_of, find_verdict, known_verdict
from megacore.suggest import did_you_mean

Kernels = Literal["auto", "trust", "torch"]
Cause = Literal["slower", "fault", "asked"]
_CAUSES: tuple[Cause, ...] = ("slower", "fault", "asked")  # a later one counts more
_MOST_SHOWN = 3
# Products in 16 bits that take this much longer than in float32 are worth a note.
_SLOW_FACTOR = 2.0


@dataclass(frozen=True, kw_only=True)
class KernelChoice:
    """Operations that torch computes in a run although there are kernels.

    Attributes:
        device: Device that the choice was made for: its type, and its name.
        causes: By operation: ``"slower"``, ``"fault"``, or ``"asked"`` for.
        reasons: Text by operation.
        mode: The setting that the choice follows.
        slow: Why the dtype of the run is slow on this device; empty if it is not.
    """

    device: tuple[str, str]
    causes: Mapping[str, Cause]
    reasons: Mapping[str, str]
    mode: Kernels = "auto"
    slow: str = ""

    def use(self) -> None:
        """Let this process compute as chosen from now on."""
        leave_to_torch(self.causes.keys(), self.device[0])

    def state(self) -> dict[str, Any]:
        """Return the choice as JSON values, for a checkpoint."""
        return {"device": list(self.device), "causes": dict(self.causes)}

    def text(self) -> str:
        """Describe the choice in one line.

        Example:
            >>> reasons = {"gelu": "1.5x slower at 7 x 8"}
            >>> causes = dict.fromkeys(reasons, "slower")
            >>> KernelChoice(device=("cuda", ""), causes=causes, reasons=reasons).text()
            '33 operations by our kernels, 1 by torch (gelu 1.5x slower at 7 x 8)'
        """
        names = [n for n in operation_names(self.device[0]) if n not in MEASURED]
        left = [name for name in names if name in self.causes]
        text = f"{len(names) - len(left)} operations by our kernels"
        if left:
            shown = "; ".join(f"{name} {self.reasons[name]}" for name in left[:_MOST_SHOWN])
            more = "; ..." if len(left) > _MOST_SHOWN else ""
            text += f", {len(left)} by torch ({shown}{more})"
        if self.device[0] == "cpu":
            ours = [name for name in MEASURED if name not in self.causes]
            text += f"; by ours where they are faster: {_brief(ours) or 'none'}"
        return text

    def notes(self) -> tuple[str, ...]:
        """Return notes on kernels that torch replaces against expectation, and on a slow dtype."""
        notes = (self.slow,) if self.slow else ()
        found = [n for n, cause in self.causes.items() if cause != "asked" and n not in MEASURED]
        if not found:
            return notes
        shown = "; ".join(f"{name} {self.reasons[name]}" for name in found)
        return (*notes, f"torch computes {len(found)} of our operations: {shown}")


def choose_kernels(
    device: torch.device,
    *,
    kernels: Kernels = "auto",
    torch_operations: Collection[str] = (),
    sizes: Sizes | None = None,
    dtype: torch.dtype = torch.float32,
    world: Group | None = None,
    imports: Sequence[str] = (),
    folder: Path | None = None,
) -> KernelChoice:
    """Choose between our kernels and torch for all operations, and use the choice. Collective.

    On the first use of a device, driver and build, a child process compares each kernel with its
    reference on awkward shapes, and times both: on GPUs on the sizes of the run, on CPUs the
    products of linear layers and attention. Torch computes operations whose kernel differs, ends
    the process or is slower, on all ranks if on one.

    Args:
        device: Device of this rank.
        kernels: ``"auto"`` as above, ``"trust"`` for our kernels without a trial, or ``"torch"``
            for none of ours.
        torch_operations: Names of operations that torch computes in any case, of
            `operation_names`, or their first words: ``"linear"`` for all products of linear
            layers, ``"linear.float32.large"``, ``"attention"``.
        sizes: Sizes of the run, to time the operations of GPUs; ``None`` for none.
        dtype: dtype of activations.
        world: All ranks of the run; ``None`` for one.
        imports: Modules that the child process imports, such as those that replace kernels.
        folder: Folder for verdicts, see `megacore.qualification.verdict`.

    Returns:
        The choice, the same on all ranks but for the reasons.

    Raises:
        ValueError: If a name or ``kernels`` is unknown.

    Sync:
        Waits for all ranks, at the first use of a device for several seconds.
    """
    if kernels not in get_args(Kernels):
        raise ValueError(f"kernels must be one of {', '.join(get_args(Kernels))}, got {kernels!r}")
    kind = device.type if device.type in ("cpu", "cuda") else "cpu"
    check_names(torch_operations)
    asked = [n for n in operation_names(kind) if {n, *_starts(n)} & set(torch_operations)]
    causes: dict[str, Cause] = {}
    reasons: dict[str, str] = {}
    is_here = device.type == "cpu" or (device.type == "cuda" and not is_assumed())
    has_values = is_here and (world is None or not world.is_fake)
    verdict = known_verdict(device, dtype=dtype) if has_values and kind == "cpu" else None
    if kernels == "torch":
        asked = list(operation_names(kind))
    elif kernels == "auto" and has_values and (kind == "cpu" or runs_kernels(device)):
        measured, verdict = _measured(device, sizes, dtype, imports, folder)
        for cause, found in measured.items():
            causes |= dict.fromkeys(found, cause)
            reasons |= found
    causes |= dict.fromkeys(asked, "asked")
    reasons |= dict.fromkeys(asked, "by run.kernels")
    if world is not None and world.size > 1 and has_values:
        causes = _united(causes, device, world)
        reasons = {name: reasons.get(name, "on another rank") for name in causes}
    choice = KernelChoice(
        device=(kind, _name_of(device) if has_values else ""),
        causes=MappingProxyType(causes),
        reasons=MappingProxyType(reasons),
        mode=kernels,
        slow=_slow_text(verdict, str(dtype).removeprefix("torch."), causes),
    )
    if device.type in ("cpu", "cuda"):
        choice.use()
    return choice


def check_names(names: Collection[str]) -> None:
    """Check names of operations, of CPUs or of GPUs: one configuration serves both.

    Raises:
        ValueError: If a name is unknown.
    """
    own = operation_names("cpu") + operation_names("cuda")
    known = tuple(dict.fromkeys([*own, *(start for name in own for start in _starts(name))]))
    for name in names:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"{name!r} is no operation with a kernel{hint}")


def _starts(name: str) -> list[str]:
    """Return the first words of a name: of ``"a.b.c"``, ``"a"`` and ``"a.b"``."""
    words = name.split(".")
    return [".".join(words[:count]) for count in range(1, len(words))]


def _brief(names: Collection[str]) -> str:
    """Join names of `MEASURED`; products of one size are one, with their words if not all."""
    words: dict[str, list[str]] = {}
    for name in names:
        start, _, last = name.rpartition(".")
        if last in PRODUCT_NAMES:
            words.setdefault(start, []).append(last)
        else:
            words[name] = [*PRODUCT_NAMES]
    return ", ".join(
        start if len(found) == len(PRODUCT_NAMES) else f"{start} ({', '.join(found)})"
        for start, found in words.items()
    )


def keep_choice(
    now: KernelChoice, saved: Mapping[str, Any]
) -> tuple[KernelChoice, tuple[str, ...]]:
    """Return the choice that continues a run, and notes on what differs from before.

    On the same device, the measurements of the checkpoint count, because other kernels may change
    sums in their last bits; faults that were found since, and what is asked for, count more.

    Args:
        now: The choice of this start.
        saved: `KernelChoice.state` at the checkpoint; empty if it has none.

    Example:
        >>> device = "cpu", "Zen 5"
        >>> now = KernelChoice(device=device, causes={}, reasons={})
        >>> kept, notes = keep_choice(now, {"device": device, "causes": {"gelu": "slower"}})
        >>> dict(kept.causes), notes
        ({'gelu': 'slower'}, ())
        >>> kept, notes = keep_choice(now, {"device": device, "causes": {"gelu": "asked"}})
        >>> notes
        ('gelu is computed by our kernel, before the checkpoint by torch: sums may differ in their \
last bits',)
    """
    if not saved:
        return now, ()
    known = operation_names(now.device[0])
    before: dict[str, Cause] = {n: cause for n, cause in saved["causes"].items() if n in known}
    kept: dict[str, Cause] = dict(now.causes)
    # The names of another version say nothing about those of now.
    is_comparable = len(before) == len(saved["causes"])
    if tuple(saved["device"]) == now.device and now.mode == "auto" and is_comparable:
        slower = [name for name, cause in before.items() if cause == "slower"]
        kept = {name: cause for name, cause in kept.items() if cause != "slower"}
        kept |= {name: "slower" for name in slower if name not in kept}
    reasons = {name: now.reasons.get(name, "slower when the run started") for name in kept}
    choice = replace(now, causes=MappingProxyType(kept), reasons=MappingProxyType(reasons))
    return choice, _changes(before.keys(), kept.keys())


def _changes(before: Collection[str], after: Collection[str]) -> tuple[str, ...]:
    changes = [
        (sorted(set(after) - set(before)), "torch", "our kernel"),
        (sorted(set(before) - set(after)), "our kernel", "torch"),
    ]
    return tuple(
        f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} computed by {one}, before the "
        f"checkpoint by {other}: sums may differ in their last bits"
        for names, one, other in changes
        if names
    )


def _measured(
    device: torch.device,
    sizes: Sizes | None,
    dtype: torch.dtype,
    imports: Sequence[str],
    folder: Path | None,
) -> tuple[dict[Cause, dict[str, str]], Verdict | None]:
    """Return operations and reasons from the verdict, and it; all, if there is none."""
    try:
        verdict = find_verdict(device, sizes=sizes, dtype=dtype, imports=imports, folder=folder)
    except (OSError, RuntimeError) as error:
        text = f"could not be tried ({str(error).splitlines()[0]})"
        return {"fault": dict.fromkeys(operation_names(device.type), text)}, None
    slower = verdict.slower()
    if device.type == "cpu":
        slower |= {name: "not measured" for name in MEASURED if name not in verdict.times}
    return {"slower": slower, "fault": dict(verdict.faults)}, verdict


def _slow_text(verdict: Verdict | None, dtype: str, left: Collection[str]) -> str:
    """Return a note if products of linear layers in a 16-bit dtype are slow; else nothing."""
    if verdict is None or dtype not in NARROW_DTYPES:
        return ""
    factor = verdict.narrow_factor(dtype, left)
    if factor <= _SLOW_FACTOR:
        return ""
    return (
        f"products of linear layers in {dtype} take {factor:g}x the time of float32 on this "
        'processor; train.dtype = "float32" is faster'
    )


def _united(causes: Mapping[str, Cause], device: torch.device, world: Group) -> dict[str, Cause]:
    """Return what torch computes on any rank. Collective."""
    names = operation_names(device.type)
    codes = [0 if name not in causes else 1 + _CAUSES.index(causes[name]) for name in names]
    codes_of_all = torch.tensor(codes, dtype=torch.int32, device=device)
    all_reduce_(codes_of_all, world, op="max")
    found = host_values.read(codes_of_all, "choice of kernels")
    return {name: _CAUSES[code - 1] for name, code in zip(names, found, strict=True) if code}


def _name_of(device: torch.device) -> str:
    if device.type == "cuda":
        return f"{torch.cuda.get_device_name(device)}"
    return f"{facts_of(device)['device']}, {torch.get_num_threads()} threads"
