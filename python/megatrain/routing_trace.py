"""Recording of routing decisions in a folder, step by step, and their replay.

Choices are indexed by optimizer step, layer, global sample and position, so a run can replay a
recording in a different parallel layout. ``routing.json`` describes the recorded run; each rank
writes one file of its choices per step.

Shapes: S this rank's part of the sequence, B batch, T = S * B tokens, k choices per token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from megacore.errors import MegacoreError
from megacore.moe.router import TokenNames

ABOUT_NAME = "routing.json"
_FORMAT = "megacore-routing"
_FORMAT_VERSION = 1
_STEP_FILE = re.compile(r"step_(\d{8,})\.rank_\d+\.safetensors")


class RoutingLog:
    """Routing choices, indexed by token identifiers.

    Example:
        >>> names = TokenNames(
        ...     step=0, sample_ids_B=torch.tensor([7, 9]), positions_S=torch.arange(2)
        ... )
        >>> log = RoutingLog()
        >>> log.record(3, names, torch.tensor([[0], [1], [2], [3]]))
        >>> second = TokenNames(step=0, sample_ids_B=torch.tensor([9]), positions_S=torch.arange(2))
        >>> log.expert_ids(3, second).flatten().tolist()
        [1, 3]
    """

    def __init__(self) -> None:
        # (step, layer, sample) -> (positions, k), int32; -1 where nothing was recorded.
        self._choices: dict[tuple[int, int, int], Tensor] = {}

    def record(self, layer: int, names: TokenNames, expert_ids: Tensor) -> None:
        """Store the choices of one forward pass.

        Args:
            layer: Global index of the layer.
            names: The tokens.
            expert_ids: ``RoutingResult.expert_ids``, ``(T, k)``, int64.

        Raises:
            ValueError: If the number of choices differs from the number of tokens in ``names``.

        Sync:
            Waits for the device: the log is stored on the host.
        """
        samples, positions = names.sample_ids_B.tolist(), names.positions_S.cpu()
        if expert_ids.shape[0] != len(samples) * positions.numel():
            raise ValueError(
                f"{expert_ids.shape[0]} tokens were routed, but {positions.numel()} positions of "
                f"{len(samples)} samples are named"
            )
        ids_SBK = expert_ids.to("cpu", torch.int32).unflatten(0, (-1, len(samples)))  # type: ignore[no-untyped-call]
        length = int(positions.max()) + 1 if positions.numel() else 0
        for index, sample in enumerate(samples):
            key = (names.step, layer, sample)
            known = self._choices.get(key, ids_SBK.new_empty(0, expert_ids.shape[1]))
            if known.shape[0] < length:
                grown = known.new_full((length, known.shape[1]), -1)
                grown[: known.shape[0]] = known
                known = grown
            known[positions] = ids_SBK[:, index]
            self._choices[key] = known

    def expert_ids(self, layer: int, names: TokenNames) -> Tensor:
        """Look up the choices of these tokens, for ``TopKRouter.forward(expert_ids=...)``.

        Args:
            layer: Global index of the layer.
            names: The tokens.

        Returns:
            ``(T, k)``, int64, on the device of ``names``.

        Raises:
            KeyError: If a token was not recorded; the message identifies the token.

        Sync:
            Waits for the device.
        """
        positions = names.positions_S.cpu()
        columns = []
        for sample in names.sample_ids_B.tolist():
            known = self._choices.get((names.step, layer, sample))
            where = f"sample {sample} of step {names.step} in layer {layer}"
            if known is None:
                raise KeyError(f"no choices of {where} are recorded")
            if positions.numel() and int(positions.max()) >= known.shape[0]:
                raise KeyError(f"position {int(positions.max())} of {where} is not recorded")
            picked = known[positions]
            if (picked < 0).any():
                missing = int(positions[(picked < 0).any(1)][0])
                raise KeyError(f"position {missing} of {where} is not recorded")
            columns.append(picked)
        ids = torch.stack(columns, dim=1).flatten(0, 1)
        return ids.to(names.sample_ids_B.device, torch.int64)

    @property
    def is_empty(self) -> bool:
        """True if nothing was recorded."""
        return not self._choices

    def save(self, path: Path) -> None:
        """Write the log to a safetensors file."""
        tensors = {f"{step}.{layer}.{sample}": t for (step, layer, sample), t in self._items()}
        save_file(tensors, path)

    @classmethod
    def load(cls, *paths: Path) -> RoutingLog:
        """Read a log, or merge the logs of several ranks that each recorded some tokens."""
        log = cls()
        for path in paths:
            for name, choices in load_file(path).items():
                step, layer, sample = (int(part) for part in name.split("."))
                positions = (choices >= 0).all(1).nonzero().flatten()
                names = TokenNames(
                    step=step, sample_ids_B=torch.tensor([sample]), positions_S=positions
                )
                log.record(layer, names, choices[positions].long())
        return log

    def _items(self) -> list[tuple[tuple[int, int, int], Tensor]]:
        return sorted(self._choices.items(), key=lambda item: item[0])


@dataclass(frozen=True, kw_only=True)
class Recorded:
    """Settings that must match for a replay, because they determine token identifiers or experts.

    Attributes:
        settings: Values by key, such as ``"moe.num_experts"``.
    """

    settings: Mapping[str, Any]

    def difference(self, other: Recorded) -> str | None:
        """Describe the first setting that differs: this value, then that of ``other``."""
        for key, value in self.settings.items():
            theirs = other.settings.get(key)
            if theirs != value:
                return f"{key} = {value}, but it was recorded with {theirs}"
        return None


class RoutingRecorder:
    """Writer of this rank's routing decisions.

    Rank 0 prepares the folder when the first step starts and deletes recordings of that step and
    later steps by an earlier run.

    Args:
        folder: Output folder, on a file system that all ranks share.
        recorded: Settings of this run.
        rank: Global rank of this process.
    """

    def __init__(self, folder: Path, recorded: Recorded, *, rank: int) -> None:
        self._folder = folder
        self._recorded = recorded
        self._rank = rank
        self._is_ready = False
        self.log = RoutingLog()

    def start_step(self, step: int) -> None:
        """Discard unwritten decisions, and prepare the folder before the first step.

        Raises:
            MegacoreError: On rank 0, if the folder contains other files or is not writable.
        """
        self.log = RoutingLog()
        if self._rank == 0 and not self._is_ready:
            _writing(self._folder, lambda: self._prepare(step))
        self._is_ready = True

    def finish_step(self, step: int) -> None:
        """Write the decisions of a step; the file is renamed into place when complete.

        Raises:
            MegacoreError: If the file cannot be written.
        """
        if not self.log.is_empty:
            _writing(self._folder, lambda: self._write(step))

    def _prepare(self, step: int) -> None:
        check_recording_folder(self._folder)
        self._folder.mkdir(parents=True, exist_ok=True)
        if step > 0 and (self._folder / ABOUT_NAME).exists():
            difference = self._recorded.difference(read_recorded(self._folder))
            if difference is not None:
                raise MegacoreError(
                    f"debug.record_routing = {self._folder} holds the steps before this one, but "
                    f"this run has {difference}; name another folder"
                )
        for number, path in step_files(self._folder):
            if number >= step:
                path.unlink()
        about = {
            "format": _FORMAT,
            "format_version": _FORMAT_VERSION,
            "settings": dict(self._recorded.settings),
        }
        _replace(
            self._folder / ABOUT_NAME,
            lambda path: path.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8"),
        )

    def _write(self, step: int) -> None:
        name = f"step_{step:08d}.rank_{self._rank:04d}.safetensors"
        _replace(self._folder / name, self.log.save)


class RoutingReplay:
    """Reader of a recording, one step at a time.

    Args:
        folder: Folder of the recording.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._log = RoutingLog()

    def start_step(self, step: int) -> None:
        """Read a step.

        Raises:
            MegacoreError: If the step was not recorded, or a file is damaged.
        """
        paths = [path for number, path in step_files(self._folder) if number == step]
        if not paths:
            raise MegacoreError(_no_step(self._folder, step))
        try:
            self._log = RoutingLog.load(*paths)
        except (OSError, SafetensorError, ValueError) as error:
            raise MegacoreError(
                f"debug.replay_routing = {self._folder}: cannot read step {step + 1:,}: {error}"
            ) from error

    def expert_ids(self, layer: int, names: TokenNames) -> Tensor:
        """Look up recorded choices as `RoutingLog.expert_ids` does.

        Raises:
            MegacoreError: If a token was not recorded.
        """
        try:
            return self._log.expert_ids(layer, names)
        except KeyError as error:
            raise MegacoreError(
                f"debug.replay_routing = {self._folder} is incomplete: {error.args[0]}"
            ) from error


