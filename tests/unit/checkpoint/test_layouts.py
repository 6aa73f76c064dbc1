"""Saving on one layout and loading on another, with ranks as threads."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from megacore.optim import ParamPiece
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.params import ShardPosition
from megacore.parallel.process_groups import Group, ProcessGroups
from megatrain.checkpoint import (
    StoredWeights,
    TrainState,
    load_checkpoint,
    load_full_weights,
    read_index,
    save_checkpoint,
)
from megatrain.checkpoint.chunks import boxes_of_range
from megatrain.checkpoint.metadata import read_metadata
from tests.support.checkpoints import (
    KINDS,
    ThreadWorld,
    assert_equal_pieces,
    full_values,
    make_pieces,
)

STATE = TrainState(
    step=7, samples=224, optimizer={"step_count": 6, "num_skipped": 1, "loss_scale": 2.0**15}
)
CONFIG = {"model": {"num_layers": 2}}
EMBEDDING = ParamInfo(name="embedding", full_shape=(8, 6), tp_dim=0, shared="embedding")
QKV = ParamInfo(name="layers.0.qkv", full_shape=(3, 4, 5), tp_dim=1)
NORM = ParamInfo(name="norm", full_shape=(7,), tp_dim=None)
INFOS = [EMBEDDING, QKV, NORM]

Cut = Callable[[str, int], Sequence[int]]


def _save(
    directory: Path,
    infos: Sequence[ParamInfo],
    *,
    tp: int,
    dp: int,
    distributed: bool = True,
    cut: Cut | None = None,
) -> Path:
    def save(groups: ProcessGroups) -> Path:
        pieces = make_pieces(
            infos,
            tp=(groups.tp.position, tp),
            dp=(groups.dp.position, dp),
            distributed=distributed,
            cut=cut,
        )
        return save_checkpoint(directory, pieces, state=STATE, config=CONFIG, groups=groups)

    with pytest.MonkeyPatch.context() as patch:
        world = ThreadWorld(patch, tp=tp, dp=dp)
        paths = world.run(save)
    assert len(set(paths)) == 1
    return paths[0]


def _stored(path: Path) -> dict[str, TensorStorageMetadata]:
    return read_metadata(path, read_index(path)).state_dict_metadata


def _load_and_compare(
    path: Path, infos: Sequence[ParamInfo], *, tp: int, dp: int, cut: Cut | None = None
) -> None:
    def load(groups: ProcessGroups) -> None:
        where = {"tp": (groups.tp.position, tp), "dp": (groups.dp.position, dp), "cut": cut}
        pieces = make_pieces(infos, **where, filled=False)
        assert load_checkpoint(path, pieces, groups=groups) == STATE
        assert_equal_pieces(pieces, make_pieces(infos, **where))

    with pytest.MonkeyPatch.context() as patch:
        world = ThreadWorld(patch, tp=tp, dp=dp)
        world.run(load)


@st.composite
def parameters(draw: st.DrawFn) -> list[ParamInfo]:
    """Parameters whose split dimension is a multiple of 12, so that tp = 1, 2, 3, 4 fit."""
    infos = []
    for number in range(draw(st.integers(1, 4))):
        shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
        tp_dim = draw(st.none() | st.integers(0, len(shape) - 1))
        if tp_dim is not None:
            shape[tp_dim] = 12
        infos.append(ParamInfo(name=f"p{number}", full_shape=tuple(shape), tp_dim=tp_dim))
    return infos


def _random_cut(seed: int, dp: int) -> Cut:
    def cut(name: str, numel: int) -> list[int]:
        rng = random.Random(f"{seed} {name}")
        return sorted(rng.randint(0, numel) for _ in range(dp - 1))

    return cut


@given(
    infos=parameters(),
    source=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    target=st.tuples(st.integers(1, 4), st.integers(1, 3)),
    seed=st.integers(0, 1000),
)
def test_any_layout_reads_what_any_layout_wrote(
    tmp_path_factory: pytest.TempPathFactory,
    infos: list[ParamInfo],
    source: tuple[int, int],
    target: tuple[int, int],
    seed: int,
) -> None:
    directory = tmp_path_factory.mktemp("checkpoint")
    path = _save(directory, infos, tp=source[0], dp=source[1], cut=_random_cut(seed, source[1]))
    _load_and_compare(path, infos, tp=target[0], dp=target[1], cut=_random_cut(seed + 1, target[1]))
    config, weights = load_full_weights(path)
    assert config == CONFIG
    assert set(weights) == {info.name for info in infos}
    with StoredWeights(path, verified=False) as stored:
        for info in infos:
            values = full_values(info, "main_param")
            assert torch.equal(weights[info.name], values)
            is_split_inside = source[0] > 1 and info.tp_dim not in (None, 0)
            assert stored.has_ranges(info.name) or is_split_inside or source[1] > 1
            if stored.has_ranges(info.name):
                start = seed % values.numel()
                part = torch.empty((values.numel() - start + 1) // 2)
                stored.read_range(info.name, start, part)
                assert torch.equal(part, values.view(-1)[start : start + part.numel()])
        stored.verify()


@given(
    shape=st.lists(st.integers(1, 5), max_size=4).map(tuple),
    ends=st.tuples(st.integers(0, 700), st.integers(0, 700)).map(sorted),
    limit=st.integers(1, 40) | st.just(1 << 22),
)
def test_boxes_are_the_elements_of_their_range_in_order(
    shape: tuple[int, ...], ends: list[int], limit: int
) -> None:
    numel = math.prod(shape)
    start, end = (min(bound, numel) for bound in ends)
    flat = torch.arange(numel)
    boxes = boxes_of_range(shape, start, end, max_numel=limit)
    found = []
    for offsets, sizes in boxes:
        part = flat.view(shape)[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]
        assert tuple(part.shape) == sizes
        assert part.numel() <= limit
        found.append(part.flatten())
    assert torch.equal(torch.cat([flat[:0], *found]), flat[start:end])
    if limit > numel:
        assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_big_tensors_are_stored_in_parts_that_a_reader_can_hold() -> None:
    boxes = boxes_of_range((2, 8192, 4096), 0, 2 * 8192 * 4096)
    assert {math.prod(sizes) for _, sizes in boxes} == {1 << 22}
    assert len(boxes) == 16


def test_tools_of_torch_read_our_checkpoints(tmp_path: Path) -> None:
    path = _save(tmp_path / "saved", INFOS, tp=2, dp=3)
    dcp_to_torch_save(path, tmp_path / "all.pt")
    plain = torch.load(tmp_path / "all.pt", weights_only=True)
    assert set(plain) == set(KINDS)
    for kind in KINDS:
        assert set(plain[kind]) == {info.name for info in INFOS}
        for info in INFOS:
            assert torch.equal(plain[kind][info.name], full_values(info, kind))
    ours = {"exp_avg": {"layers.0.qkv": torch.zeros(QKV.full_shape)}}
    with pytest.warns(UserWarning, match="torch.distributed is disabled"):
        dcp_load(ours, storage_reader=FileSystemReader(path), no_dist=True)
    assert torch.equal(ours["exp_avg"]["layers.0.qkv"], full_values(QKV, "exp_avg"))


def test_moments_keep_their_format_and_fit_another(tmp_path: Path) -> None:
    groups = ProcessGroups.single()
    values = torch.tensor([1.0, 1.00390625, -3.0]).bfloat16()
    info = ParamInfo(name="w", full_shape=(3,), tp_dim=None)
    held = {"main_param": torch.ones(3), "exp_avg": values, "exp_avg_sq": values}
    piece = ParamPiece(info=info, start=0, end=3, tensors=held)
    path = save_checkpoint(tmp_path, [piece], state=STATE, config={}, groups=groups)
    assert _stored(path)["exp_avg.w"].properties.dtype == torch.bfloat16
    wide = make_pieces([info], tp=(0, 1), dp=(0, 1), filled=False)
    load_checkpoint(path, wide, groups=groups)
    assert torch.equal(wide[0].tensors["exp_avg"], values.float())


def test_every_bit_pattern_survives(tmp_path: Path) -> None:
    info = ParamInfo(name="w", full_shape=(6,), tp_dim=None)
    values = torch.tensor([0.0, -0.0, math.inf, math.nan, 1e-45, 3.4e38])
    piece = ParamPiece(info=info, start=0, end=6, tensors=dict.fromkeys(KINDS, values))
    groups = ProcessGroups.single()
    path = save_checkpoint(tmp_path, [piece], state=STATE, config={}, groups=groups)
    empty = make_pieces([info], tp=(0, 1), dp=(0, 1), filled=False)
    load_checkpoint(path, empty, groups=groups)
    assert torch.equal(empty[0].tensors["exp_avg"].view(torch.int32), values.view(torch.int32))


@pytest.mark.parametrize("distributed", [True, False], ids=["sharded", "replicated"])
def test_replicas_are_written_once_and_spread_over_the_ranks(
    tmp_path: Path, distributed: bool
) -> None:
    infos = [
        ParamInfo(name=f"layers.{n}.w", full_shape=(4, 640), tp_dim=None if n % 2 else 0)
        for n in range(16)
    ]
    path = _save(tmp_path, infos, tp=2, dp=2, distributed=distributed)
    total = sum(math.prod(info.full_shape) for info in infos) * 4 * len(KINDS)
    sizes = {file.name: file.stat().st_size for file in path.glob("*.distcp")}
    # Each tensor has a header of about a kilobyte.
    items = [item for _, item in read_metadata(path, read_index(path)).storage_data.items()]
    assert total <= sum(sizes.values()) < total + 2000 * len(items)
    assert len(sizes) == 4
    assert max(sizes.values()) < 1.2 * min(sizes.values())


def test_a_shared_copy_is_not_written_but_is_filled(tmp_path: Path) -> None:
    copy = ParamInfo(
        name="embedding", full_shape=(8, 6), tp_dim=0, shared="embedding", is_shared_copy=True
    )
    groups = ProcessGroups.single()
    written = make_pieces([EMBEDDING, copy], tp=(0, 1), dp=(0, 1))
    path = save_checkpoint(tmp_path, written, state=STATE, config={}, groups=groups)
    assert len(_stored(path)["main_param.embedding"].chunks) == 1
    pieces = make_pieces([EMBEDDING, copy], tp=(0, 1), dp=(0, 1), filled=False)
    load_checkpoint(path, pieces, groups=groups)
    assert_equal_pieces(pieces, written)


def test_a_shared_parameter_is_written_by_the_rank_that_owns_it(tmp_path: Path) -> None:
    copy = replace(EMBEDDING, is_shared_copy=True)
    other = ParamInfo(name="other", full_shape=(64,), tp_dim=None)

    def save(groups: ProcessGroups) -> Path:
        # Rank 1 has less to write, so it would be chosen if its copy counted.
        pieces = make_pieces(
            [EMBEDDING, other] if groups.rank == 0 else [copy],
            tp=(0, 1),
            dp=(0, 1),
            filled=groups.rank == 0,
        )
        return save_checkpoint(tmp_path, pieces, state=STATE, config={}, groups=groups)

    with pytest.MonkeyPatch.context() as patch:
        world = ThreadWorld(patch, tp=1, dp=2)
        path = world.run(save)[0]
    _, weights = load_full_weights(path)
    assert torch.equal(weights["embedding"], full_values(EMBEDDING, "main_param"))
    assert set(read_index(path).files) == {".metadata", "tensors.idx", "__0_0.distcp"}


def test_the_index_tells_where_everything_is(tmp_path: Path) -> None:
    path = _save(tmp_path, INFOS, tp=2, dp=2)
    index = read_index(path)
    assert path.name == "step_00000007"
    assert index.state == STATE
    assert index.config == CONFIG
    assert index.topology["tp"] == 2
    assert index.topology["world_size"] == 4
    stored = _stored(path)
    assert {key: tuple(tensor.size) for key, tensor in stored.items()} == {
        f"{kind}.{info.name}": info.full_shape for kind in KINDS for info in INFOS
    }
    qkv = stored["exp_avg.layers.0.qkv"].chunks
    # Two tp shards of (3, 2, 5), each cut in the middle of a row.
    boxes = sorted((tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in qkv)
    assert boxes == [
        ((0, 0, 0), (1, 2, 5)),
        ((0, 2, 0), (1, 2, 5)),
        ((1, 0, 0), (1, 1, 5)),
        ((1, 1, 0), (1, 1, 5)),
        ((1, 2, 0), (1, 1, 5)),
        ((1, 3, 0), (1, 1, 5)),
        ((2, 0, 0), (1, 2, 5)),
        ((2, 2, 0), (1, 2, 5)),
    ]
    sizes = {name: file.num_bytes for name, file in index.files.items()}
    assert {name: (path / name).stat().st_size for name in sizes} == sizes
    assert {*sizes, "index.json"} == {file.name for file in path.iterdir()}


def test_a_parameter_split_along_another_dimension_is_cut_anew(tmp_path: Path) -> None:
    path = _save(tmp_path, [ParamInfo(name="w", full_shape=(4, 6), tp_dim=0)], tp=2, dp=1)
    _load_and_compare(path, [ParamInfo(name="w", full_shape=(4, 6), tp_dim=1)], tp=2, dp=2)
    _load_and_compare(path, [ParamInfo(name="w", full_shape=(4, 6), tp_dim=None)], tp=2, dp=2)


def test_experts_in_one_tensor_move_between_expert_layouts(tmp_path: Path) -> None:
    """Saved on etp2 x ep2, each part cut over two ranks; loaded on ep4 and on one rank."""
    info = ParamInfo(name="experts.w", full_shape=(4, 6, 5), tp_dim=1, ep_dim=0, expert=True)

    def pieces(groups: ProcessGroups, *, filled: bool) -> list[ParamPiece]:
        where = ShardPosition.of(info, groups)
        box = tuple(slice(offset, None) for offset in where.offsets(info))
        shape = info.local_shape(where.tp_size, ep_size=where.ep_size)
        numel = math.prod(shape)
        held = []
        for start, end in ((0, numel // 3), (numel // 3, numel)):
            tensors = {}
            for kind in KINDS:
                whole = full_values(info, kind)[box][tuple(map(slice, shape))]
                values = whole.flatten()[start:end].clone()
                tensors[kind] = values if filled else torch.full_like(values, math.nan)
            held.append(ParamPiece(info=info, start=start, end=end, tensors=tensors))
        return held

    def on(groups: ProcessGroups, etp: int) -> ProcessGroups:
        rank = groups.rank
        handle = groups.world.handle
        first = rank // etp * etp
        ranks = tuple(range(first, first + etp))
        return replace(
            groups,
            etp=Group("etp", ranks, rank % etp, handle if etp > 1 else None),
            ep=Group("ep", tuple(range(rank % etp, 4, etp)), rank // etp, handle),
        )

    def save(groups: ProcessGroups) -> Path:
        mine = on(groups, 2)
        held = pieces(mine, filled=True)
        return save_checkpoint(tmp_path, held, state=STATE, config={}, groups=mine)

    def load(groups: ProcessGroups) -> None:
        mine = on(groups, 1)
        held = pieces(mine, filled=False)
        load_checkpoint(tmp_path, held, groups=mine)
        assert_equal_pieces(held, pieces(mine, filled=True))

    with pytest.MonkeyPatch.context() as patch:
        world = ThreadWorld(patch, tp=2, dp=2)
        world.run(save)
        world.run(load)
    _, weights = load_full_weights(tmp_path)
    assert torch.equal(weights["experts.w"], full_values(info, "main_param"))


def test_expert_parameters_are_split_over_the_expert_tensor_parallel_group(tmp_path: Path) -> None:
    info = ParamInfo(name="experts.3.w", full_shape=(4, 2), tp_dim=0, expert=True)
    groups = ProcessGroups.single()  # etp = 1
    pieces = make_pieces([info], tp=(0, 1), dp=(0, 1))

    def save(mine: ProcessGroups) -> Path:
        held = pieces if mine.rank == 0 else []
        without_etp = replace(mine, etp=groups.etp)
        return save_checkpoint(tmp_path, held, state=STATE, config={}, groups=without_etp)

    with pytest.MonkeyPatch.context() as patch:
        world = ThreadWorld(patch, tp=2, dp=1)
        path = world.run(save)[0]
    assert [tuple(box.sizes) for box in _stored(path)["main_param.experts.3.w"].chunks] == [(4, 2)]
