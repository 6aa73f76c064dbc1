"""`doctor` and `train` on GPUs that are not here: they say which kernels run, and why not others.

The devices and the build are claimed; tensors on them have no values.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megacore.ops import cuda_module
from megacore.ops.cuda_module import KernelBuild
from megatrain.cli import doctor, main

# Of `make cuda`, and of `MEGACORE_CUDA=ON`.
FOUR = KernelBuild(archs=("80", "90a", "100a", "120a"), grouped=("90a", "100a"), cuda=13000)
BOTH = KernelBuild(archs=("90a", "100a"), grouped=("90a", "100a"), cuda=13000)
DEVICES = {
    "A100": (8, 0),
    "L40S": (8, 9),
    "RTX4090": (8, 9),
    "H100": (9, 0),
    "B200": (10, 0),
}
# Of the module, far above the sizes here.
LIMITS = {
    "MAX_NORM_BYTES": 1 << 16,
    "MAX_NORMED_HEAD_BYTES": 1 << 10,
    "MAX_ROUTER_EXPERTS": 1 << 10,
    "MAX_ROUTER_CHOICES": 32,
    "MAX_SORTED_EXPERTS": 1 << 10,
    "MAX_TOP_K_COLUMNS": 1 << 10,
}
ONE_BY_ONE = "grouped products one per expert"
LINES = {
    "A100": f"sm_80, {ONE_BY_ONE}",
    "L40S": f"sm_80, {ONE_BY_ONE}",
    "RTX4090": f"sm_80, {ONE_BY_ONE}",
    "H100": "sm_90a, grouped products native",
    "B200": "sm_100a, grouped products native",
}
TOML = """\
[model]
hidden_size = 64
num_layers = 1
num_heads = 4
vocab_size = 300
seq_length = 32
[moe]
num_experts = 4
top_k = 2
ffn_hidden_size = 32
[train]
global_batch_size = 4
dtype = "bfloat16"
fp8 = "blockwise"
[data]
source = "missing"
tokenizer = "missing.json"
"""


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Set the kernels of this installation."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def become(found: KernelBuild) -> None:
        module = SimpleNamespace(
            compiled_archs=lambda: list(found.archs),
            grouped_gemm_archs=lambda: list(found.grouped),
            runtime_version=lambda: found.cuda,
            driver_version=lambda: 13000,
            __file__=__file__,
            **LIMITS,
        )
        monkeypatch.setattr(cuda_module, "_CUDA", module)
        cuda_module.forget_devices()

    yield become
    monkeypatch.undo()
    cuda_module.forget_devices()


@pytest.fixture
def plugged(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let torch have one GPU."""

    def become(name: str) -> None:
        major, minor = DEVICES[name]
        properties = SimpleNamespace(
            name=f"NVIDIA {name}",
            total_memory=80 << 30,
            major=major,
            minor=minor,
            multi_processor_count=108,
        )
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
        monkeypatch.setattr(doctor, "_try_two_processes", lambda: {"works": "yes"})

    return become


@pytest.mark.parametrize("name", DEVICES)
def test_doctor_names_the_kernels_of_a_gpu(
    name: str, build: Any, plugged: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    build(FOUR)
    plugged(name)
    assert main(["doctor", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    major, minor = DEVICES[name]
    assert facts["torch"]["GPU 0"] == f"NVIDIA {name}, 80 GiB, sm_{major}{minor}"
    assert facts["torch"]["kernels of GPU 0"] == LINES[name]
    assert facts["megacore"]["CUDA kernels"] == "built for 80, 90a, 100a, 120a"


@pytest.mark.filterwarnings("ignore:operations on cuda")
@pytest.mark.parametrize("name", ["A100", "L40S", "RTX4090"])
def test_doctor_says_how_to_build_for_a_gpu(
    name: str, build: Any, plugged: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    build(BOTH)
    plugged(name)
    assert main(["doctor", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["torch"]["kernels of GPU 0"]
    arch = "{}{}".format(*DEVICES[name])
    assert found == (
        f"none: this build has kernels for sm_90a and sm_100a, and the device is sm_{arch}; "
        f"MEGACORE_CUDA_ARCHS={arch} pip install . builds them, {ONE_BY_ONE}"
    )


@pytest.mark.parametrize("name", DEVICES)
def test_train_names_the_kernels_of_a_gpu(
    name: str,
    build: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    build(FOUR)
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text(TOML)
    assert main(["train", "run.toml", "--dry-run", f"--device={name}"]) == 0
    shown = capsys.readouterr().out
    dotted, fp8 = "{}.{}".format(*DEVICES[name]), "native" if name == "H100" else "emulated"
    assert f"device      {name.upper()} ({dotted}), fake: forward passes and an update" in shown
    assert f"kernels     {LINES[name]}, fp8 {fp8}\n" in shown
    emulated = (
        "note        train.fp8 is emulated, slower than bfloat16 alone: 8-bit products exist for "
        f"compute capability 9.0 only, and the device has {dotted}"
    )
    assert (emulated in shown) == (fp8 == "emulated")
    waits = (
        "note        products of experts run one by one and wait for the GPU: grouped products "
        f"exist for compute capability 9.0 and 10.0 only, and the device has {dotted}"
    )
    assert (waits in shown) == (ONE_BY_ONE in LINES[name])
    assert shown.rstrip().endswith("works")
