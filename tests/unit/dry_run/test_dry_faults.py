"""A dry run names planted faults: waits for the device, wrong devices, wrong shapes."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore import host_values
from megacore.ops.cuda_module import device_facts
from megatrain.dry_run import DryRun, dry_run
from megatrain.dry_run.fake_cuda import fake_cuda
from megatrain.dry_run.run import check_cuda
from megatrain.models.attention.gqa import Attention
from tests.support.configs import FOUR_LAYERS, changed_config

BASE: dict[str, dict[str, Any]] = {
    "model": {**FOUR_LAYERS},
    "train": {"steps": 2, "microbatch_size": 2, "global_batch_size": 4},
}


def plant(
    monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor], Any], in_layer: int = 2
) -> str:
    """Run a fault in each forward pass of one layer's attention; returns its place."""
    forward, built = Attention.forward, []

    def faulty(self: Attention, qkv: Tensor, *args: Any) -> Tensor:
        if self not in built:
            built.append(self)
        if built.index(self) % 4 == in_layer:  # of each model
            fault(qkv)
        return forward(self, qkv, *args)

    monkeypatch.setattr(Attention, "forward", faulty)
    return f"test_dry_faults.py:{inspect.getsourcelines(fault)[1]}"


def run(world_size: int = 1, **changes: Any) -> DryRun:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    config = changed_config(world_size, BASE, named)
    return dry_run(config, world_size=world_size, rank=0)


# One line each, so that the place of a fault is that of its function.
WAITS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "branch": lambda x: 1 if x.sum() > 0 else 2,
    "int": lambda x: int(x.argmax()),
    "tolist": lambda x: x[0].tolist(),
    "cpu": lambda x: x.cpu(),
    "copy": lambda x: torch.empty(x.shape).copy_(x),
}
UNKNOWN_SIZES: dict[str, Callable[[Tensor], Any]] = {
    "nonzero": lambda x: x.nonzero(),
    "mask": lambda x: x[x > 0],
    "masked_select": lambda x: x.masked_select(x > 0),
    "unique": lambda x: x.unique(),
    "repeat": lambda x: x[0].repeat_interleave(
        torch.empty(2, dtype=torch.int64, device=x.device), 0
    ),
}
ERRORS: dict[str, tuple[str, Callable[[Tensor], Any]]] = {
    "product": ("different devices", lambda x: x @ torch.ones(x.shape[-1], 2)),
    "sum": ("different devices", lambda x: x + torch.ones(x.shape)),
    "embedding": ("different devices", lambda x: torch.cat((x, torch.zeros_like(x, device="cpu")))),
    "shape": ("reduction dim", lambda x: x[0] @ x[0]),
    "view": ("invalid for input of size", lambda x: x.view(7, 7)),
    "type": (
        "different dtypes",
        lambda x: x[0] @ torch.empty(x.shape[-1], 2, dtype=torch.bfloat16, device=x.device),
    ),
}


@pytest.mark.parametrize("name", WAITS)
def test_a_wait_in_a_layer_is_named_with_its_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = plant(monkeypatch, WAITS[name])
    found = run()
    assert not found.works
    assert found.costs is not None, found.error
    (sync,) = found.costs.syncs
    assert place in sync
    assert found.costs.syncs[sync] == 2, "one in each microbatch of the step"


@pytest.mark.parametrize("name", UNKNOWN_SIZES)
def test_a_result_of_unknown_size_is_named_with_its_place(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = plant(monkeypatch, UNKNOWN_SIZES[name])
    found = run()
    assert found.error is not None
    assert "waits for the device" in found.error
    assert place in found.error


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_named_with_place_layer_and_action(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, fault = ERRORS[name]
    place = plant(monkeypatch, fault)
    found = run(2, parallel__pp=2, pipeline__layout="Ettt|tL")
    assert not found.works
    assert found.error is not None
    assert re.search(what, found.error), found.error
    assert place in found.error
    assert "layers.2.attention.qkv" in found.error
    assert "action 0F0 (forward, stage 0, microbatch 0)" in found.error


@pytest.mark.parametrize("name", ["item", "bool", "cpu", "nonzero", "mask", "product"])
def test_a_fault_on_the_branch_of_a_gpu_is_found_by_device(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = {**WAITS, **UNKNOWN_SIZES, "product": ERRORS["product"][1]}[name]
    line = inspect.getsourcelines(fault)[1]
    plant(monkeypatch, lambda x: fault(x) if x.is_cuda else None)
    assert run().works
    found = dry_run(changed_config(1, BASE, {}), world_size=1, rank=0, device="h100")
    assert found.costs is not None
    assert not found.costs.syncs
    assert not found.works
    assert found.cuda is not None
    named = found.cuda.error or next(iter(found.cuda.syncs))
    assert f"test_dry_faults.py:{line}" in named


def test_the_device_answers_with_its_capability(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = []
    plant(monkeypatch, lambda x: answers.append(device_facts(x.device).capability))
    config = changed_config(1, BASE, {"train.global_batch_size": 2})
    for device in ("a100", "h100", "b300"):
        # Not on the meta device, which has none.
        assert check_cuda(config, 1, 0, device).error is None
    assert answers == [(8, 0), (9, 0), (10, 3)]


def test_indices_of_fake_tensors_have_the_shapes_of_real_ones() -> None:
    x = torch.arange(24.0).view(2, 3, 4)
    rows = torch.tensor([1, 0])
    with fake_cuda((9, 0)) as device:
        fake = torch.empty(2, 3, 4, device=device)
        for key in (
            0,
            -1,
            slice(1, None),
            (slice(None), 1),
            (..., 2),
            (0, ..., slice(0, 2)),
            (None, 1, slice(None), None),
            (rows,),
            (slice(None), [2, 0]),
            (rows, rows),
            (slice(None, None, 2), rows),
        ):
            moved = key
            assert fake[moved].shape == x[key].shape, key
            assert fake[moved].device == device
        fake[0, 1:] = 3.0
        fake[1] = fake[0]
        fake[rows] = fake[0].to(torch.float32)
        assert fake.to("cuda", torch.bfloat16).dtype == torch.bfloat16
        assert (~(fake > 0)).dtype == torch.bool


def test_a_named_read_is_listed_and_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, lambda x: host_values.read(x.sum(), "sum of a layer"))
    found = run()
    assert found.works
    assert found.costs is not None
    reads = {read.name: number for read, number in found.costs.reads.items()}
    assert reads == {"sum of a layer": 2, "results of the step": 1}


def test_operations_belong_to_layers() -> None:
    found = run(train__recompute=["full"])
    assert found.costs is not None
    forwards = {
        layer: number
        for (phase, layer), number in found.costs.operations.items()
        if phase == "forward" and layer.startswith("layers.")
    }
    assert set(forwards) == {f"layers.{number}" for number in range(4)}
    inner = {number for layer, number in forwards.items() if layer != "layers.3"}
    assert len(inner) == 1, "equal layers start equally many operations"
    plain = run().costs
    assert plain is not None
    more = ("backward", "layers.1")
    assert found.costs.operations[more] > plain.operations[more] > 0
