"""Weights of a running model as a stream of Hugging Face tensors, out of it and into it.

For those who serve a model while it is trained, and for reinforcement learning: no file is written,
and no rank holds the whole model. Both directions use the tables of import and export.
"""

from __future__ import annotations

import functools
import json
import zlib
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from megacore import host_values
from megacore.errors import CheckpointError, MegacoreError
from megacore.optim import ParamPiece
from megacore.parallel.collectives import all_gather_objects, all_reduce_, broadcast_
from megacore.parallel.process_groups import Group
from megatrain.checkpoint import StoredWeights
from megatrain.checkpoint.agreement import on_every_rank, on_rank_0
from megatrain.checkpoint.chunks import Chunk
from megatrain.checkpoint.model_files import FOLDER_NAME
from megatrain.config import Config, ResolvedConfig, config_from_values
from megatrain.config.lora import is_adapter
from megatrain.hf import config_to_hf
from megatrain.hf.adapter_assembly import AdapterAssembly
from megatrain.hf.adapter_plan import AdapterPlan, origin_of
from megatrain.hf.assembly import Part, TensorAssembly
from megatrain.hf.export_plan import ExportPlan, check_dtype, plan_export
from megatrain.hf.kept_files import KeptFiles
from megatrain.hf.merged_weights import MergedParts, PartSource, open_base, open_merged
from megatrain.hf_folder import TensorSpec
from megatrain.models.build import torch_dtype
from megatrain.train.gathered_parts import (
    GatheredParts,
    box_of,
    boxes_by_param,
    check_all_go_on,
    count_stopped,
)
from megatrain.train.trainer import Trainer

WhichRanks = Literal["rank 0", "all"]
# Whole numbers of the size of each format of `train.dtype`.
_BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}


def stream_weights(
    source: Trainer | str | Path,
    *,
    to: WhichRanks = "rank 0",
    dtype: str | None = None,
    family: str | None = None,
    averaged: bool = False,
    adapters: bool = False,
    base: str | Path | None = None,
) -> Iterator[tuple[str, Tensor | None]]:
    """Iterate over the weights as whole Hugging Face tensors, equal to those of ``export-hf``.

    Of a trainer: collective, in any layout; every rank must iterate to the end. If one stops
    early, the others get an error at the next tensor. Of a checkpoint: in this process alone, after
    its checksums were verified; with several processes, each reads for itself.

    Of a run with adapters: the merged weights, of ``export-hf --merge``, or the adapters, of
    ``export-hf --adapter``; `adapter_config` describes these. A trainer merges the frozen weights
    as it holds them, in ``train.dtype``.

    Memory, beside what the caller keeps: on the ranks that get tensors one tensor, or the part of a
    parameter that has several (queries, keys and values of a layer; gate and up of one expert), and
    16 MB for messages; to merge, one projection in float32; of adapters, those of one parameter. A
    tensor is on the device of the trainer, or on the CPU, and stays valid.

    Args:
        source: A trainer; or a checkpoint folder, the folder of all checkpoints, or a run's folder.
        to: Ranks that get tensors; others get ``None`` in their place.
        dtype: ``"float32"``, ``"bfloat16"`` or ``"float16"``. Default: as ``export-hf``: that of
            each tensor of the imported files; of a model from scratch, ``train.dtype``; of
            adapters, float32.
        family: ``model_type`` whose names the tensors have. Default: as ``export-hf``.
        averaged: The moving average of the weights (``optimizer.ema_decay``).
        adapters: The adapters of a run with ``lora.rank`` under the names of PEFT, instead of
            merged weights.
        base: Folder of the base of a checkpoint with adapters. Default: where the run found it.

    Yields:
        Name and tensor, in the order of the layers.

    Raises:
        CheckpointError: If a checkpoint is missing or damaged, or there is no moving average.
        MegacoreError: If no family has the model's shape, the run has no adapters, their base is
            missing or another one, PEFT has no form for them, or another rank has stopped early.

    Sync:
        Waits for the device, and for all ranks at each part of a parameter.
    """
    if to not in ("rank 0", "all"):
        raise ValueError(f'to must be "rank 0" or "all", got {to!r}')
    asked = _Asked(dtype=dtype, family=family, averaged=averaged, adapters=adapters)
    if isinstance(source, Trainer):
        if base is not None:
            raise ValueError(f"base must be None for a trainer, which holds its base, got {base}")
        return _stream_trainer(source, asked, to_all=to == "all")
    return _stream_checkpoint(Path(source), asked, base)


