"""Kernels are tried in a child process once, and those with faults are named and replaced."""

from __future__ import annotations

import itertools
import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.ops.kernel_choice import (
    FEW_ROWS,
    LINEAR_MACS,
    MEASURED,
    NARROW_DTYPES,
    PRODUCT_NAMES,
    SIZES,
    leave_to_torch,
    left_operations,
    linear_name,
    measured_for,
)
from megacore.qualification import (
    Verdict,
    choose_kernels,
    compare,
    find_verdict,
    operation_names,
    verdict,
)
from megacore.qualification import choice as choice_module
from megacore.qualification.cases import AWKWARD, Draw, Sizes, calls_of, linear_shape
from megacore.qualification.child import Request, events
from megacore.qualification.compare import first_difference

CPU = torch.device("cpu")
PLANTED = ("tests.support.planted_kernels",)


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = left_operations("cpu")
    yield
    leave_to_torch(before, "cpu")


def refuse(*args: Any) -> Any:
    raise AssertionError(f"a child process was started: {args}")


def test_every_operation_with_a_kernel_and_a_reference_is_compared() -> None:
    names = {
        name.removeprefix("megacore::").partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("megacore::")
    }
    with_kernel = {name for name in names if f"_{name}" in names}
    # The products of 8-bit operands choose for themselves, as one. Weight gradients of linear
    # layers are a product of torch, which is compared with two operations.
    with_kernel.add("add_weight_grad_")
    assert {*operation_names("cuda")} - {"fp8_product"} == with_kernel
    assert {*operation_names("cpu")} - {*MEASURED} == with_kernel


@pytest.mark.parametrize("name", operation_names("cuda"))
def test_kernels_of_cpus_agree_with_their_references(name: str) -> None:
    assert first_difference(name, CPU) is None
    num_calls = sum(len(list(calls_of(name, Draw(s, torch.bfloat16, CPU)))) for s in AWKWARD)
    assert num_calls >= len(AWKWARD)


def test_sizes_without_experts_have_calls_of_dense_operations_only() -> None:
    draw = Draw(Sizes(tokens=7, width=8, mlp=16, head_dim=4), torch.float32, CPU)
    called = {name for name in operation_names("cuda") if list(calls_of(name, draw))}
    assert {"rms_norm", "adamw_step_"} <= called
    assert not called & {"route", "grouped_product", "permute"}


def test_faults_are_found_named_and_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose_kernels(CPU, imports=PLANTED, folder=tmp_path)
    assert choice.causes == {
        "add_rms_norm": "fault",
        "swiglu_backward": "fault",
        **{linear_name("float32", "large", product): "slower" for product in PRODUCT_NAMES},
        **{name: choice.causes[name] for name in choice.causes if name in MEASURED},
    }
    assert choice.reasons["add_rms_norm"].startswith("differs at 33 x 96")
    assert choice.reasons["swiglu_backward"] == "ends its process with signal 11"
    assert left_operations("cpu") == choice.causes.keys()
    (note,) = choice.notes()
    assert note.startswith("torch computes 2 of our operations: add_rms_norm differs at 33 x 96")
    (file,) = tmp_path.glob("*.json")
    assert json.loads(file.read_text())["faults"].keys() == {"add_rms_norm", "swiglu_backward"}

    monkeypatch.setattr(verdict, "_run_child", refuse)
    leave_to_torch((), "cpu")
    again = choose_kernels(CPU, imports=PLANTED, folder=tmp_path)
    assert again == choice
    assert left_operations("cpu") == choice.causes.keys()


def test_sound_kernels_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = find_verdict(CPU, sizes=None, dtype=torch.float32, folder=tmp_path)
    assert found.faults == {}
    assert found.times.keys() == {*measured_for("float32")}
    (file,) = tmp_path.glob("*.json")
    file.write_text(file.read_text()[:-9])
    again = find_verdict(CPU, sizes=None, dtype=torch.float32, folder=tmp_path)
    assert again.faults == {}, "a damaged file is made again"
    monkeypatch.setattr(verdict, "_run_child", refuse)
    assert find_verdict(CPU, sizes=None, dtype=torch.float32, folder=tmp_path) == again
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    with pytest.raises(AssertionError, match="a child process was started"):
        find_verdict(CPU, sizes=None, dtype=torch.float32, folder=tmp_path)


def test_a_dtype_adds_its_products_and_those_of_others_are_left_to_torch(tmp_path: Path) -> None:
    choose_kernels(CPU, folder=tmp_path)
    assert {*MEASURED} - {*measured_for("float32")} <= left_operations("cpu")
    choice = choose_kernels(CPU, dtype=torch.bfloat16, folder=tmp_path)
    assert {name for name in MEASURED if "float16" in name and "bf" not in name} <= {*choice.causes}
    (file,) = tmp_path.glob("*.json")
    times = json.loads(file.read_text())["times"]
    assert times.keys() == {"torch.float32", "torch.bfloat16"}
    assert times["torch.bfloat16"].keys() == {*measured_for("bfloat16")}


