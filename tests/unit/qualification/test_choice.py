"""The choice between kernels and torch: settings, resumed runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from megacore.ops.dense import rms_norm, rms_norm_reference
from megacore.ops.kernel_choice import LINEAR_MACS, MEASURED, leave_to_torch, left_operations
from megacore.qualification import KernelChoice, choose_kernels, keep_choice, operation_names

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    before = left_operations("cpu")
    yield
    leave_to_torch(before, "cpu")


def test_all_kernels_are_trusted_or_none() -> None:
    assert choose_kernels(CPU, kernels="trust").causes == {}
    assert left_operations("cpu") == set()
    choice = choose_kernels(CPU, kernels="torch")
    assert left_operations("cpu") == {*operation_names("cpu")}
    assert choice.notes() == (), "it was asked for"
    x, weight = torch.randn(5, 7), torch.randn(7)
    assert torch.equal(rms_norm(x, weight, 1e-5), rms_norm_reference(x, weight, 1e-5)[0])


def test_operations_are_left_out_by_name() -> None:
    choice = choose_kernels(CPU, kernels="trust", torch_operations=["rms_norm", "linear"])
    assert choice.causes == dict.fromkeys(("rms_norm", *LINEAR_MACS), "asked")
    with pytest.raises(ValueError, match=r"'rms_nrom' is no operation with a kernel; did you mean"):
        choose_kernels(CPU, torch_operations=["rms_nrom"])
    with pytest.raises(ValueError, match="kernels must be one of auto, trust, torch, got 'off'"):
        choose_kernels(CPU, kernels="off")  # type: ignore[arg-type]


STARTS = "attention", "linear", "linear.bfloat16", "linear.float32.large"


@pytest.mark.parametrize("start", STARTS)
def test_operations_are_left_out_by_the_first_words_of_their_names(start: str) -> None:
    choice = choose_kernels(CPU, kernels="trust", torch_operations=[start])
    assert choice.causes.keys() == {name for name in MEASURED if name.startswith(f"{start}.")}
    assert choice.causes


def test_products_of_one_size_are_described_as_one() -> None:
    kept = "linear.float32.small", "linear.float32.large.input_grad", "linear.bfloat16.large"
    causes = {name: "slower" for name in MEASURED if not name.startswith(kept)}
    del causes["attention.float16"]
    found = KernelChoice(device=("cpu", ""), causes=causes, reasons=causes)  # type: ignore[arg-type]
    assert found.text().partition("; ")[2] == (
        "by ours where they are faster: linear.float32.small, linear.float32.large (input_grad), "
        "linear.bfloat16.large, attention.float16"
    )


def choice(mode: Any = "auto", device: str = "Zen 5", **causes: Any) -> KernelChoice:
    reasons = dict.fromkeys(causes, "now")
    return KernelChoice(device=("cpu", device), causes=causes, reasons=reasons, mode=mode)


@pytest.mark.parametrize(
    ("now", "saved", "kept", "noted"),
    [
        # The measurements of the start count on the same device.
        (choice(gelu="slower"), choice(), {}, []),
        (choice(), choice(gelu="slower"), {"gelu": "slower"}, []),
        # Faults and wishes of now count.
        (choice(gelu="fault"), choice(), {"gelu": "fault"}, ["gelu is computed by torch"]),
        (choice(gelu="asked"), choice(gelu="slower"), {"gelu": "asked"}, []),
        (choice(), choice(gelu="fault"), {}, ["gelu is computed by our kernel"]),
        (choice("trust"), choice(gelu="slower"), {}, ["gelu is computed by our kernel"]),
        # Measurements of a version with other names do not count.
        (
            choice(gelu="slower"),
            choice(gleu="slower"),
            {"gelu": "slower"},
            ["gelu is computed by torch"],
        ),
        # Another device is measured anew.
        (
            choice(device="Xeon", gelu="slower"),
            choice(swiglu="slower", route="slower"),
            {"gelu": "slower"},
            ["gelu is computed by torch", "route, swiglu are computed by our kernel"],
        ),
    ],
)
def test_a_resumed_run_keeps_its_choice_or_notes_the_change(
    now: KernelChoice, saved: KernelChoice, kept: dict[str, str], noted: list[str]
) -> None:
    found, notes = keep_choice(now, saved.state())
    assert found.causes == kept
    assert found.reasons.keys() == kept.keys()
    assert [note.split(", before")[0] for note in notes] == noted
    assert keep_choice(now, {}) == (now, ())
