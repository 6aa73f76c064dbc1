"""Ling 2, which `transformers` does not have: against GLM-4.5, whose blocks it has."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from megacore.parallel.batch import Microbatch
from megatrain.hf import import_hf
from megatrain.hf.export_checkpoint import export_checkpoint
from megatrain.hf.import_checkpoint import import_checkpoint
from tests.support.hf_models import save_bailing

safetensors = pytest.importorskip("safetensors.torch")


def test_logits_are_those_of_its_parts(tmp_path: Path) -> None:
    theirs = save_bailing(tmp_path)
    tokens = torch.randint(0, 260, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = Microbatch(tokens=tokens, labels=None, sample_ids=torch.arange(2), step=0)
    found = import_hf(tmp_path, seq_length=16).chunk.eval().logits(None, batch)
    expected = theirs(input_ids=tokens).logits.detach()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_an_export_of_an_import_has_the_same_files(tmp_path: Path) -> None:
    save_bailing(tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", tmp_path / "ours", seq_length=8)
    export_checkpoint(tmp_path / "ours", tmp_path / "back")
    first, second = (
        safetensors.load_file(tmp_path / folder / "model.safetensors")
        for folder in ("theirs", "back")
    )
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    configs = [
        json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("theirs", "back")
    ]
    assert configs[0] == configs[1]
