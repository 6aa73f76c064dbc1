from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megacore.errors import ConfigError
from megacore.parallel import Group, ProcessGroups
from megatrain.config import Config, ModelConfig, ParallelConfig, PipelineConfig, TrainSectionConfig
from megatrain.models.build import build_chunks, in_model_order
from tests.support.models import params_by_name, random_batch, tiny_config, whole_model


def config_for(model: ModelConfig, *, pp: int, num_chunks: int = 1, **pipeline: Any) -> Config:
    return Config(
        model=model,
        parallel=ParallelConfig(pp=pp),
        pipeline=PipelineConfig(num_chunks=num_chunks, **pipeline),
        train=TrainSectionConfig(seed=1234, dtype="float32"),
    )


def groups_of_stage(position: int, pp: int) -> ProcessGroups:
    """Groups of a pipeline rank that never communicates."""
    handle: Any = object() if pp > 1 else None
    return replace(ProcessGroups.single(), pp=Group("pp", tuple(range(pp)), position, handle))


@pytest.mark.parametrize(("pp", "num_chunks"), [(1, 1), (2, 1), (2, 2), (4, 1)])
def test_the_chunks_of_all_ranks_are_the_whole_model(pp: int, num_chunks: int) -> None:
    model = tiny_config(num_layers=4)
    config = config_for(model, pp=pp, num_chunks=num_chunks)
    per_rank = [build_chunks(config, groups_of_stage(rank, pp)) for rank in range(pp)]
    assert [len(chunks) for chunks in per_rank] == [num_chunks] * pp
    batch, hidden = random_batch(model), None
    for stage in range(pp * num_chunks):
        hidden = per_rank[stage % pp][stage // pp](hidden, batch)
    assert torch.equal(hidden, whole_model(model)(None, batch))


def test_the_stages_of_a_v_go_down_the_ranks_and_back_up() -> None:
    model = tiny_config(num_layers=4)
    config = config_for(model, pp=2, num_chunks=2, schedule="zb_v")
    (first, last), (second, third) = [build_chunks(config, groups_of_stage(r, 2)) for r in range(2)]
    batch, hidden = random_batch(model), None
    for chunk in (first, second, third, last):
        hidden = chunk(hidden, batch)
    assert torch.equal(hidden, whole_model(model)(None, batch))
    # Both ends are on one rank, so a tied embedding is there once.
    assert last.head.weight is params_by_name(first)["embedding"]


def test_the_second_of_two_copies_goes_up_the_ranks() -> None:
    model = tiny_config(num_layers=4)
    config = config_for(model, pp=4, num_chunks=2, schedule="dualpipe")
    groups = [groups_of_stage(rank, 4) for rank in range(4)]
    per_rank = [build_chunks(config, of_rank) for of_rank in groups]
    batch = random_batch(model)
    for copy, ranks in ((0, (0, 1, 2, 3)), (1, (3, 2, 1, 0))):
        hidden = None
        for rank in ranks:
            hidden = per_rank[rank][copy](hidden, batch)
        assert torch.equal(hidden, whole_model(model)(None, batch))
    for rank in range(4):
        # The embedding comes first also where the copy that ends here has the lower number.
        order = in_model_order(config.pipeline, groups[rank].pp)
        assert order == ([0, 1] if rank < 2 else [1, 0])
        pair = in_model_order(config.pipeline, groups[3 - rank].pp)
        mine, theirs = (
            [(info, param) for number in numbers for info, param in chunks[number].param_infos()]
            for numbers, chunks in ((order, per_rank[rank]), (pair, per_rank[3 - rank]))
        )
        assert [info for info, _ in mine] == [info for info, _ in theirs]
        assert all(torch.equal(a, b) for (_, a), (_, b) in zip(mine, theirs, strict=True))
    assert per_rank[3][0].head.weight is params_by_name(per_rank[3][1])["embedding"]


def test_stages_may_hold_only_the_embedding_or_only_the_head() -> None:
    model = tiny_config(num_layers=2)
    config = config_for(model, pp=4, layout="E|t|t|L")
    chunks = [build_chunks(config, groups_of_stage(rank, 4))[0] for rank in range(4)]
    assert [len(chunk.layers) for chunk in chunks] == [0, 1, 1, 0]
    batch, hidden = random_batch(model), None
    for chunk in chunks:
        hidden = chunk(hidden, batch)
    assert torch.equal(hidden, whole_model(model)(None, batch))


def test_a_rank_with_both_ends_in_two_chunks_holds_a_tied_embedding_once() -> None:
    model = tiny_config(num_layers=2)
    first, last = build_chunks(config_for(model, pp=1, num_chunks=2), groups_of_stage(0, 1))
    assert last.head.weight is params_by_name(first)["embedding"]
    assert "embedding" not in params_by_name(last)


def test_layers_that_cannot_be_spread_are_a_mistake_of_the_configuration() -> None:
    config = config_for(tiny_config(num_layers=2), pp=4)
    with pytest.raises(ConfigError, match="num_layers"):
        build_chunks(config, groups_of_stage(0, 4))


def test_dtype_and_seed_come_from_the_configuration() -> None:
    model = tiny_config()
    config = config_for(model, pp=1).model_copy(
        update={"train": TrainSectionConfig(seed=7, dtype="bfloat16")}
    )
    (chunk,) = build_chunks(config, ProcessGroups.single())
    expected = params_by_name(whole_model(model, seed=7, dtype=torch.bfloat16))
    for name, parameter in params_by_name(chunk).items():
        assert torch.equal(parameter, expected[name])
