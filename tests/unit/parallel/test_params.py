from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megacore.parallel.batch import Microbatch
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.params import ShardPosition, shard
from tests.support.sharding import unshard


@given(
    tp=st.sampled_from([1, 2, 3, 4]),
    tp_dim=st.sampled_from([None, 0, 1, 2]),
    sizes=st.tuples(*[st.integers(1, 3)] * 3),
)
def test_unshard_undoes_shard(tp: int, tp_dim: int | None, sizes: tuple[int, int, int]) -> None:
    shape = tuple(size * tp if dim == tp_dim else size for dim, size in enumerate(sizes))
    info = ParamInfo(name="w", full_shape=shape, tp_dim=tp_dim)
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    parts = [shard(full, info, tp_position=t, tp_size=tp) for t in range(tp)]
    assert all(tuple(p.shape) == info.local_shape(tp) and p.is_contiguous() for p in parts)
    assert torch.equal(unshard(parts, info), full)


@given(
    tp=st.sampled_from([1, 2, 3]),
    ep=st.sampled_from([1, 2, 4]),
    tp_dim=st.sampled_from([None, 0, 2]),
    ep_dim=st.sampled_from([None, 1]),
)
def test_unshard_joins_parts_over_tp_and_ep(
    tp: int, ep: int, tp_dim: int | None, ep_dim: int | None
) -> None:
    shape = tuple(2 * (tp if dim == tp_dim else ep if dim == ep_dim else 1) for dim in range(3))
    info = ParamInfo(name="w", full_shape=shape, tp_dim=tp_dim, ep_dim=ep_dim, expert=True)
    full = torch.arange(torch.Size(shape).numel()).view(shape)
    boxes = [
        ShardPosition(tp_position=t, tp_size=tp, ep_position=e, ep_size=ep)
        for e in range(ep)
        for t in range(tp)
    ]
    assert [box.index for box in boxes] == list(range(tp * ep))
    parts = [shard(full, info, **vars(box)) for box in boxes]
    assert torch.equal(unshard(parts, info, ep_size=ep), full)
    for box, part in zip(boxes, parts, strict=True):
        where = tuple(
            slice(start, start + length)
            for start, length in zip(box.offsets(info), part.shape, strict=True)
        )
        assert torch.equal(full[where], part)


def test_shard_does_not_share_memory_with_the_full_parameter() -> None:
    full = torch.zeros(4)
    info = ParamInfo(name="norm", full_shape=(4,), tp_dim=None)
    shard(full, info, tp_position=0, tp_size=2).fill_(1.0)
    assert full.sum() == 0


def test_a_split_that_does_not_divide_names_the_parameter_and_the_rule() -> None:
    info = ParamInfo(name="layers.0.mlp.down", full_shape=(4, 6), tp_dim=1)
    with pytest.raises(ValueError, match=r"layers.0.mlp.down: tp=4 .* divisors of 6"):
        info.local_shape(4)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"full_shape": (2,), "tp_dim": 1}, "tp_dim=1 is not a dimension"),
        ({"full_shape": (2,), "tp_dim": 0, "sequence_parallel": True}, "replicated"),
        ({"full_shape": (2,), "tp_dim": None, "is_shared_copy": True}, "shared set"),
        ({"full_shape": (2,), "tp_dim": None, "ep_dim": 1, "expert": True}, "ep_dim=1 is not"),
        ({"full_shape": (2,), "tp_dim": None, "ep_dim": 0}, "for experts"),
        ({"full_shape": (2,), "tp_dim": 0, "ep_dim": 0, "expert": True}, "differs from"),
    ],
)
def test_contradicting_descriptions_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ParamInfo(name="w", **fields)  # type: ignore[arg-type]


def test_shards_of_a_wrong_shape_are_refused() -> None:
    info = ParamInfo(name="w", full_shape=(4, 2), tp_dim=0)
    with pytest.raises(ValueError, match="shard 1 of 2"):
        unshard([torch.zeros(2, 2), torch.zeros(3, 2)], info)
    with pytest.raises(ValueError, match="no shards"):
        unshard([], info)
    with pytest.raises(ValueError, match="expected"):
        shard(torch.zeros(2, 4), info, tp_position=0, tp_size=1)
    with pytest.raises(ValueError, match="not a multiple of ep=2"):
        unshard([torch.zeros(4, 2)] * 3, info, ep_size=2)
    with pytest.raises(ValueError, match="tp_position=2"):
        shard(torch.zeros(4, 2), info, tp_position=2, tp_size=2)


def test_a_microbatch_checks_its_shapes() -> None:
    rows, ids = torch.zeros(2, 3, dtype=torch.int64), torch.arange(2)
    assert Microbatch(tokens=rows, labels=None, sample_ids=ids, step=0).shape == (2, 3)
    with pytest.raises(ValueError, match="labels"):
        Microbatch(tokens=rows, labels=rows[:1], sample_ids=ids, step=0)
    with pytest.raises(ValueError, match="sample_ids"):
        Microbatch(tokens=rows, labels=rows, sample_ids=ids[:1], step=0)
    with pytest.raises(ValueError, match="batch, sequence"):
        Microbatch(tokens=rows[0], labels=None, sample_ids=ids, step=0)
