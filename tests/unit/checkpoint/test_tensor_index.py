"""The index of tensors: what it finds, what it refuses, and the pickle of torch made from it."""

from __future__ import annotations

import itertools
import math
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from megacore.errors import CheckpointError
from megatrain.checkpoint import load_checkpoint, load_full_weights
from megatrain.checkpoint.checked_files import FileSum
from megatrain.checkpoint.metadata import index_of_metadata
from megatrain.checkpoint.planner import RankBoxes, merge_boxes
from megatrain.checkpoint.tensor_checks import check_index, check_tiling
from megatrain.checkpoint.tensor_file import read_tensor_index, write_tensor_index
from megatrain.checkpoint.tensor_index import TensorIndex
from megatrain.checkpoint.torch_metadata import write_torch_metadata
from tests.support.checkpoints import GROUPS, edit_index, make_older, save_small, small_pieces

Rows = list[tuple[tuple[int, ...], tuple[int, ...]]]


def _index_of(shape: tuple[int, ...], boxes: Rows) -> TensorIndex:
    """Index of one tensor of boxes, unchecked."""
    chunks = [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]
    tensor = TensorStorageMetadata(
        properties=TensorProperties(dtype=torch.float32), size=torch.Size(shape), chunks=chunks
    )
    places = {
        MetadataIndex("w", at): _StorageInfo("__0_0.distcp", number * 4096, 4096)
        for number, (at, _) in enumerate(boxes)
    }
    return index_of_metadata(Metadata(state_dict_metadata={"w": tensor}, storage_data=places))


def _cut(rng: np.random.Generator, shape: tuple[int, ...]) -> Rows:
    """Tile a tensor with boxes by cutting random boxes in two."""
    boxes: Rows = [((0,) * len(shape), shape)]
    for _ in range(int(rng.integers(0, 8))):
        number = int(rng.integers(len(boxes)))
        at, sizes = boxes[number]
        dims = [dim for dim, size in enumerate(sizes) if size > 1]
        if not dims:
            continue
        dim = int(rng.choice(dims))
        cut = int(rng.integers(1, sizes[dim]))
        low = tuple(cut if d == dim else s for d, s in enumerate(sizes))
        high = tuple(s - cut if d == dim else s for d, s in enumerate(sizes))
        moved = tuple(a + cut if d == dim else a for d, a in enumerate(at))
        boxes[number : number + 1] = [(at, low), (moved, high)]
    return boxes


@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=3).map(tuple),
    seed=st.integers(0, 2**32 - 1),
    change=st.sampled_from(["none", "drop", "move", "grow", "twice"]),
)
def test_boxes_tile_a_tensor_exactly_if_each_element_is_in_one(
    shape: tuple[int, ...], seed: int, change: str
) -> None:
    rng = np.random.default_rng(seed)
    boxes = _cut(rng, shape)
    number = int(rng.integers(len(boxes)))
    at, sizes = boxes[number]
    if change == "drop":
        del boxes[number]
    elif change == "move" and shape:
        boxes[number] = tuple(int(rng.integers(0, size)) for size in shape), sizes
    elif change == "grow" and shape:
        dim = int(rng.integers(len(shape)))
        boxes[number] = at, tuple(s + (d == dim) for d, s in enumerate(sizes))
    elif change == "twice":
        boxes.append((tuple(min(a + 1, s - 1) for a, s in zip(at, shape, strict=True)), sizes))
    if len({at for at, _ in boxes}) < len(boxes):
        return  # torch's metadata names boxes by their offsets
    counts = np.zeros([size + 1 for size in shape], int)
    for at, sizes in boxes:
        counts[tuple(slice(a, a + s) for a, s in zip(at, sizes, strict=True))] += 1
    inside = all(
        a + s <= whole for at, sizes in boxes for a, s, whole in zip(at, sizes, shape, strict=True)
    )
    covered = counts[tuple(slice(0, size) for size in shape)]
    index = _index_of(shape, boxes)
    if inside and (covered == 1).all():
        check_tiling(index)
    else:
        with pytest.raises(CheckpointError, match="the boxes of w do not cover its shape"):
            check_tiling(index)


def test_a_box_in_the_place_of_another_of_the_same_size_is_found() -> None:
    """Volumes and offsets are right, but two boxes overlap."""
    boxes: Rows = [((0, 0), (2, 2)), ((0, 2), (2, 2)), ((1, 0), (2, 2)), ((2, 2), (2, 2))]
    with pytest.raises(CheckpointError, match="do not cover its shape"):
        check_tiling(_index_of((4, 4), boxes))