def adapter_config(
    source: Trainer | str | Path, *, base: str | None = None, family: str | None = None
) -> dict[str, Any]:
    """Return ``adapter_config.json`` of ``export-hf --adapter``, for a stream of adapters.

    Args:
        source: As for `stream_weights`; of a trainer: collective.
        base: ``base_model_name_or_path``. Default: the folder that the run started from.
        family: As for `stream_weights`.

    Raises:
        MegacoreError: As `stream_weights`.
    """
    if isinstance(source, Trainer):
        asked = _Asked(family=family, adapters=True)
        own = _names_of_all_ranks(source)
        kept = on_rank_0(lambda: _kept_files(source.config), source.groups)
        plan = _plan_adapters(source.config, own, kept, asked)
        started = source.config.checkpoint.load_weights if source.base is None else source.base.path
    else:
        with StoredWeights(source, verified=False) as stored:
            config = config_from_values(stored.config, source=str(stored.folder))
            kept = KeptFiles.of(config.data.tokenizer, stored.folder)
            plan = _plan_adapters(config, stored.names(), kept, _Asked(family=family))
            started = stored.state.base["path"]
    return plan.settings(base or origin_of(started or "", kept.original))


@dataclass(frozen=True, kw_only=True)
class _Asked:
    """The tensors that a caller asks for; attributes as for `stream_weights`."""

    dtype: str | None = None
    family: str | None = None
    averaged: bool = False
    adapters: bool = False


# As a decorator, so that the caller's code between two tensors keeps its own mode.
@torch.no_grad()
def _stream_checkpoint(
    path: Path, asked: _Asked, base: str | Path | None
) -> Iterator[tuple[str, Tensor]]:
    with StoredWeights(path, averaged=asked.averaged) as stored:
        config = config_from_values(stored.config, source=str(stored.folder))
        kept = KeptFiles.of(config.data.tokenizer, stored.folder)
        if base is not None and not config.lora.is_on:
            raise MegacoreError(
                f"base must be None for {stored.folder}, a run without adapters, got {base}"
            )
        tensors: Iterator[tuple[TensorSpec, Tensor | None]]
        if asked.adapters:
            adapters = _plan_adapters(config, stored.names(), kept, asked)
            tensors = adapters.tensors(
                stored, functools.cache(lambda: open_base(stored, path=base))
            )
        else:
            plan = plan_export(config, kept, dtype=asked.dtype, family=asked.family)
            source: PartSource = stored
            if config.lora.is_on:
                source = open_merged(stored, path=base, dtype=plan.merged_dtype)
            tensors = plan.tensors.whole(
                lambda name, first, last, _: source.read_part(name, first, last)
            )
        for spec, value in tensors:
            assert value is not None
            yield spec.name, value
            del value  # its memory is free before the next one is there


@torch.no_grad()
def _stream_trainer(
    trainer: Trainer, asked: _Asked, *, to_all: bool
) -> Iterator[tuple[str, Tensor | None]]:
    world, device = trainer.groups.world, trainer.device
    if asked.averaged and trainer.average is None:
        raise CheckpointError(
            "there is no moving average of the weights, which runs keep with optimizer.ema_decay "
            "above 0; leave averaged out"
        )
    tensors = _tensors_of(trainer, asked, to_all=to_all)
    try:
        for spec, value in tensors:
            yield spec.name, value
            del value  # its memory is free before the next one is there
    except GeneratorExit:
        count_stopped(world, device, stops=True)
        raise
    check_all_go_on(world, device)


def _tensors_of(
    trainer: Trainer, asked: _Asked, *, to_all: bool
) -> Iterator[tuple[TensorSpec, Tensor | None]]:
    """Return the tensors of a trainer, which are gathered when they are asked for. Collective."""
    config = trainer.config
    kept = on_rank_0(lambda: _kept_files(config), trainer.groups)
    run = GatheredParts(trainer, trainer.pieces(), to_all=to_all, averaged=asked.averaged)
    base = GatheredParts(trainer, _base_pieces(trainer), to_all=to_all)
    if asked.adapters:
        adapters = _plan_adapters(config, run.names(), kept, asked)
        return adapters.tensors(run, lambda: base)
    plan = plan_export(config, kept, dtype=asked.dtype, family=asked.family)
    merged = MergedParts(base, run, plan.tensors.infos, config.lora, dtype=plan.merged_dtype)

    def read(name: str, first: int, last: int, wire: torch.dtype | None) -> Tensor | None:
        if merged.is_merged(name):
            return merged.read_part(name, first, last)
        source = run if name in run.names() else base
        return source.read(Part(name=name, first=first, last=last), wire)

    return plan.tensors.whole(read)


def plan_of_run(
    trainer: Trainer, *, dtype: str | None = None, family: str | None = None
) -> ExportPlan:
    """Decide the tensors of a trainer's model as for an export of its checkpoints. Collective.

    The files of an imported model are read on rank 0: those kept with the run, or of the folder
    that it starts from.

    Raises:
        MegacoreError: On every rank, if no family has the model's shape.
    """
    kept = on_rank_0(lambda: _kept_files(trainer.config), trainer.groups)
    return plan_export(trainer.config, kept, dtype=dtype, family=family)