@dataclass(frozen=True, kw_only=True)
class RoutingTape:
    """Recorder and replay that routers use in training; see `TopKRouter`.

    Attributes:
        recorder: Records decisions; ``None`` to disable recording.
        replay: Replaces the router's decisions; ``None`` to disable replay.
    """

    recorder: RoutingRecorder | None = None
    replay: RoutingReplay | None = None

    def start_step(self, step: int) -> None:
        """Prepare for a step, before its first forward pass."""
        for part in (self.recorder, self.replay):
            if part is not None:
                part.start_step(step)

    def finish_step(self, step: int) -> None:
        """Write the recorded decisions of a step."""
        if self.recorder is not None:
            self.recorder.finish_step(step)

    def choose(self, layer: int, names: TokenNames, decide: Callable[[], Tensor]) -> Tensor:
        """Choose the experts of some tokens, ``(T, k)`` int64.

        Sync:
            Waits for the device if a recorder or a replay is set.
        """
        ids = decide() if self.replay is None else self.replay.expert_ids(layer, names)
        if self.recorder is not None:
            self.recorder.log.record(layer, names, ids)
        return ids


def check_recording_folder(folder: Path) -> None:
    """Check that a folder can be used for a recording.

    Raises:
        MegacoreError: If the folder contains anything other than a recording.
    """
    if folder.is_dir() and (folder / ABOUT_NAME).exists():
        return
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise MegacoreError(
            f"debug.record_routing = {folder} holds something else than a recording; name a "
            "new folder"
        )