@given(
    shape=st.lists(st.integers(1, 6), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 2**32 - 1),
)
def test_overlapping_boxes_are_those_with_a_common_element(
    shape: tuple[int, ...], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    boxes = _cut(rng, shape)
    stored = _index_of(shape, boxes).find("w")
    assert stored is not None
    at = tuple(int(rng.integers(0, size)) for size in shape)
    sizes = tuple(int(rng.integers(1, size - a + 1)) for a, size in zip(at, shape, strict=True))
    wanted = set(itertools.product(*(range(a, a + s) for a, s in zip(at, sizes, strict=True))))
    found = {box.offsets for box in stored.overlapping(at, sizes)}
    assert found == {
        first
        for first, extent in boxes
        if wanted
        & set(itertools.product(*(range(a, a + s) for a, s in zip(first, extent, strict=True))))
    }


def _many(num_ranks: int = 3) -> TensorIndex:
    """Index of tensors of 0 to 3 dimensions and two dtypes, in the files of several ranks."""
    shapes: list[tuple[int, ...]] = [(), (7,), (4, 6), (4, 300), (2, 3, 5)]
    ranks = []
    for rank in range(num_ranks):
        keys, rows = [], []
        for number, shape in enumerate(shapes):
            for kind in ("main_param", "exp_avg"):
                if not shape:
                    if rank == 0:
                        keys.append((f"{kind}.t{number}", shape))
                        rows.append((len(keys) - 1, shape, shape))
                    continue
                lo, hi = (shape[-1] * r // num_ranks for r in (rank, rank + 1))
                keys.append((f"{kind}.t{number}.Ä", shape))
                at, sizes = (0,) * (len(shape) - 1) + (lo,), (*shape[:-1], hi - lo)
                rows.append((len(keys) - 1, at, sizes))
        ranks.append(
            RankBoxes(
                keys=tuple(key for key, _ in keys),
                dtypes=tuple("bfloat16" if "exp" in key else "float32" for key, _ in keys),
                shapes=tuple(shape for _, shape in keys),
                tensors=np.array([tensor for tensor, _, _ in rows], np.int32),
                offsets=np.array([[*at, *[0] * (3 - len(at))] for _, at, _ in rows]),
                sizes=np.array([[*sizes, *[1] * (3 - len(sizes))] for _, _, sizes in rows]),
                lengths=np.array([4 * math.prod(sizes) + 960 for _, _, sizes in rows]),
                heads=np.array([896 for _ in rows], np.int32),
            )
        )
    return merge_boxes(ranks, [f"__{rank}_0.distcp" for rank in range(num_ranks)])


def _files(index: TensorIndex) -> dict[str, FileSum]:
    return {name: FileSum(num_bytes=1 << 20, crc32=0) for name in index.files}


@pytest.mark.parametrize("mapped", [False, True])
def test_the_file_gives_back_what_was_written(tmp_path: Path, mapped: bool) -> None:
    index = _many()
    path = tmp_path / "tensors.idx"
    read = read_tensor_index(path, write_tensor_index(path, index), mapped=mapped)
    check_index(read, _files(read))
    assert (read.dtypes, read.files) == (index.dtypes, index.files)
    for name, column in index.columns.items():
        assert np.array_equal(read.columns[name], column), name
    assert read.num_bytes() == index.num_bytes()
    assert read.find("main_param.t1") is None
    found = read.find("exp_avg.t4.Ä")
    assert found is not None
    assert (found.dtype, found.shape, found.num_boxes) == (torch.bfloat16, (2, 3, 5), 3)
    assert read.keys("exp_avg.t3") == ["exp_avg.t3.Ä"]
    assert read.keys("x") == []


def _by_torch(index: TensorIndex, meta: StorageMeta) -> Metadata:
    """The same metadata, of torch's objects."""
    tensors, storage = {}, {}
    for key in index.keys():  # noqa: SIM118
        stored = index.find(key)
        assert stored is not None
        tensors[key] = TensorStorageMetadata(
            properties=TensorProperties(dtype=stored.dtype),
            size=torch.Size(stored.shape),
            chunks=[
                ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
                for box in stored.boxes()
            ],
        )
        storage |= {
            MetadataIndex(key, box.offsets): _StorageInfo(box.file, box.place, box.length)
            for box in stored.boxes()
        }
    return Metadata(
        state_dict_metadata=dict(tensors),
        planner_data={key: tuple(key.split(".", 1)) for key in tensors},
        storage_data=storage,
        storage_meta=meta,
        version=CURRENT_DCP_VERSION,
    )


@pytest.mark.parametrize("batch", [1, 4, 1 << 14])
def test_the_pickle_for_torch_holds_what_torch_would_write(
    tmp_path: Path, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megatrain.checkpoint.torch_metadata._BATCH", batch)
    index, meta = _many(), StorageMeta(checkpoint_id="here", save_id="x")
    write_torch_metadata(tmp_path / ".metadata", index, meta)
    found = pickle.loads((tmp_path / ".metadata").read_bytes())
    expected = _by_torch(index, meta)
    assert found == expected
    for key, tensor in expected.state_dict_metadata.items():
        assert isinstance(tensor, TensorStorageMetadata)
        again = found.state_dict_metadata[key]
        assert type(again.size) is torch.Size
        assert again.properties == tensor.properties
    assert all(type(at.offset) is torch.Size for at in found.storage_data)
    assert all(vars(at)["index"] is None for at in found.storage_data)
    assert np.array_equal(index_of_metadata(found).columns["places"], index.columns["places"])


def _changed(index: TensorIndex, column: str, row: int, value: int) -> TensorIndex:
    columns = dict(index.columns)
    columns[column] = columns[column].astype(np.int64)
    columns[column][row] = value
    return TensorIndex(dtypes=index.dtypes, files=index.files, columns=columns)


@pytest.mark.parametrize(
    ("column", "row", "value", "message"),
    [
        ("files", 0, 9, "it refers to file 9 of 3"),
        ("places", 0, 1 << 20, "beyond the end of __0_0"),
        ("lengths", 0, 1 << 62, "beyond the end of __0_0"),
        ("lengths", 1, 100, r"the files lack the values of exp_avg\.t1\.Ä from \[0\] on"),
        ("heads", 1, 1 << 20, r"the files lack the values of exp_avg\.t1\.Ä from \[0\] on"),
        ("shapes", 0, 1 << 61, "do not cover its shape|too large"),
        ("sizes", 2, 0, "do not cover its shape"),
        ("offsets", 2, 1 << 62, "do not cover its shape"),
    ],
)
def test_an_index_must_describe_the_tensors_of_its_files(
    column: str, row: int, value: int, message: str
) -> None:
    index = _many()
    with pytest.raises(CheckpointError, match=message):
        check_index(_changed(index, column, row, value), _files(index))


def test_an_index_refers_to_listed_files_and_shares_no_bytes() -> None:
    index = _many()
    some = dict(list(_files(index).items())[:2])
    with pytest.raises(CheckpointError, match=r"refers to the file '__2_0\.distcp', which index"):
        check_index(index, some)
    small = {name: FileSum(num_bytes=6000, crc32=0) for name in index.files}
    wide = replace_lengths(index, 6000)
    with pytest.raises(CheckpointError, match="share bytes of the files"):
        check_index(wide, small)


def replace_lengths(index: TensorIndex, length: int) -> TensorIndex:
    """Let every archive be a whole file."""
    columns = {
        **index.columns,
        "places": np.zeros_like(index.columns["places"]),
        "lengths": np.full_like(index.columns["lengths"], length),
    }
    return TensorIndex(dtypes=index.dtypes, files=index.files, columns=columns)


def test_checkpoints_without_the_file_are_read_by_their_metadata(tmp_path: Path) -> None:
    expected = load_full_weights(save_small(tmp_path / "new"))[1]
    older = make_older(save_small(tmp_path / "old"))
    found = load_full_weights(older)[1]
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    pieces = [
        replace(piece, tensors={kind: torch.zeros_like(v) for kind, v in piece.tensors.items()})
        for piece in small_pieces()
    ]
    load_checkpoint(older, pieces, groups=GROUPS)
    for piece, written in zip(pieces, small_pieces(), strict=True):
        assert all(torch.equal(v, written.tensors[kind]) for kind, v in piece.tensors.items())


def test_a_file_that_is_not_listed_is_not_read(tmp_path: Path) -> None:
    """The index is that of another checkpoint, which a tool has copied into the folder."""
    folder = save_small(tmp_path)
    (folder / "tensors.idx").write_bytes(b"other")
    edit_index(folder, lambda data: data["files"].pop("tensors.idx"))
    assert load_full_weights(folder)[1].keys() == {"layers.0.w", "norm"}
