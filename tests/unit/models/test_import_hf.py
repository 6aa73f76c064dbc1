"""Our models against those of ``transformers``, with the same random weights."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megacore.errors import MegacoreError
from megacore.parallel.batch import Microbatch
from megacore.parallel.params import ShardPosition, shard
from megatrain import hf_folder
from megatrain.generation.decoding import Sampling, generate
from megatrain.hf import HFWeights, import_hf, sections_from_hf
from megatrain.hf_folder import TensorFiles
from tests.support.hf_models import EACH, MODELS, make_theirs

safetensors = pytest.importorskip("safetensors.torch")


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_gradients_are_theirs(name: str, tmp_path: Path) -> None:
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path)
    imported = import_hf(tmp_path, seq_length=16)
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
    with torch.no_grad():
        for weight in theirs.parameters():
            weight.copy_(torch.zeros(()) if weight.grad is None else weight.grad)
    theirs.save_pretrained(tmp_path / "gradients")
    files = TensorFiles(tmp_path / "gradients")
    wanted = HFWeights(files, theirs.config.to_dict(), imported.model, imported.moe)
    for info, parameter in ours.param_infos():
        distance = (parameter.grad - wanted[info.name]).norm() / wanted[info.name].norm()
        assert distance < 1e-5, f"{info.name}: {distance}"


@pytest.mark.parametrize("name", EACH)
def test_greedy_tokens_are_theirs(name: str, tmp_path: Path) -> None:
    theirs = make_theirs(name).eval()
    theirs.save_pretrained(tmp_path)
    ours = import_hf(tmp_path).chunk
    prompts = torch.randint(0, 260, (2, 6), generator=torch.Generator().manual_seed(2))
    count = ours.shape.seq_length - 6
    expected = theirs.generate(
        prompts, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
    )
    found = generate(ours, prompts, max_new_tokens=count, sampling=Sampling(temperature=0.0))
    assert torch.equal(found, expected)


@pytest.mark.parametrize("name", EACH)
def test_a_part_is_the_shard_of_the_whole(name: str, tmp_path: Path) -> None:
    theirs = make_theirs(name)
    theirs.save_pretrained(tmp_path)
    config = theirs.config.to_dict()
    sections = sections_from_hf(config)
    tensors = TensorFiles(tmp_path)
    weights = HFWeights(tensors, config, *sections)
    names = tensors.keys()
    in_memory = HFWeights({name: tensors[name] for name in names}, config, *sections)
    for info in weights.infos.values():
        whole = weights[info.name]
        tp, ep = (1 if dim is None else 2 for dim in (info.tp_dim, info.ep_dim))
        if info.name in ("embedding", "head"):
            tp = 4  # the last part is padding only
        for at, ep_at in itertools.product(range(tp), range(ep)):
            position = ShardPosition(tp_position=at, tp_size=tp, ep_position=ep_at, ep_size=ep)
            expected = shard(whole, info, **vars(position))
            assert torch.equal(weights.shard(info.name, position), expected), info.name
            assert torch.equal(in_memory.shard(info.name, position), expected), info.name


def test_only_the_values_of_a_shard_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    theirs = make_theirs("mixtral")
    theirs.save_pretrained(tmp_path)
    config = theirs.config.to_dict()
    weights = HFWeights(TensorFiles(tmp_path), config, *sections_from_hf(config))
    num_bytes: list[int] = []
    read_bytes = hf_folder._read_bytes

    def counting(path: Path, begin: int, into: torch.Tensor) -> None:
        num_bytes.append(into.nbytes)
        read_bytes(path, begin, into)

    monkeypatch.setattr(hf_folder, "_read_bytes", counting)
    for name, position in {
        "layers.1.moe.experts.fc1": ShardPosition(ep_position=1, ep_size=2),
        "layers.1.moe.experts.fc2": ShardPosition(ep_position=1, ep_size=4),
        "layers.1.attention.qkv": ShardPosition(tp_position=1, tp_size=2),
        "embedding": ShardPosition(tp_position=0, tp_size=2),
    }.items():
        part = weights.shard(name, position)
        assert sum(num_bytes) == part.nbytes, name
        num_bytes.clear()


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
    config = theirs.config.to_dict()
    first, second = (HFWeights(t, config, *sections_from_hf(config)) for t in (joined, single))
    assert all(torch.equal(first[name], second[name]) for name in first.infos)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "falcon"}, r"must be one of llama, .* to be imported, got 'falcon'"),
        ({"attention_bias": True}, r"attention_bias in .* mixtral model must be False, got True"),
        (
            {"quantization_config": {"bits": 4}},
            r"fp8 or mxfp4, got \{'bits': 4\}; save .* dequantized",
        ),
        ({"head_dim": 3}, r"invalid model: ModelConfig: head_dim must be a multiple of 2, got 3"),
    ],
)
def test_what_is_missing_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    config = {**make_theirs("mixtral").config.to_dict(), **changes}
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    with pytest.raises(MegacoreError, match=message):
        import_hf(tmp_path)


def test_tensors_without_a_place_are_refused() -> None:
    theirs = make_theirs("llama")
    config = theirs.config.to_dict()
    sections = sections_from_hf(config)
    tensors = theirs.state_dict()
    with pytest.raises(MegacoreError, match=r"1 tensor has no place in a llama model .*: extra"):
        HFWeights({**tensors, "extra": torch.zeros(1)}, config, *sections)
    wrong = {**tensors, "model.norm.weight": torch.zeros(31)}
    with pytest.raises(MegacoreError, match=r"norm\.weight must have shape \(32,\) .* got \(31,\)"):
        HFWeights(wrong, config, *sections)["final_norm"]
    del tensors["model.norm.weight"]
    with pytest.raises(MegacoreError, match=r"no tensor model.norm.weight"):
        HFWeights(tensors, config, *sections)


def test_quantized_experts_without_an_entry_are_refused_with_the_remedy() -> None:
    theirs = make_theirs("gpt-oss")
    tensors, config = dict(theirs.state_dict()), theirs.config.to_dict()
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors[f"{name}_blocks"] = tensors.pop(name)
    with pytest.raises(MegacoreError, match=rf"no tensor {name}, .* MXFP4, .* quant_method"):
        HFWeights(tensors, config, *sections_from_hf(config))


def test_entries_that_gpt_oss_may_leave_out_have_its_defaults() -> None:
    config = make_theirs("gpt-oss").config.to_dict()
    expected = sections_from_hf({**config, "num_hidden_layers": 4, "layer_types": None})[0]
    assert [expected.window_of(layer) for layer in range(4)] == [5, None, 5, None]
    del config["rope_parameters"]
    model, _ = sections_from_hf(config)
    assert (model.rope_base, model.rope_scaling.factor) == (150000.0, 32.0)
    assert not model.rope_scaling.truncate


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_both_descriptions_of_the_rotation_count(name: str) -> None:
    config = make_theirs("llama").config.to_dict()
    del config["rope_parameters"]
    for kind in ("type", "rope_type"):
        described = {**config, name: {kind: "default", "rope_theta": 500.0}, "rope_theta": 70.0}
        assert sections_from_hf(described)[0].rope_base == 500.0
    assert sections_from_hf({**config, name: None, "rope_theta": 70.0})[0].rope_base == 70.0
    with pytest.raises(MegacoreError, match=rf"{name} in .* an object or null, got \['linear'\]"):
        sections_from_hf({**config, name: ["linear"]})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": None}, r"config\.json has no vocab_size, which a qwen3_moe model needs"),
        ({"num_attention_heads": ...}, r"config\.json has no num_attention_heads"),
        ({"moe_intermediate_size": ...}, r"config\.json has no moe_intermediate_size"),
        (
            {"num_experts": ..., "num_local_experts": ...},
            r"config\.json has no num_experts or num_local_experts",
        ),
        ({"hidden_size": "32"}, r"hidden_size in .* must be a positive integer, got '32'"),
        ({"num_attention_heads": 0}, r"num_attention_heads in .* positive integer, got 0"),
        ({"decoder_sparse_step": -1}, r"decoder_sparse_step in .* positive integer, got -1"),
        ({"norm_topk_prob": "yes"}, r"norm_topk_prob in .* must be true or false, got 'yes'"),
        ({"mlp_only_layers": "0"}, r"mlp_only_layers in .* must be a list of layers, got '0'"),
        ({"rope_parameters": {"rope_type": []}}, r"rope_type in .* must be one of .*, got \[\]"),
    ],
)
def test_a_size_that_is_missing_or_no_size_is_named(changes: dict[str, Any], message: str) -> None:
    config = {**make_theirs("qwen3-moe").config.to_dict(), **changes}
    config = {key: value for key, value in config.items() if value is not ...}
    with pytest.raises(MegacoreError, match=message):
        sections_from_hf(config)


def test_a_configuration_that_is_no_object_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(MegacoreError, match=r"config\.json must hold an object, .* got a list"):
        import_hf(tmp_path)


def test_a_tied_head_must_be_the_embedding() -> None:
    theirs = make_theirs("llama")
    config = {**theirs.config.to_dict(), "tie_word_embeddings": True}
    sections, tensors = sections_from_hf(config), dict(theirs.state_dict())
    with pytest.raises(
        MegacoreError, match=r"is true, but lm_head\.weight differs from model\.emb"
    ):
        HFWeights(tensors, config, *sections)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    assert "head" not in HFWeights(tensors, config, *sections).infos


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
        ("../x.safetensors", r"'\.\./x\.safetensors', which is not the name of a file beside it"),
        (7, r"in 7, which is not the name of a file beside it"),
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
