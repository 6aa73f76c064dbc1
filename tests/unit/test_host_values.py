"""Reads of device values: one function, named, and answered without data."""

from __future__ import annotations

import ast
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from megacore import host_values
from megacore.host_values import HostRead

ROOT = Path(__file__).parents[2]


def names_of_reads() -> Iterator[str]:
    """Names that calls in the source give, also by a variable."""
    for path in sorted(ROOT.glob("python/mega*/**/*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if "host_values." in text else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in (
                "host_values.read",
                "host_values.to_host",
            ):
                name = node.args[1]
                if isinstance(name, ast.Name):
                    name = next(
                        each.value
                        for each in ast.walk(ast.parse(text))
                        if isinstance(each, ast.Assign)
                        and ast.unparse(each.targets[0]) == name.id
                        and isinstance(each.value, ast.Constant)
                    )
                assert isinstance(name, ast.Constant), ast.unparse(node)
                yield str(name.value)


def test_every_read_of_the_source_is_documented() -> None:
    page = (ROOT / "docs" / "dry-run.md").read_text(encoding="utf-8")
    table = page[page.index("## Reads of device values") : page.index("## What it finds")]
    found = set(names_of_reads())
    assert len(found) > 8
    assert {name for name in found if f"`{name}`" not in table} == set()


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bool, torch.bfloat16])
def test_values_are_those_of_the_tensor(dtype: torch.dtype) -> None:
    values = torch.tensor([[0, 1], [1, 1]], dtype=dtype)
    assert host_values.read(values, "values") == values.tolist()
    assert host_values.read(values[0, 1], "one value") == 1
    assert torch.equal(host_values.to_host(values, "values"), values)


def test_tensors_without_data_answer_what_is_assumed_of_them() -> None:
    with FakeTensorMode():
        fake = torch.empty(2, dtype=torch.int64, device="cuda")
    for empty in (fake, torch.empty(2, dtype=torch.int64, device="meta")):
        assert not host_values.has_data(empty)
        assert host_values.read(empty, "rows") == [0, 0]
        assert host_values.read(empty, "rows", assumed=lambda: [3, 4]) == [3, 4]
        copy = host_values.to_host(empty, "rows", assumed=lambda: [3, 4])
        assert copy.device.type == "cpu"
        assert copy.dtype == torch.int64
    assert math.isnan(host_values.read(torch.empty((), device="meta"), "loss"))


def test_assumed_values_are_not_used_where_there_are_values() -> None:
    assert host_values.read(torch.ones(1), "ones", assumed=lambda: [2.0]) == [1.0]


def test_a_listener_hears_names_and_places() -> None:
    found: list[HostRead] = []
    with host_values.listen(found.append):
        host_values.read(torch.ones(1), "first")
        host_values.to_host(torch.ones(1), "second")
    host_values.read(torch.ones(1), "third")
    assert [read.name for read in found] == ["first", "second"]
    assert all("test_host_values.py:" in read.place for read in found)
