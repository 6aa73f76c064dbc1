"""Pretend models for checkpoint tests: parameters with known values, cut for any tp x dp layout."""

from __future__ import annotations

import itertools
import json
import math
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from megacore.optim import ParamPiece
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.params import shard
from megacore.parallel.process_groups import Group, ProcessGroups
from megatrain.checkpoint import TrainState, save_checkpoint

KINDS = ("main_param", "exp_avg", "exp_avg_sq")

T = TypeVar("T")


def full_values(info: ParamInfo, kind: str) -> Tensor:
    """Values that differ between parameters and kinds; equal on every call."""
    seed = sum(ord(letter) for letter in f"{info.name}/{kind}") * 7919 + KINDS.index(kind)
    return torch.randn(info.full_shape, generator=torch.Generator().manual_seed(seed))


def make_pieces(
    infos: Sequence[ParamInfo],
    *,
    tp: tuple[int, int],
    dp: tuple[int, int],
    cut: Callable[[str, int], Sequence[int]] | None = None,
    distributed: bool = True,
    filled: bool = True,
) -> list[ParamPiece]:
    """What a rank at ``(position, size)`` on the tp and the dp axis holds.

    Args:
        infos: All parameters.
        tp: Position and size of the tensor-parallel axis.
        dp: Position and size of the data-parallel axis.
        cut: Borders of the dp shards of a flattened parameter, ``dp size - 1`` rising numbers, from
            its name and element count. Default: even.
        distributed: Whether dp ranks share the elements (ZeRO-1) or each hold all.
        filled: True values, or NaN for pieces that are to be loaded.
    """
    pieces = []
    for info in infos:
        numel = math.prod(info.local_shape(tp[1]))
        inner = (
            list(cut(info.name, numel)) if cut else [numel * d // dp[1] for d in range(1, dp[1])]
        )
        borders = [0, *inner, numel] if distributed else [0, numel]
        start, end = list(itertools.pairwise(borders))[dp[0] if distributed else 0]
        tensors = {}
        for kind in KINDS:
            local = shard(full_values(info, kind), info, tp_position=tp[0], tp_size=tp[1])
            values = local.flatten()[start:end].clone()
            tensors[kind] = values if filled else torch.full_like(values, math.nan)
        holders = Group.solo() if distributed else None
        piece = ParamPiece(info=info, start=start, end=end, tensors=tensors, holders=holders)
        pieces.append(piece)
    return pieces


def assert_equal_pieces(found: Sequence[ParamPiece], expected: Sequence[ParamPiece]) -> None:
    """Compare bit for bit."""
    assert len(found) == len(expected)
    for mine, theirs in zip(found, expected, strict=True):
        for kind in KINDS:
            bits = mine.tensors[kind].view(torch.int32), theirs.tensors[kind].view(torch.int32)
            assert torch.equal(*bits), f"{kind} of {mine.info.name}"


class ThreadWorld:
    """Ranks as threads of one process, for code that only gathers objects over the world.

    From then on the checkpoint code gathers through this world.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, tp: int, dp: int) -> None:
        self.tp, self.dp = tp, dp
        self.size = tp * dp
        self._barrier = threading.Barrier(self.size, timeout=20)
        self._slots: list[Any] = [None] * self.size
        for name in ("gather_objects", "broadcast_object"):
            monkeypatch.setattr(f"megatrain.checkpoint.agreement.{name}", getattr(self, f"_{name}"))

    def run(self, fn: Callable[[ProcessGroups], T]) -> list[T]:
        """Call ``fn`` on every rank; return the results, or raise the first error."""
        with ThreadPoolExecutor(self.size) as pool:
            futures = [pool.submit(fn, self._groups(rank)) for rank in range(self.size)]
        return [future.result() for future in futures]

    def _gather_objects(self, obj: Any, group: Group) -> list[Any]:
        found = self._all_gather(obj, group)
        return found if group.position == 0 else []

    def _broadcast_object(self, obj: Any, group: Group) -> Any:
        return self._all_gather(obj, group)[0]

    def _all_gather(self, obj: Any, group: Group) -> list[Any]:
        self._slots[group.position] = obj
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def _groups(self, rank: int) -> ProcessGroups:
        handle: Any = self
        world = Group("world", tuple(range(self.size)), rank, handle)
        first = rank // self.tp * self.tp
        tp = Group("tp", tuple(range(first, first + self.tp)), rank % self.tp, handle)
        dp_ranks = tuple(range(rank % self.tp, self.size, self.tp))
        dp = Group("dp", dp_ranks, rank // self.tp, handle)
        sizes = {"world_size": self.size, "tp": self.tp, "dp": self.dp, "expert_dp": self.dp}
        topology: Any = SimpleNamespace(**sizes, cp=1, pp=1, ep=1, etp=self.tp, order="tp-dp")
        return replace(
            ProcessGroups.single(),
            topology=topology,
            rank=rank,
            world=world,
            tp=tp,
            etp=tp,
            dp=dp,
            holders=dp,
        )


# ---- a small checkpoint of one process ----------------------------------------------------------

GROUPS = ProcessGroups.single()
WEIGHT = ParamInfo(name="layers.0.w", full_shape=(16, 16), tp_dim=0)
NORM = ParamInfo(name="norm", full_shape=(16,), tp_dim=None)
TENSORS = "__0_0.distcp"
CONFIG = {"model": {"num_layers": 1, "hidden_size": 16}}


def small_pieces(*infos: ParamInfo) -> list[ParamPiece]:
    """All of ``infos``, by default of a matrix and a vector."""
    return make_pieces(infos or (WEIGHT, NORM), tp=(0, 1), dp=(0, 1))


def save_small(directory: Path, step: int = 3, **options: Any) -> Path:
    """Write a checkpoint of both and return its folder; options as of ``save_checkpoint``."""
    state = TrainState(step=step, samples=step * 8, optimizer={"step_count": step})
    return save_checkpoint(
        directory, small_pieces(), state=state, config=CONFIG, groups=GROUPS, **options
    )


def edit_index(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change ``index.json`` and correct its checksum, as if it had been written like that."""
    data = json.loads((folder / "index.json").read_text())
    del data["crc32"]
    change(data)
    data["crc32"] = zlib.crc32((json.dumps(data, indent=1) + "\n").encode())
    (folder / "index.json").write_text(json.dumps(data, indent=1) + "\n")


def replace_file(folder: Path, name: str, raw: bytes) -> None:
    """Replace a file, with a correct checksum."""
    (folder / name).write_bytes(raw)
    entry = {"num_bytes": len(raw), "crc32": zlib.crc32(raw)}
    edit_index(folder, lambda data: data["files"].update({name: entry}))


def make_older(folder: Path) -> Path:
    """Turn a checkpoint into one of before ``tensors.idx``; returns its folder."""
    (folder / "tensors.idx").unlink()
    edit_index(folder, lambda data: data["files"].pop("tensors.idx"))
    return folder


def names_in(directory: Path) -> list[str]:
    """What a folder holds, sorted."""
    return sorted(path.name for path in directory.iterdir())
