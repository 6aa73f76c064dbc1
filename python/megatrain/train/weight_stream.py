"""Weights of a running model as a stream of Hugging Face tensors, out of it and into it.

For those who serve a model while it is trained, and for reinforcement learning: no file is written,
and no rank holds the whole model. Both directions use the tables of import and export.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megacore import host_values
from megacore.errors import CheckpointError, MegacoreError
from megacore.optim import ParamPiece
from megacore.optim.weight_average import AVERAGE
from megacore.parallel.collectives import (
    all_gather_objects,
    all_reduce_,
    broadcast_,
    irecv,
    isend,
)
from megacore.parallel.process_groups import Group
from megatrain.checkpoint import StoredWeights
from megatrain.checkpoint.agreement import on_every_rank, on_rank_0
from megatrain.checkpoint.chunks import MAIN_PARAM, Chunk, chunks_of
from megatrain.checkpoint.model_files import FOLDER_NAME
from megatrain.config import Config, ResolvedConfig, config_from_values
from megatrain.hf.assembly import Part, TensorAssembly
from megatrain.hf.export_plan import ExportPlan, plan_export
from megatrain.hf.kept_files import KeptFiles
from megatrain.train.trainer import Trainer

WhichRanks = Literal["rank 0", "all"]
# Of messages with parts of weights.
_TAG = 0


def stream_weights(
    source: Trainer | str | Path,
    *,
    to: WhichRanks = "rank 0",
    dtype: str | None = None,
    family: str | None = None,
    averaged: bool = False,
) -> Iterator[tuple[str, Tensor | None]]:
    """Iterate over the weights as whole Hugging Face tensors, equal to those of ``export-hf``.

    Of a trainer: collective, in any layout; every rank must iterate to the end. If one stops
    early, the others get an error at the next tensor. Of a checkpoint: in this process alone, after
    its checksums were verified; with several processes, each reads for itself.

    Memory, beside what the caller keeps: on the ranks that get tensors one tensor, or the part of a
    parameter that has several (queries, keys and values of a layer; gate and up of one expert), and
    16 MB for messages. A tensor is on the device of the trainer, or on the CPU, and stays valid.

    Args:
        source: A trainer; or a checkpoint folder, the folder of all checkpoints, or a run's folder.
        to: Ranks that get tensors; others get ``None`` in their place.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``. Default: as ``export-hf``: that of
            each tensor of the imported files; of a model from scratch, ``train.dtype``.
        family: ``model_type`` whose names the tensors have. Default: as ``export-hf``.
        averaged: The moving average of the weights (``optimizer.ema_decay``).

    Yields:
        Name and tensor, in the order of the layers.

    Raises:
        CheckpointError: If a checkpoint is missing or damaged, or there is no moving average.
        MegacoreError: If no family has the model's shape, or another rank has stopped early.

    Sync:
        Waits for the device, and for all ranks at each part of a parameter.
    """
    if to not in ("rank 0", "all"):
        raise ValueError(f'to must be "rank 0" or "all", got {to!r}')
    if isinstance(source, Trainer):
        return _stream_trainer(source, to=to, dtype=dtype, family=family, averaged=averaged)
    return _stream_checkpoint(Path(source), dtype=dtype, family=family, averaged=averaged)


def _stream_checkpoint(
    path: Path, *, dtype: str | None, family: str | None, averaged: bool
) -> Iterator[tuple[str, Tensor]]:
    with StoredWeights(path, averaged=averaged) as stored, torch.no_grad():
        config = config_from_values(stored.config, source=str(stored.folder))
        _refuse_adapters(config)
        kept = KeptFiles.of(config.data.tokenizer, stored.folder)
        tensors = plan_export(config, kept, dtype=dtype, family=family).tensors
        for spec, value in tensors.whole(lambda name, a, b, _: stored.read_part(name, a, b)):
            assert value is not None
            yield spec.name, value


def _stream_trainer(
    trainer: Trainer, *, to: WhichRanks, dtype: str | None, family: str | None, averaged: bool
) -> Iterator[tuple[str, Tensor | None]]:
    plan = plan_of_run(trainer, dtype=dtype, family=family)
    world, device = trainer.groups.world, trainer.device
    parts = _GatheredParts(trainer, to_all=to == "all", averaged=averaged)
    last: Part | None = None

    def read(name: str, first: int, end: int, wire: torch.dtype | None) -> Tensor | None:
        nonlocal last
        last = Part(name=name, first=first, last=end)
        _check_all_go_on(world, device)
        return parts.read(last, wire)

    try:
        with torch.no_grad():
            for spec, value in plan.tensors.whole(read):
                yield spec.name, value
    except GeneratorExit:
        _count_stopped(world, device, stops=True)
        raise
    _check_all_go_on(world, device)


def plan_of_run(
    trainer: Trainer, *, dtype: str | None = None, family: str | None = None
) -> ExportPlan:
    """Decide the tensors of a trainer's model as for an export of its checkpoints. Collective.

    The files of an imported model are read on rank 0: those kept with the run, or of the folder
    that it starts from.

    Raises:
        MegacoreError: On every rank, if no family has the model's shape.
    """
    _refuse_adapters(trainer.config)
    kept = on_rank_0(lambda: _kept_files(trainer.config), trainer.groups)
    return plan_export(trainer.config, kept, dtype=dtype, family=family)


def _refuse_adapters(config: Config | ResolvedConfig) -> None:
    """Refuse a run whose parameters are not those of the model."""
    if config.lora.is_on:
        raise MegacoreError(
            f"the weights of a stream are whole, but this run trains adapters (lora.rank = "
            f"{config.lora.rank}); `megacore export-hf RUN OUT --merge` writes merged weights"
        )


def _kept_files(config: ResolvedConfig) -> KeptFiles:
    run, weights = Path(config.run.dir), config.checkpoint.load_weights
    if weights is not None and not (run / FOLDER_NAME).is_dir():
        run = Path(weights)
    return KeptFiles.of(config.data.tokenizer, run)


def weights_checksum(trainer: Trainer) -> str:
    """Return a checksum of the weights, equal for equal float32 weights in any layout. Collective.

    It is the sum of their bits as whole numbers, each weight weighed by its position.

    Sync:
        Waits for the device and for all ranks.
    """
    parts = _GatheredParts(trainer, to_all=False, averaged=False)
    total = torch.zeros((), dtype=torch.int64, device=trainer.device)
    for name, values, flat in parts.own_values():
        bits = values.float().view(torch.int32).to(torch.int64)
        total += (bits * (2 * flat + 1 + 2 * zlib.crc32(name.encode()))).sum()
    all_reduce_(total, trainer.groups.world)
    return f"{int(host_values.read(total, 'checksum')) % (1 << 64):016x}"


class _GatheredParts:
    """Parts of parameters that are gathered from the ranks that hold them. Collective."""

    def __init__(self, trainer: Trainer, *, to_all: bool, averaged: bool) -> None:
        groups = trainer.groups
        self._world, self._device, self._to_all = groups.world, trainer.device, to_all
        if averaged and trainer.average is None:
            raise CheckpointError(
                "there is no moving average of the weights, which runs keep with "
                "optimizer.ema_decay above 0; leave averaged out"
            )
        pieces = _weight_pieces(trainer.pieces(), averaged=averaged)
        own = [piece for piece in pieces if not piece.info.is_shared_copy]
        self._own = {(_param_of(chunk), chunk.offsets): chunk for chunk in chunks_of(own, groups)}
        self._full_shapes: dict[str, tuple[int, ...]] = {}
        # The rank, number format and size of each box, by parameter and place.
        self._boxes: dict[str, dict[tuple[int, ...], tuple[int, torch.dtype, torch.Size]]] = {}
        mine = [
            (name, at, chunk.full_shape, chunk.tensor.dtype, chunk.tensor.shape)
            for (name, at), chunk in self._own.items()
        ]
        for rank, boxes in enumerate(all_gather_objects(mine, self._world)):
            for name, at, full_shape, dtype, sizes in boxes:
                self._full_shapes[name] = full_shape
                self._boxes.setdefault(name, {}).setdefault(at, (rank, dtype, sizes))

    def read(self, part: Part, wire: torch.dtype | None) -> Tensor | None:
        """Gather a part on rank 0, or on all ranks; returns ``None`` on others."""
        boxes = self._boxes[part.name]
        stored = next(iter(boxes.values()))[1]
        wire = stored if wire is None else wire
        gets = self._to_all or self._world.position == 0
        shape = (part.last - part.first, *self._full_shapes[part.name][1:])
        whole = torch.empty(shape, dtype=wire, device=self._device) if gets else None
        for at, (owner, _, sizes) in boxes.items():
            first, last = max(at[0], part.first), min(at[0] + sizes[0], part.last)
            if first < last:
                target = None
                if whole is not None:
                    target = _box_of(
                        whole, (first - part.first, *at[1:]), (last - first, *sizes[1:])
                    )
                own = self._own.get((part.name, at))
                source = None
                if owner == self._world.position and own is not None:
                    source = own.tensor[first - at[0] : last - at[0]]
                self._move(source, target, owner, (last - first, *sizes[1:]), wire)
        if self._to_all and whole is not None:
            broadcast_(whole, self._world)
        return whole

    def own_values(self) -> Iterator[tuple[str, Tensor, Tensor]]:
        """Yield the values that this rank gives, by box: parameter, values, and their positions.

        Over all ranks, each value comes once. A position is that in the flattened parameter.
        """
        for (name, at), chunk in self._own.items():
            if self._boxes[name][at][0] == self._world.position:
                flat = torch.zeros((), dtype=torch.int64, device=self._device)
                for size, first, count in zip(
                    chunk.full_shape, at, chunk.tensor.shape, strict=True
                ):
                    index = torch.arange(first, first + count, device=self._device)
                    flat = flat[..., None] * size + index
                yield name, chunk.tensor.detach(), flat

    def _move(
        self,
        source: Tensor | None,
        target: Tensor | None,
        owner: int,
        sizes: tuple[int, ...],
        wire: torch.dtype,
    ) -> None:
        """Copy values of the owner into the target of rank 0."""
        if owner == 0:
            if source is not None and target is not None:
                target.copy_(source)
        elif source is not None:
            message = source.detach().to(wire).contiguous()
            isend(message, self._world, to_position=0, tag=_TAG).wait()
        elif self._world.position == 0:
            assert target is not None
            into = target
            if not target.is_contiguous():
                into = torch.empty(sizes, dtype=wire, device=self._device)
            irecv(into, self._world, from_position=owner, tag=_TAG).wait()
            if into is not target:
                target.copy_(into)


def refresh_weights(
    trainer: Trainer,
    tensors: Iterable[tuple[str, Tensor | None]] | None,
    *,
    of: WhichRanks = "rank 0",
    family: str | None = None,
) -> None:
    """Replace the weights of a trainer by a stream of whole Hugging Face tensors. Collective.

    Main weights, weights and correction biases of experts are replaced; moments, step count and
    moving average stay. The tensors may come in any order and number format, under all names that
    an import accepts; a rank holds one of them at a time, and those of a part that is not complete.

    Args:
        trainer: A trainer of any layout.
        tensors: Name and tensor of all weights, such as `stream_weights` yields.
        of: Ranks whose ``tensors`` are read: rank 0, which shows them to the others, or each rank
            its own, which must be equal. On other ranks ``tensors`` is not read.
        family: ``model_type`` whose names the tensors have. Default: as ``export-hf``.

    Raises:
        MegacoreError: On every rank, with the name of a tensor that is missing, unknown, of another
            shape or came twice, or if reading ``tensors`` failed. Weights that came before are
            replaced then: refresh again, or load a checkpoint.

    Sync:
        Waits for all ranks.
    """
    if of not in ("rank 0", "all"):
        raise ValueError(f'of must be "rank 0" or "all", got {of!r}')
    kind = plan_of_run(trainer, family=family).config["model_type"]
    assembly = TensorAssembly(kind, trainer.config.model, trainer.config.moe)
    boxes = _boxes_by_param(trainer, trainer.pieces())
    world, device = trainer.groups.world, trainer.device
    trainer.optimizer.finish_param_gather()

    def fill() -> None:
        own = iter(() if tensors is None else tensors)
        shown = own if of == "all" else _shown(own, world, device)
        for name, tensor in shown:
            if not isinstance(tensor, Tensor):
                raise MegacoreError(f"{name} must be a tensor, got {type(tensor).__name__}")
            assembly.check(name, tuple(tensor.shape), tensor.dtype)
            if tensor.is_meta:
                tensor = _broadcast(None, tensor, world, device)
            elif of != "all":
                tensor = _broadcast(tensor, tensor, world, device)
            for part, values in assembly.take(name, tensor):
                _fill(boxes.get(part.name, ()), part, values)
                del values
            del tensor  # its memory is free before the next one is there
        assembly.check_complete()

    with torch.no_grad():
        on_every_rank(fill, trainer.groups)
    trainer.optimizer.finish_load(trainer.optimizer.step_count)


def _boxes_by_param(trainer: Trainer, pieces: Sequence[ParamPiece]) -> dict[str, list[Chunk]]:
    found: dict[str, list[Chunk]] = {}
    for chunk in chunks_of(_weight_pieces(pieces), trainer.groups):
        found.setdefault(_param_of(chunk), []).append(chunk)
    return found


def _fill(boxes: Iterable[Chunk], part: Part, values: Tensor) -> None:
    """Copy the values of a part that are in the boxes of this rank."""
    for chunk in boxes:
        at, sizes = chunk.offsets, chunk.tensor.shape
        first, last = max(at[0], part.first), min(at[0] + sizes[0], part.last)
        if first < last:
            source = _box_of(values, (first - part.first, *at[1:]), (last - first, *sizes[1:]))
            chunk.tensor[first - at[0] : last - at[0]].copy_(source)


def _shown(
    own: Iterator[tuple[str, Tensor | None]], world: Group, device: torch.device
) -> Iterator[tuple[str, Tensor | None]]:
    """Show names and shapes of the tensors of rank 0 to all ranks; others get meta tensors.

    Raises:
        MegacoreError: On other ranks than 0, if reading failed there.
    """
    if world.size == 1:
        yield from own
        return
    if world.position > 0:
        while (header := _broadcast_json(None, world, device)) is not None:
            if "error" in header:
                raise MegacoreError(header["error"])
            dtype = getattr(torch, header["dtype"])
            yield header["name"], torch.empty(header["shape"], dtype=dtype, device="meta")
        return
    while True:
        try:
            name, tensor = next(own, (None, None))
            if name is not None and not isinstance(tensor, Tensor):
                raise MegacoreError(f"{name} must be a tensor, got {type(tensor).__name__}")
        except Exception as error:  # any error, because the other ranks wait for this one
            _broadcast_json({"error": f"{type(error).__name__}: {error}"}, world, device)
            raise
        if name is None or tensor is None:
            _broadcast_json(None, world, device)
            return
        dtype = str(tensor.dtype).removeprefix("torch.")
        header = {"name": name, "shape": list(tensor.shape), "dtype": dtype}
        _broadcast_json(header, world, device)
        yield name, tensor
        del tensor


def _broadcast_json(content: Any, world: Group, device: torch.device) -> Any:
    """Return the content of rank 0 on every rank; ``None`` is of length 0."""
    data = b"" if content is None else json.dumps(content).encode()
    length = torch.tensor([len(data)], dtype=torch.int64, device=device)
    broadcast_(length, world)
    count = host_values.read(length[0], "header of a tensor")
    if count == 0:
        return None
    data = data or bytes(count)
    message = torch.frombuffer(bytearray(data), dtype=torch.uint8).to(device)
    broadcast_(message, world)
    return json.loads(host_values.to_host(message, "header of a tensor").numpy().tobytes())


def _broadcast(tensor: Tensor | None, like: Tensor, world: Group, device: torch.device) -> Tensor:
    """Return the values of rank 0 on the device of every rank."""
    if tensor is None:
        values = torch.empty(like.shape, dtype=like.dtype, device=device)
    else:
        values = tensor.detach().to(device).contiguous()
    broadcast_(values, world)
    return values


def _weight_pieces(pieces: Sequence[ParamPiece], *, averaged: bool = False) -> list[ParamPiece]:
    """Return the pieces of weights, each with one tensor: the weights, or their average."""
    averages = {
        (piece.info.name, piece.start): piece.tensors[AVERAGE]
        for piece in pieces
        if averaged and AVERAGE in piece.tensors
    }
    return [
        replace(
            piece,
            tensors={
                MAIN_PARAM: averages.get((piece.info.name, piece.start), piece.tensors[MAIN_PARAM])
            },
        )
        for piece in pieces
        if MAIN_PARAM in piece.tensors
    ]


def _param_of(chunk: Chunk) -> str:
    return chunk.key.removeprefix(f"{MAIN_PARAM}.")


def _box_of(whole: Tensor, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Return a view of a box."""
    return whole[tuple(slice(at, at + size) for at, size in zip(offsets, sizes, strict=True))]


def _check_all_go_on(world: Group, device: torch.device) -> None:
    """Check that no rank has stopped to read.

    Raises:
        MegacoreError: On every rank that goes on.
    """
    if count := _count_stopped(world, device, stops=False):
        raise MegacoreError(
            f"{count} of {world.size} ranks stopped before the last tensor of the stream; iterate "
            "to the end on every rank, or stop on all after the same tensor"
        )


def _count_stopped(world: Group, device: torch.device, *, stops: bool) -> int:
    flag = torch.full((), int(stops), dtype=torch.int32, device=device)
    all_reduce_(flag, world)
    return int(host_values.read(flag, "ranks that have stopped"))