def test_measured_products_are_of_the_size_of_their_name() -> None:
    for dtype in ("float32", *NARROW_DTYPES):
        for size, larger in itertools.pairwise([*SIZES, None]):
            assert size is not None
            name = linear_name(dtype, size, "forward")
            rows, features = linear_shape(name)
            assert LINEAR_MACS[name] <= rows * features**2
            if size == "few_rows":
                assert rows == FEW_ROWS
                continue
            assert rows == features > FEW_ROWS
            assert rows**3 <= 8 * LINEAR_MACS[name]
            if larger is not None:
                assert rows**3 < LINEAR_MACS[linear_name(dtype, larger, "forward")]


def test_slow_products_in_16_bits_are_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    times = {linear_name("float32", "large", product): (9.0, 8.0) for product in PRODUCT_NAMES}
    times |= {linear_name("bfloat16", "large", each): (2.0, 160.0) for each in PRODUCT_NAMES}
    found = Verdict(faults={}, times=times)
    monkeypatch.setattr(choice_module, "find_verdict", lambda *_, **__: found)
    monkeypatch.setattr(choice_module, "known_verdict", lambda *_, **__: found)
    given = {"dtype": torch.bfloat16, "folder": tmp_path}
    assert choose_kernels(CPU, **given).notes() == (), "ours takes twice the time of float32"
    slow = choose_kernels(CPU, **given, torch_operations=["linear"])
    assert slow.notes() == (
        "products of linear layers in bfloat16 take 81x the time of float32 on this processor; "
        'train.dtype = "float32" is faster',
    )
    assert choose_kernels(CPU, folder=tmp_path).notes() == ()


def test_without_a_child_process_torch_computes_everything(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verdict.sys, "executable", "false")
    choice = choose_kernels(CPU, folder=tmp_path)
    assert choice.causes == dict.fromkeys(operation_names("cpu"), "fault")
    assert "could not be tried (ends its process (exit code 1))" in choice.notes()[0]
    assert not list(tmp_path.glob("*.json"))


def test_a_child_that_says_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(verdict, "_LONGEST_S", 0.05)
    with subprocess.Popen(["sleep", "60"], stdout=subprocess.PIPE) as child:
        assert not verdict._read_events(child, refuse)
        child.kill()
    trial = verdict._Trial(request("gelu", "swiglu"))
    trial.note(["start", "gelu"])
    trial.end("does not end within 60 s")
    assert trial.faults == {"gelu": "does not end within 60 s"}
    assert trial.rest().compared == ("swiglu",)
    assert trial.rest().left == ("gelu",)


def request(*compared: str, **others: Any) -> Request:
    given = {"device": "cpu", "threads": 1, "dtype": "float32", "sizes": None, "timed": ()}
    return Request(compared=compared, **given | others)


def test_operations_are_timed_on_the_sizes_of_the_run() -> None:
    sizes = Sizes(tokens=64, width=32, mlp=64, head_dim=16)
    asked = request(sizes=sizes, timed=("gelu", "swiglu", "route"), left=("gelu",))
    assert Request.of_json(asked.to_json()) == asked
    found = [event for event in events(asked) if event[0] == "times"]
    assert [name for _, name, *_ in found] == ["swiglu", "route"]
    assert all(ours > 0 and other > 0 for _, _, ours, other in found[:1])  # type: ignore[operator]
    assert found[1][2:] == [0.0, 0.0], "a run without experts routes nothing"


def test_an_operation_without_memory_for_its_trial_is_not_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any) -> Any:
        raise torch.OutOfMemoryError(f"no room for {len(args)} tensors")

    monkeypatch.setattr(compare, "calls_of", lambda *_: iter([(full, [])]))
    sizes = Sizes(tokens=64, width=32, mlp=64, head_dim=16)
    asked = request(sizes=sizes, timed=("gelu",))
    assert list(events(asked)) == [["start", "gelu"], ["times", "gelu", 0.0, 0.0]]


def test_an_operation_is_slower_by_more_than_noise() -> None:
    times = {"gelu": (1.05, 1.0), "swiglu": (1.3, 1.0), "route": (0.0, 0.0)}
    small, large = (linear_name("float32", size, "forward") for size in ("small", "large"))
    linear = {small: (0.97, 1.0), large: (0.5, 1.0)}
    found = Verdict(faults={}, times=times | linear, label="64 x 32").slower()
    assert found == {
        "swiglu": "1.3x slower at 64 x 32",
        small: "1.0x the time of torch",
    }


def test_verdicts_are_kept_where_no_other_user_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    cache = tmp_path / "cache" / "megacore" / "kernels"
    assert verdict._default_folder() == cache
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))  # no folder can be made in it
    folder = verdict._default_folder()
    assert folder.parent == temporary
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert verdict._default_folder() == tmp_path / "file" / "megacore" / "kernels"
    assert verdict._Place.of(CPU, None, torch.float32, (), None).read() is None
