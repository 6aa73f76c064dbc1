"""Notes on products at the start of a run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from megatrain.config import Config, TrainSectionConfig, resolve
from megatrain.train.kernels import kernel_notes


@pytest.fixture
def matmul() -> Iterator[None]:
    """Put the process-wide setting back, which is no plain attribute."""
    before = torch.backends.cuda.matmul.allow_tf32
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("matmul")
@pytest.mark.parametrize(
    ("dtype", "device", "allows", "noted"),
    [
        ("float32", "cuda", False, True),
        ("float32", "cuda", True, False),
        ("bfloat16", "cuda", False, False),
        ("float32", "cpu", False, False),
    ],
)
def test_full_float32_on_a_gpu_is_noted_with_its_switches(
    dtype: str, device: str, allows: bool, noted: bool
) -> None:
    torch.backends.cuda.matmul.allow_tf32 = allows
    train = TrainSectionConfig(dtype=dtype)
    config = resolve(Config(train=train), 1, vocab_size=256, cuda=device == "cuda")
    notes = kernel_notes(config.train, [], device=torch.device(device))
    assert any("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE=1" in note for note in notes) == noted
