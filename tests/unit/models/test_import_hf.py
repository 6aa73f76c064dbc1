"""Our models against those of ``transformers``, with the same random weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import MegacoreError
from megacore.models.import_hf import import_hf, sections_from_hf, weights_from_hf
from megacore.parallel.batch import Microbatch

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 70,
    "max_position_embeddings": 32,
    # Large weights, so that every part matters to the loss.
    "initializer_range": 0.2,
}
MIXTRAL = {"intermediate_size": 24, "num_local_experts": 4, "num_experts_per_tok": 2}
QWEN3_MOE = {
    "intermediate_size": 48,
    "moe_intermediate_size": 20,
    "head_dim": 16,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "norm_topk_prob": True,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", MIXTRAL),
    "mixtral, other rotation": (
        "Mixtral",
        {**MIXTRAL, "rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
    ),
    "qwen3-moe": ("Qwen3Moe", QWEN3_MOE),
    "qwen3-moe not normalized, tied": (
        "Qwen3Moe",
        {**QWEN3_MOE, "norm_topk_prob": False, "tie_word_embeddings": True},
    ),
    "qwen3-moe, every second layer": ("Qwen3Moe", {**QWEN3_MOE, "decoder_sparse_step": 2}),
    "qwen3-moe, first layer dense": ("Qwen3Moe", {**QWEN3_MOE, "mlp_only_layers": [0]}),
    "llama": ("Llama", {"intermediate_size": 48}),
    "qwen3": ("Qwen3", {"intermediate_size": 48, "head_dim": 12}),
}


def make_theirs(name: str) -> Any:
    torch.manual_seed(3)
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:  # norms start as ones, which would hide their place
                parameter.uniform_(0.5, 1.5)
    return model


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_theirs(name: str, tmp_path: Path) -> None:
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path)
    imported = import_hf(tmp_path)
    ours = imported.chunk
    tokens = torch.randint(0, 70, (2, 17), generator=torch.Generator().manual_seed(1))
    batch = Microbatch(
        tokens=tokens[:, :-1], labels=tokens[:, 1:], sample_ids=torch.arange(2), step=0
    )
    expected = theirs(input_ids=batch.tokens).logits
    ours.eval()
    torch.testing.assert_close(ours.logits(None, batch), expected.detach(), rtol=1e-5, atol=1e-5)
    torch.nn.functional.cross_entropy(expected.flatten(0, 1), batch.labels.flatten()).backward()
    ours(None, batch).backward()
    gradients = {key: weight.grad for key, weight in theirs.named_parameters()}
    wanted = weights_from_hf(gradients, imported.model, imported.moe)
    for info, parameter in ours.param_infos():
        distance = (parameter.grad - wanted[info.name]).norm() / wanted[info.name].norm()
        assert distance < 1e-5, f"{info.name}: {distance}"


def test_experts_may_be_one_tensor_each() -> None:
    theirs = make_theirs("mixtral")
    joined = theirs.state_dict()
    single: dict[str, torch.Tensor] = {}
    for key, value in joined.items():
        if key.endswith("experts.gate_up_proj"):
            prefix = key.removesuffix("mlp.experts.gate_up_proj") + "block_sparse_moe"
            for e in range(4):
                single[f"{prefix}.experts.{e}.w1.weight"] = value[e, :24]
                single[f"{prefix}.experts.{e}.w3.weight"] = value[e, 24:]
        elif key.endswith("experts.down_proj"):
            prefix = key.removesuffix("mlp.experts.down_proj") + "block_sparse_moe"
            for e in range(4):
                single[f"{prefix}.experts.{e}.w2.weight"] = value[e]
        else:
            single[key.replace("mlp.gate.weight", "block_sparse_moe.gate.weight")] = value
    sections = sections_from_hf(theirs.config.to_dict())
    first, second = weights_from_hf(joined, *sections), weights_from_hf(single, *sections)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "'gpt2' cannot be imported; there are llama"),
        ({"sliding_window": 128}, "uses sliding_window, which megacore does not have"),
        ({"rope_scaling": {"rope_type": "yarn"}, "rope_parameters": None}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 4.0}}, "rope_type 'linear'"),
        ({"rope_scaling": {"type": "yarn"}, "rope_parameters": None}, "rope_type 'yarn'"),
        ({"rope_scaling": {"type": "dynamic"}, "rope_parameters": {}}, "rope_type 'dynamic'"),
        ({"rope_parameters": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
        ({"attention_bias": True}, "attention_bias"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {**make_theirs("mixtral").config.to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(MegacoreError, match=message):
        import_hf(tmp_path)


def test_tensors_without_a_place_are_refused() -> None:
    theirs = make_theirs("llama")
    sections = sections_from_hf(theirs.config.to_dict())
    tensors = theirs.state_dict()
    with pytest.raises(MegacoreError, match=r"1 tensors have no place in the model, such as extra"):
        weights_from_hf({**tensors, "extra": torch.zeros(1)}, *sections)
    del tensors["model.norm.weight"]
    with pytest.raises(MegacoreError, match=r"no tensor model.norm.weight"):
        weights_from_hf(tensors, *sections)


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_both_descriptions_of_the_rotation_count(name: str) -> None:
    config = make_theirs("llama").config.to_dict()
    del config["rope_parameters"]
    for kind in ("type", "rope_type"):
        described = {**config, name: {kind: "default", "rope_theta": 500.0}, "rope_theta": 70.0}
        assert sections_from_hf(described)[0].rope_base == 500.0
    assert sections_from_hf({**config, name: None, "rope_theta": 70.0})[0].rope_base == 70.0
    with pytest.raises(MegacoreError, match=rf"{name} = \['linear'\] in config.json is no object"):
        sections_from_hf({**config, name: ["linear"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, r"config\.json has no vocab_size, which a qwen3_moe model needs"),
        ({"num_attention_heads": ...}, r"config\.json has no num_attention_heads"),
        ({"moe_intermediate_size": ...}, r"config\.json has no moe_intermediate_size"),
        (
            {"num_experts": ..., "num_local_experts": ...},
            r"config\.json has no num_local_experts or num_experts",
        ),
        ({"hidden_size": "32"}, r"hidden_size = '32' in config\.json is no positive whole number"),
        ({"num_attention_heads": 0}, r"num_attention_heads = 0 .* the least is 1"),
        ({"decoder_sparse_step": 0}, r"decoder_sparse_step = 0 .* the least is 1"),
    ],
)
def test_a_size_that_is_missing_or_no_size_is_named(changes: dict[str, Any], message: str) -> None:
    config = {**make_theirs("qwen3-moe").config.to_dict(), **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    with pytest.raises(MegacoreError, match=message):
        sections_from_hf(config)


def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(MegacoreError, match=r"config\.json holds a list; expected an object"):
        import_hf(tmp_path)


def test_a_tied_head_must_be_the_embedding() -> None:
    theirs = make_theirs("llama")
    config = {**theirs.config.to_dict(), "tie_word_embeddings": True}
    sections, tensors = sections_from_hf(config), theirs.state_dict()
    with pytest.raises(
        MegacoreError, match=r"is true, but lm_head\.weight differs from model\.emb"
    ):
        weights_from_hf(tensors, *sections)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert "head" not in weights_from_hf(tensors, *sections)


# ---- which files count -------------------------------------------------------------------------


def save_sharded(folder: Path) -> torch.Tensor:
    """A model in two files with an index; its last norm."""
    theirs = make_theirs("llama")
    theirs.save_pretrained(folder, max_shard_size="40KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    norm: torch.Tensor = theirs.model.norm.weight.detach()
    return norm


def imported_norm(folder: Path) -> torch.Tensor:
    named = {info.name: weight for info, weight in import_hf(folder).chunk.param_infos()}
    return named["final_norm"].detach()


def edit_index(folder: Path, changes: dict[str, Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"].update(changes)
    path.write_text(json.dumps(index))


def test_the_files_of_the_index_win_over_others_beside_them(tmp_path: Path) -> None:
    norm = save_sharded(tmp_path)
    safetensors.save_file({"norm": norm}, tmp_path / "consolidated.safetensors")
    assert torch.equal(imported_norm(tmp_path), norm)


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    save_sharded(tmp_path)
    stale = {name: weight + 1.0 for name, weight in make_theirs("llama").state_dict().items()}
    safetensors.save_file(stale, tmp_path / "model.safetensors")
    with pytest.raises(MegacoreError, match=r"holds both model\.safetensors and"):
        import_hf(tmp_path)


def test_an_index_may_name_the_file_of_the_usual_name(tmp_path: Path) -> None:
    theirs = make_theirs("llama")
    theirs.save_pretrained(tmp_path)
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as opened:
        weight_map = dict.fromkeys(opened.keys(), "model.safetensors")
    index = {"weight_map": weight_map}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert torch.equal(imported_norm(tmp_path), theirs.model.norm.weight)


def test_one_file_of_the_usual_name_wins_over_others_beside_it(tmp_path: Path) -> None:
    theirs = make_theirs("llama")
    theirs.save_pretrained(tmp_path)
    safetensors.save_file({"norm": torch.ones(2)}, tmp_path / "consolidated.safetensors")
    assert torch.equal(imported_norm(tmp_path), theirs.model.norm.weight)


def test_files_without_an_index_are_joined_if_no_tensor_occurs_twice(tmp_path: Path) -> None:
    norm = save_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    assert torch.equal(imported_norm(tmp_path), norm)
    safetensors.save_file({"model.norm.weight": norm + 1.0}, tmp_path / "new.safetensors")
    with pytest.raises(MegacoreError, match=r"model\.norm\.weight is in both .* and new\.saf"):
        import_hf(tmp_path)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ("../x.safetensors", r"'\.\./x\.safetensors', which is no name of a file beside it"),
        (7, r"in 7, which is no name of a file beside it"),
        ("gone.safetensors", r"in gone\.safetensors, which does not exist"),
        ("other.safetensors", r"in other\.safetensors, which does not hold it"),
    ],
)
def test_an_index_that_names_wrong_files_is_refused(
    file: Any, message: str, tmp_path: Path
) -> None:
    save_sharded(tmp_path)
    safetensors.save_file({"other": torch.ones(2)}, tmp_path / "other.safetensors")
    edit_index(tmp_path, {"model.norm.weight": file})
    with pytest.raises(MegacoreError, match=message):
        import_hf(tmp_path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": []}', '{"weight_map": {}}'])
def test_an_index_without_a_map_is_refused(text: str, tmp_path: Path) -> None:
    save_sharded(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(MegacoreError, match="has no weight_map"):
        import_hf(tmp_path)