def _plan_adapters(
    config: Config | ResolvedConfig, own: Collection[str], kept: KeptFiles, asked: _Asked
) -> AdapterPlan:
    """Decide the tensors of adapters; ``own`` are the names of the parameters of the run."""
    if not config.lora.is_on:
        raise MegacoreError(
            "the run has no adapters (lora.rank is not set); leave adapters out for whole weights"
        )
    check_dtype(asked.dtype)
    original = kept.original or config_to_hf(config.model, config.moe, family=asked.family)
    kind = asked.family or original["model_type"]
    return AdapterPlan(config, own, kind, dtype=torch_dtype(asked.dtype or "float32"))


def _base_pieces(trainer: Trainer) -> list[ParamPiece]:
    """List the weights of this rank that adapters are trained on."""
    own = {piece.info.name for piece in trainer.pieces()}
    return [piece for piece in trainer.weights() if piece.info.name not in own]


def _names_of_all_ranks(trainer: Trainer) -> set[str]:
    """Return the names of all parameters of a run, without those of its base. Collective."""
    own = {piece.info.name for piece in trainer.pieces()}
    return set().union(*all_gather_objects(own, trainer.groups.world))


def _kept_files(config: ResolvedConfig) -> KeptFiles:
    run, weights = Path(config.run.dir), config.checkpoint.load_weights
    if weights is not None and not (run / FOLDER_NAME).is_dir():
        run = Path(weights)
    return KeptFiles.of(config.data.tokenizer, run)


def weights_checksums(trainer: Trainer) -> dict[str, str]:
    """Return a checksum of the weights in each format of ``train.dtype``. Collective.

    It is the sum of their bits as whole numbers, each weight weighed by its position, and equal for
    equal weights in any layout. A run whose frozen weights have 16 bits knows that format alone.
    Adapters whose B is zero do not count, so that a run which starts from a model has its checksum.

    Sync:
        Waits for the device and for all ranks.
    """
    parts = GatheredParts(trainer, [*_base_pieces(trainer), *trainer.pieces()])
    num_formats = len(_BITS)
    # Of the weights, of adapters, and the number of elements of B that are not zero.
    totals = torch.zeros(2 * num_formats + 1, dtype=torch.int64, device=trainer.device)
    for name, values, flat in parts.own_values():
        weighing = 2 * flat + 1 + 2 * zlib.crc32(name.encode())
        first = num_formats * is_adapter(name)
        for number, (dtype, bits) in enumerate(_BITS.items(), start=first):
            totals[number] += (values.to(dtype).view(bits).to(torch.int64) * weighing).sum()
        if name.endswith(".lora_b"):
            totals[-1] += values.count_nonzero()
    all_reduce_(totals, trainer.groups.world)
    *sums, used = host_values.read(totals, "checksums")
    return {
        str(dtype).removeprefix("torch."): f"{(whole + (added if used else 0)) % (1 << 64):016x}"
        for dtype, whole, added in zip(_BITS, sums[:num_formats], sums[num_formats:], strict=True)
    }


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
    assembly = _assembly_of(trainer, family)
    boxes = boxes_by_param(trainer, trainer.pieces())
    frozen = boxes_by_param(trainer, _base_pieces(trainer))
    differing: list[str] = []
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
                if not _agrees(frozen.get(part.name, ()), part, values):
                    differing.append(part.name)
                del values
            del tensor  # its memory is free before the next one is there
        assembly.check_complete()
        if differing:
            raise MegacoreError(
                f"{differing[0]} is not trained, so it must be as in the base, but the stream has "
                "other values"
            )

    with torch.no_grad():
        on_every_rank(fill, trainer.groups)
    trainer.optimizer.finish_load(trainer.optimizer.step_count)


def _assembly_of(trainer: Trainer, family: str | None) -> TensorAssembly | AdapterAssembly:
    """Return the assembly of the tensors that a trainer takes. Collective."""
    config = trainer.config
    kept = on_rank_0(lambda: _kept_files(config), trainer.groups)
    if not config.lora.is_on:
        kind = plan_export(config, kept, family=family).config["model_type"]
        return TensorAssembly(kind, config.model, config.moe)
    plan = _plan_adapters(config, _names_of_all_ranks(trainer), kept, _Asked(family=family))
    return AdapterAssembly(plan, config.model, config.moe)


def _fill(boxes: Iterable[Chunk], part: Part, values: Tensor) -> None:
    """Copy the values of a part that are in the boxes of this rank."""
    for chunk in boxes:
        at, sizes = chunk.offsets, chunk.tensor.shape
        first, last = max(at[0], part.first), min(at[0] + sizes[0], part.last)
        if first < last:
            source = box_of(values, (first - part.first, *at[1:]), (last - first, *sizes[1:]))
            chunk.tensor[first - at[0] : last - at[0]].copy_(source)


def _agrees(boxes: Iterable[Chunk], part: Part, values: Tensor) -> bool:
    """Check that boxes of this rank have the values of a part."""
    copies = [replace(chunk, tensor=chunk.tensor.clone()) for chunk in boxes]
    _fill(copies, part, values)
    pairs = zip(boxes, copies, strict=True)
    return all(torch.equal(ours.tensor, theirs.tensor) for ours, theirs in pairs)


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
