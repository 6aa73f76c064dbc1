"""Every layout that the tests of invariance train also runs without values, peers and devices."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from megatrain.dry_run import dry_run
from megatrain.dry_run.run import check_cuda
from tests.dist import (
    test_dualpipe,
    test_echo,
    test_graph_training,
    test_invariance,
    test_moe_invariance,
    test_overlap_moe,
)
from tests.support.configs import changed_config

Changes = Mapping[str, Any]
# Reads of a step that the documentation names.
DOCUMENTED = {
    "results of the step",
    "rows of an all-to-all",
    "rows of the local experts",
    "rows of home experts",
    "plan of clones",
    "copies over the budget",
    "header of a message",
}
# By name: ranks, base and changes.
CASES: dict[str, tuple[int, Mapping[str, Any], Changes]] = {
    **{
        f"dense: {name}": (world_size, test_invariance.BASE, changes)
        for name, (world_size, changes) in test_invariance.LAYOUTS.items()
    },
    **{
        f"{architecture}: {layout}": (
            test_invariance.LAYOUTS[layout][0],
            test_invariance.BASE,
            {**test_invariance.LAYOUTS[layout][1], **test_invariance.ARCHITECTURES[architecture]},
        )
        for architecture, layout in test_invariance.ARCHITECTURE_CASES
    },
    **{
        f"experts: {name}": (
            world_size,
            test_moe_invariance.BASE,
            {**test_moe_invariance.MODELS[model], **changes},
        )
        for name, (model, world_size, changes) in test_moe_invariance.LAYOUTS.items()
    },
    **{
        f"8 bits: {name}": (2, test_moe_invariance.BASE, {"train.fp8": "blockwise", **changes})
        for name, changes in {
            "tp2": {"parallel.tp": 2, "parallel.sequence_parallel": True},
            "pp2 zb_h1": {"parallel.pp": 2, "pipeline.schedule": "zb_h1"},
            "cp2": {"parallel.cp": 2},
            "ep2": {"parallel.ep": 2},
            "ep2 static": {"parallel.ep": 2, "moe.dispatcher": "static"},
            "recomputed": {"train.recompute": ["full"]},
        }.items()
    },
    **{
        f"clones: {name}": (world_size, test_echo.BASE, changes)
        for world_size, cases in test_echo.CASES.items()
        for name, changes in cases.items()
    },
    **{
        f"turns: {name}": (
            4,
            test_moe_invariance.BASE,
            {**test_overlap_moe.DUALPIPE, "pipeline.overlap_moe": True, **changes},
        )
        for name, changes in test_overlap_moe.VARIANTS.items()
        if "peer" not in str(changes)
    },
    **{
        f"graphs: {', '.join(graphs.get('scopes', ())) or graphs['mode']}": (
            2,
            test_graph_training.BASE,
            {
                **test_graph_training.STATIC,
                "parallel.ep": 2,
                **{f"graphs.{key}": value for key, value in graphs.items()},
            },
        )
        for graphs in test_graph_training.OF_EXPERTS
    },
}


@pytest.mark.parametrize("name", CASES)
def test_a_layout_runs_dry(name: str) -> None:
    world_size, base, changes = CASES[name]
    config = changed_config(world_size, base, changes)
    # Ranks differ by their stages.
    for rank in sorted({0 if "parallel.pp" in changes else world_size - 1, world_size - 1}):
        found = dry_run(config, world_size=world_size, rank=rank)
        assert found.error is None
        assert found.costs is not None
        assert not found.costs.syncs
        assert bool(found.costs.num_graphs) == (config.graphs.mode != "off")
        assert {read.name for read in found.costs.reads} <= DOCUMENTED


@pytest.mark.parametrize("name", list(CASES)[::5])
def test_forward_passes_and_an_update_run_on_the_branches_of_a_gpu(name: str) -> None:
    world_size, base, changes = CASES[name]
    config = changed_config(world_size, base, changes)
    found = check_cuda(config, world_size, world_size - 1, "h100")
    assert found.error is None
    assert not found.syncs
    assert found.num_operations > 100


def test_two_copies_of_the_model_run_dry() -> None:
    for changes, world_size, more in test_dualpipe.LAYOUTS.values():
        config = changed_config(world_size, test_dualpipe.BASE, {**changes, **more})
        found = dry_run(config, world_size=world_size, rank=world_size - 1)
        assert found.works, found.error
