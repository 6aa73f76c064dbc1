"""Layers for multi-token prediction in the names of published checkpoints, against transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megacore.parallel.batch import Microbatch
from megatrain.cli import main
from megatrain.hf import HFTensors, config_to_hf, import_hf
from megatrain.hf_folder import TensorFiles
from megatrain.models.multi_token import ahead
from tests.support.hf_models import make_theirs, save_theirs

safetensors = pytest.importorskip("safetensors.torch")
modeling = pytest.importorskip("transformers.modeling_layers")
FAMILIES = ("deepseek-v3", "glm4-moe, groups, qk norm, biases")


def published_names(further: Any, theirs: Any) -> dict[str, Tensor]:
    """Tensors of one layer as a published checkpoint has them."""
    prefix = f"model.layers.{theirs.config.num_hidden_layers}"
    tensors = {
        f"{prefix}.embed_tokens.weight": theirs.model.embed_tokens.weight.detach().clone(),
        f"{prefix}.shared_head.head.weight": theirs.lm_head.weight.detach().clone(),
    }
    for name, value in further.layers[0].state_dict().items():
        name = name.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        if name.endswith("experts.gate_up_proj"):
            for expert, (gate, up) in enumerate(half.chunk(2) for half in value):
                tensors[f"{prefix}.mlp.experts.{expert}.gate_proj.weight"] = gate.clone()
                tensors[f"{prefix}.mlp.experts.{expert}.up_proj.weight"] = up.clone()
        elif name.endswith("experts.down_proj"):
            for expert, down in enumerate(value):
                tensors[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = down.clone()
        else:
            tensors[f"{prefix}.{name}"] = value
    return tensors


def make_folder(family: str, folder: Path) -> tuple[Any, Any]:
    theirs = make_theirs(family).eval()
    further = modeling.MtpModel(theirs, 1).eval()
    with torch.no_grad():
        for name, value in further.layers[0].state_dict().items():
            value.uniform_(0.5, 1.5) if "norm" in name else value.uniform_(-0.3, 0.3)
    theirs.save_pretrained(folder)
    safetensors.save_file(published_names(further, theirs), folder / "mtp.safetensors")
    files = [folder / "model.safetensors", folder / "mtp.safetensors"]
    weight_map = {}
    for file in files:
        with safetensors.safe_open(file, framework="pt") as opened:
            weight_map |= dict.fromkeys(opened.keys(), file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_nextn_predict_layers": 1}))
    return theirs, further


@pytest.mark.parametrize("family", FAMILIES)
def test_predictions_are_theirs_and_are_exported_under_the_same_names(
    family: str, tmp_path: Path
) -> None:
    theirs, further = make_folder(family, tmp_path)
    imported = import_hf(tmp_path, seq_length=16)
    tokens = torch.randint(0, 260, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = Microbatch(tokens=tokens, labels=None, sample_ids=torch.arange(2), step=0)
    ours = imported.chunk.train()._hidden(None, batch)
    main, predicted = (half.transpose(0, 1) for half in ours.chunk(2))
    expected = theirs.model(input_ids=tokens, use_cache=False).last_hidden_state
    torch.testing.assert_close(main, expected, rtol=1e-5, atol=1e-5)
    positions = torch.arange(16)[None]
    expected = further.forward_layer(
        0, expected, positions, None, input_ids=ahead(tokens, 1, fill=0)
    )
    torch.testing.assert_close(predicted, expected, rtol=1e-5, atol=1e-5)

    infos = {info.name: value for info, value in imported.chunk.param_infos()}
    infos |= {info.name: value for info, value in imported.chunk.buffer_infos()}
    kind = config_to_hf(imported.model, imported.moe)["model_type"]
    tensors = HFTensors(kind, imported.model, imported.moe, dtype=torch.float32)
    exported = {
        spec.name: value
        for spec, value in tensors.whole(lambda name, first, last, _: infos[name][first:last])
    }
    files = TensorFiles(tmp_path)
    assert exported.keys() == set(files.keys())
    assert all(torch.equal(exported[name], files[name]) for name in exported)


def test_missing_layers_and_other_embeddings_are_refused(tmp_path: Path) -> None:
    make_folder("deepseek-v3", tmp_path)
    tensors = safetensors.load_file(tmp_path / "mtp.safetensors")
    changed = {**tensors, "model.layers.3.embed_tokens.weight": torch.zeros(260, 32)}
    safetensors.save_file(changed, tmp_path / "mtp.safetensors")
    with pytest.raises(MegacoreError, match=r"layers\.3\.embed_tokens\.weight differs from model"):
        import_hf(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").rename(tmp_path / "main.safetensors")
    tensors.pop("model.layers.3.hnorm.weight")
    safetensors.save_file(tensors, tmp_path / "mtp.safetensors")
    with pytest.raises(MegacoreError, match=r"there is no tensor model\.layers\.3\.hnorm\.weight"):
        import_hf(tmp_path)


@pytest.mark.parametrize("name", ["deepseek-v3", "glm4-moe"])
def test_layers_that_transformers_counts_but_does_not_save_are_left_out(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs = save_theirs(name, tmp_path / "theirs", num_nextn_predict_layers=1)
    config = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert config["num_nextn_predict_layers"] == 1
    imported = import_hf(tmp_path / "theirs", seq_length=16)
    assert imported.model.num_mtp_layers == 0
    tokens = torch.randint(0, 260, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = Microbatch(tokens=tokens, labels=None, sample_ids=torch.arange(2), step=0)
    logits = imported.chunk.eval().logits(None, batch)
    expected = theirs(input_ids=tokens).logits.detach()
    torch.testing.assert_close(logits, expected, rtol=1e-5, atol=1e-5)

    capsys.readouterr()
    assert main(["import-hf", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    said = capsys.readouterr().out
    assert "parameters, 3 layers (without 1 for multi-token prediction), sequence" in said
    assert said.count("note: imported without 1 layer for multi-token prediction, which num_") == 1
    # The export counts what it has.
    assert main(["export-hf", str(tmp_path / "ours"), str(tmp_path / "back")]) == 0
    back = json.loads((tmp_path / "back" / "config.json").read_text())
    assert back == {**config, "num_nextn_predict_layers": 0}
