"""Each rank decides for itself what it writes, and together they write each element once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from megatrain.checkpoint.chunks import Chunk, Copies, chunks_of
from megatrain.checkpoint.planner import RankBoxes, boxes_of, merge_boxes, written_chunks
from megatrain.checkpoint.tensor_index import TensorIndex
from megatrain.dry_run.world import fake_world, same_data
from megatrain.train.trainer import build_trainer
from tests.dist import test_dualpipe, test_invariance, test_moe_invariance
from tests.support.campaigns import representatives
from tests.support.configs import changed_config

Changes = Mapping[str, Any]
_FREEZE = [{"pattern": "layers.[01].*", "optimizer": "none"}]
# By name: ranks, base and changes.
LAYOUTS: dict[str, tuple[int, Mapping[str, Any], Changes]] = {
    **{
        f"dense: {name}": (size, test_invariance.BASE, changes)
        for name, (size, changes) in test_invariance.LAYOUTS.items()
    },
    **{
        f"experts: {name}": (
            size,
            test_moe_invariance.BASE,
            {**test_moe_invariance.MODELS[model], **changes},
        )
        for name, (model, size, changes) in test_moe_invariance.LAYOUTS.items()
    },
    **{
        f"two copies: {name}": (size, test_dualpipe.BASE, {**changes, **more})
        for name, (changes, size, more) in test_dualpipe.LAYOUTS.items()
    },
    **{
        f"instances: {name}": (
            8,
            test_moe_invariance.BASE,
            {
                **test_moe_invariance.MODELS["sigmoid"],
                "parallel.ep": 2,
                "optimizer.num_instances": 2,
                "train.global_batch_size": 16,
                **changes,
            },
        )
        for name, changes in {
            "dp8": {},
            "tp2": {"parallel.tp": 2},
            "tp2 frozen": {"parallel.tp": 2, "optimizer.groups": _FREEZE},
            "ema": {"optimizer.ema_decay": 0.9},
            "muon": {"optimizer.name": "muon"},
            "lora": {"lora.rank": 4},
        }.items()
    },
    "no ZeRO-1, frozen": (
        4,
        test_invariance.BASE,
        {"parallel.tp": 2, "optimizer.distributed": False, "optimizer.groups": _FREEZE},
    ),
}
_COMMON = (
    "dense: dp2 without ZeRO-1",
    "dense: tp2 pp2 dualpipe_v, sequence parallel",
    "experts: 8 ranks: pp2 tp2 dp2, ep2 etp2",
    "experts: dp4 ep2 without ZeRO-1",
    "instances: tp2 frozen",
    "no ZeRO-1, frozen",
)


def _boxes(world_size: int, base: Mapping[str, Any], changes: Changes, rank: int) -> RankBoxes:
    """Boxes that a rank of a world writes, from its trainer alone."""
    config = changed_config(world_size, base, changes)
    with fake_world(world_size, rank):
        trainer = build_trainer(
            config,
            world_size=world_size,
            device=torch.device("meta"),
            data=same_data(config),
            initialize=False,
        )
        pieces = [piece for piece in trainer.pieces() if not piece.info.is_shared_copy]
        return boxes_of(written_chunks(chunks_of(pieces, trainer.groups)))


def _index(world_size: int, base: Mapping[str, Any], changes: Changes) -> TensorIndex:
    ranks = [_boxes(world_size, base, changes, rank) for rank in range(world_size)]
    return merge_boxes(ranks, [f"__{rank}_0.distcp" for rank in range(world_size)])


@pytest.mark.parametrize("name", representatives(LAYOUTS, _COMMON))
def test_ranks_write_each_element_once_in_every_layout(name: str) -> None:
    world_size, base, changes = LAYOUTS[name]
    index = _index(world_size, base, changes)  # which checks it
    assert index.num_tensors == len(set(index.keys()))
    assert index.num_bytes() == sum(
        math.prod(tensor.shape) * tensor.dtype.itemsize
        for key in index.keys()  # noqa: SIM118
        if (tensor := index.find(key)) is not None
    )


def _chunk(name: str, numel: int, copies: Copies) -> Chunk:
    values = torch.empty(numel, device="meta")
    return Chunk(key=name, full_shape=(numel,), offsets=(0,), tensor=values, copies=copies)


def test_copies_are_spread_evenly_and_none_is_left_out() -> None:
    sizes = [1000, 10, 10, 500, 300, 200, 1000, 1, 1, 1]
    written: list[list[Chunk]] = []
    for position in range(4):
        copies = Copies(data=2, tensor=2, position=position)
        held = [_chunk(f"w{number}", numel, copies) for number, numel in enumerate(sizes)]
        written.append(written_chunks(held))
    names = sorted(chunk.key for chunks in written for chunk in chunks)
    assert names == sorted(f"w{number}" for number in range(len(sizes)))
    loads = [sum(chunk.tensor.numel() for chunk in chunks) for chunks in written]
    assert max(loads) == 1000
    assert min(loads) > 500


def test_a_rank_writes_all_that_only_it_has() -> None:
    alone = Copies(expert=True)
    shared = Copies(data=3, position=2)
    held = [_chunk("a", 4, alone), _chunk("b", 4, shared), _chunk("c", 4, alone)]
    assert [chunk.key for chunk in written_chunks(held)] == ["a", "c"]


def test_ranks_that_would_write_an_element_twice_or_never_are_our_own_bug() -> None:
    alone = Copies()
    both = [boxes_of([_chunk("w", 4, alone)])] * 2
    with pytest.raises(RuntimeError, match="the boxes of w do not cover its shape"):
        merge_boxes(both, ["a", "b"])
    with pytest.raises(RuntimeError, match=r"w is .* on one rank and .* on another"):
        merge_boxes([both[0], boxes_of([_chunk("w", 5, alone)])], ["a", "b"])