def check_replay(folder: Path, recorded: Recorded, *, steps: int) -> None:
    """Check that a recording matches a run.

    Args:
        folder: Folder of the recording.
        recorded: Settings of this run.
        steps: Total number of steps at the end of the run.

    Raises:
        MegacoreError: With the first mismatch.
    """
    difference = recorded.difference(read_recorded(folder))
    if difference is not None:
        raise MegacoreError(
            f"debug.replay_routing = {folder} does not fit this run: {difference}; set it as it was"
        )
    if steps - 1 not in {number for number, _ in step_files(folder)}:
        raise MegacoreError(_no_step(folder, steps - 1))


def read_recorded(folder: Path) -> Recorded:
    """Read the settings of a recording.

    Raises:
        MegacoreError: If the folder does not contain a recording of a supported format.
    """
    path = folder / ABOUT_NAME
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise MegacoreError(
            f"{folder} is no recording of routing decisions: it has no {ABOUT_NAME}; name the "
            "folder that a run had as debug.record_routing"
        ) from None
    except (OSError, ValueError) as error:
        raise MegacoreError(f"cannot read {path}: {error}") from error
    known = isinstance(about, dict) and isinstance(about.get("settings"), dict)
    if not known or (about.get("format"), about.get("format_version")) != (
        _FORMAT,
        _FORMAT_VERSION,
    ):
        raise MegacoreError(f"{path} does not describe a recording that this megacore reads")
    return Recorded(settings=about["settings"])


def _no_step(folder: Path, step: int) -> str:
    numbers = sorted({number for number, _ in step_files(folder)})
    held = f"steps {numbers[0] + 1:,} to {numbers[-1] + 1:,}" if numbers else "no steps"
    return (
        f"debug.replay_routing = {folder} does not have step {step + 1:,}: it holds {held}; record "
        "more, or train fewer steps (train.steps)"
    )


def step_files(folder: Path) -> list[tuple[int, Path]]:
    """List the files of a recording as (step, path), sorted by file name."""
    if not folder.is_dir():
        return []
    found = ((_STEP_FILE.fullmatch(path.name), path) for path in sorted(folder.iterdir()))
    return [(int(match[1]), path) for match, path in found if match]


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    partial = path.with_name(path.name + ".partial")
    write(partial)
    partial.replace(path)


def _writing(folder: Path, action: Callable[[], None]) -> None:
    try:
        action()
    except (OSError, SafetensorError) as error:
        raise MegacoreError(
            f"cannot write to debug.record_routing = {folder}: {error}; name another folder"
        ) from error
