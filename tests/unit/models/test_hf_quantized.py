"""Quantized folders: values of transformers, bit for bit, whole and in parts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from megacore.errors import MegacoreError
from megacore.parallel.params import ShardPosition, shard
from megatrain import hf_folder
from megatrain import hf_quantized as module
from megatrain.checkpoint import load_full_weights
from megatrain.hf import HFWeights, import_hf, sections_from_hf
from megatrain.hf.import_checkpoint import import_checkpoint
from megatrain.hf.import_hf import open_folder
from megatrain.hf_quantized import mxfp4_values, open_tensors, quantization_of
from tests.support.hf_quantized import save_fp8, save_mxfp4

transformers = pytest.importorskip("transformers")
FOLDERS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("qwen3", {}),
    "qwen3, scales in bfloat16": ("qwen3", {"scales": torch.bfloat16}),
    "qwen3, powers of two": ("qwen3", {"scales": torch.float8_e8m0fnu}),
    "qwen3, exponents": ("qwen3", {"scales": torch.uint8}),
    # Rotated in pairs side by side; weights with smaller last blocks.
    "deepseek-v3": ("deepseek-v3", {}),
    "gpt-oss": ("gpt-oss", {}),
}


def save_quantized(name: str, folder: Path) -> dict[str, Tensor]:
    model, options = FOLDERS[name]
    if model == "gpt-oss":
        return save_mxfp4(folder, **options)
    return save_fp8(model, folder, **options)


def same_bits(found: Tensor, wanted: Tensor) -> bool:
    return found.dtype == wanted.dtype and torch.equal(
        found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)
    )


def dequantized(wanted: dict[str, Tensor], folder: Path) -> HFWeights:
    """The parameters of the same model with tensors of transformers."""
    config = open_folder(folder).config
    return HFWeights(wanted, config, *sections_from_hf(config))


@pytest.mark.parametrize("name", FOLDERS)
def test_tensors_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    wanted = save_quantized(name, tmp_path)
    found = open_folder(tmp_path).files
    assert set(found.keys()) == wanted.keys()
    assert all(key in found for key in wanted)
    stored = load_file(tmp_path / "model.safetensors").keys()
    assert not any(key in found for key in stored - wanted.keys())
    for key, value in wanted.items():
        assert found.shape(key) == value.shape
        assert found.dtype_of(key) == value.dtype
        assert same_bits(found[key], value), key


@pytest.mark.parametrize("name", FOLDERS)
@pytest.mark.parametrize("block_bytes", [1, 1000, 1 << 24])
def test_parts_and_elements_are_those_of_the_whole(
    name: str, block_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "BLOCK_BYTES", block_bytes)
    wanted = save_quantized(name, tmp_path)
    found = open_folder(tmp_path).files
    for key, value in wanted.items():
        ranges = {dim: (size // 3, size - size // 4) for dim, size in enumerate(value.shape)}
        part = value[tuple(slice(*ends) for ends in ranges.values())]
        assert same_bits(found.part(key, ranges), part), key
        into = torch.empty(*part.shape[::-1], dtype=torch.float32).permute(*range(part.dim())[::-1])
        assert torch.equal(found.part(key, ranges, into=into), part.float())
        flat, first = value.flatten(), value.numel() // 3
        some = torch.empty(value.numel() // 2, dtype=value.dtype)
        found.elements(key, first, some)
        assert same_bits(some, flat[first : first + len(some)]), key


@pytest.mark.parametrize("name", FOLDERS)
def test_an_import_has_the_values_of_transformers_in_bfloat16(name: str, tmp_path: Path) -> None:
    wanted = save_quantized(name, tmp_path / "theirs")
    expected = dequantized(wanted, tmp_path / "theirs")
    done = import_checkpoint(tmp_path / "theirs", tmp_path / "ours")
    assert done.config.train.dtype == "bfloat16"
    stored = load_file(tmp_path / "theirs" / "model.safetensors").keys()
    number = sum(key.endswith(("_scale_inv", "_scales")) for key in stored)
    method = "mxfp4" if name == "gpt-oss" else "fp8"
    assert f"{number} tensors in {method} were read as bfloat16" in done.notes
    _, found = load_full_weights(tmp_path / "ours")
    assert found.keys() == expected.infos.keys()
    for key, value in found.items():
        assert torch.equal(value.float(), expected[key].float()), key


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "gpt-oss"])
def test_shards_of_ranks_are_those_of_the_whole(name: str, tmp_path: Path) -> None:
    expected = dequantized(save_quantized(name, tmp_path), tmp_path)
    opened = open_folder(tmp_path)
    found = HFWeights(opened.files, opened.config, *sections_from_hf(opened.config))
    for key, info in expected.infos.items():
        for at in range(2):
            position = ShardPosition(tp_position=at, tp_size=2)
            if info.expert:
                position = ShardPosition(tp_position=at, tp_size=2, ep_position=1 - at, ep_size=2)
            wanted = shard(expected[key], info, **vars(position))
            assert torch.equal(found.shard(key, position), wanted), key


def test_a_shard_reads_its_blocks_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_bytes: list[int] = []
    read_bytes = hf_folder._read_bytes

    def counting(path: Path, begin: int, into: Tensor) -> None:
        num_bytes.append(into.nbytes)
        read_bytes(path, begin, into)

    def read_of(name: str, position: ShardPosition, folder: Path) -> int:
        opened = open_folder(folder)
        weights = HFWeights(opened.files, opened.config, *sections_from_hf(opened.config))
        num_bytes.clear()
        weights.shard(name, position)
        return sum(num_bytes)

    for name in ("qwen3", "gpt-oss"):
        (tmp_path / name).mkdir()
        save_quantized(name, tmp_path / name)
    monkeypatch.setattr(hf_folder, "_read_bytes", counting)
    # Half of the rows of gate and up, (48, 32) each, and all of their scales.
    half = ShardPosition(tp_position=1, tp_size=2)
    read = read_of("layers.1.mlp.gate_up", half, tmp_path / "qwen3")
    assert read == 2 * (24 * 32 + 4 * 6 * 2)
    # One expert of four: 192 outputs of two groups, 16 bytes and a scale each.
    one = ShardPosition(ep_position=2, ep_size=4)
    assert read_of("layers.1.moe.experts.fc1", one, tmp_path / "gpt-oss") == 192 * 2 * 17


@pytest.mark.parametrize("name", ["qwen3", "gpt-oss"])
def test_logits_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    from megacore.parallel.batch import Microbatch

    wanted = save_quantized(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["quantization_config"]
    theirs = transformers.AutoModelForCausalLM.from_config(
        transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config), dtype=torch.float32
    ).eval()
    theirs.load_state_dict(wanted)
    tokens = torch.randint(0, 260, (2, 16), generator=torch.Generator().manual_seed(1))
    batch = Microbatch(tokens=tokens, labels=None, sample_ids=torch.arange(2), step=0)
    with torch.no_grad():
        found = import_hf(tmp_path, seq_length=16).chunk.eval().logits(None, batch)
        expected = theirs(input_ids=tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def test_all_bytes_and_scales_of_mxfp4() -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    every = torch.arange(256, dtype=torch.uint8)
    blocks = every.view(1, 1, 16, 16).expand(1, 256, 16, 16).contiguous()
    scales = every.view(1, 256, 1).expand(1, 256, 16).contiguous()
    wanted = convert_moe_packed_tensors(blocks, scales).transpose(1, 2)
    assert same_bits(mxfp4_values(blocks, scales), wanted)


@given(exponent=st.integers(-60, 60), mantissa=st.floats(1.0, 2.0, width=32))
def test_all_bytes_of_fp8_with_any_scale(
    exponent: int, mantissa: float, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    folder = tmp_path_factory.mktemp("fp8")
    weight = torch.arange(256, dtype=torch.uint8).view(16, 16).view(torch.float8_e4m3fn)
    scale = torch.tensor([[mantissa * 2.0**exponent]])
    save_file({"a": weight, "a_scale_inv": scale}, folder / "model.safetensors")
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": None}}
    found = open_tensors(folder, config)["a"]
    assert same_bits(found, Fp8Dequantize(None)._dequantize_one(weight, scale, torch.bfloat16))


@pytest.mark.parametrize(
    "method", ["awq", "gptq", "bitsandbytes", "compressed-tensors", "modelopt"]
)
def test_other_methods_are_refused_by_name(method: str) -> None:
    with pytest.raises(
        MegacoreError, match=rf"must have quant_method fp8 or mxfp4, got '{method}'"
    ):
        quantization_of({"quantization_config": {"quant_method": method, "bits": 4}})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fmt": "e5m2"}, r"fmt .* must be 'e4m3', got 'e5m2'"),
        ({"weight_block_size": [128]}, r"weight_block_size .* two positive integers, got \[128\]"),
        ({"weight_block_size": [128, 0]}, r"two positive integers, got \[128, 0\]"),
    ],
)
def test_invalid_settings_of_fp8_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(MegacoreError, match=message):
        quantization_of({"quantization_config": {"quant_method": "fp8", **changes}})


def test_tensors_that_contradict_the_format_are_refused(tmp_path: Path) -> None:
    save_fp8("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = "model.layers.0.mlp.up_proj.weight"
    scale = tensors.pop(f"{name}_scale_inv")
    save_file(tensors, file)
    with pytest.raises(MegacoreError, match=rf"{name} has the dtype float8_e4m3fn, but no scales"):
        import_hf(tmp_path)
    save_file({**tensors, f"{name}_scale_inv": scale[:-1]}, file)
    with pytest.raises(MegacoreError, match=rf"{name}_scale_inv must have shape \(6, 2\)"):
        import_hf(tmp_path)
    save_file({**tensors, name: tensors[name].float(), f"{name}_scale_inv": scale}, file)
    with pytest.raises(MegacoreError, match=rf"{name} with .* must be a float8_e4m3fn matrix"):
        import_hf(tmp_path)
    other = {key.replace("_scale_inv", "_scale"): value for key, value in tensors.items()}
    save_file(other, file)
    with pytest.raises(MegacoreError, match=r"no scales of quant_method fp8 beside it; save"):
        import_hf(tmp_path)
    set_quantization(tmp_path, {"quant_method": "mxfp4"})
    with pytest.raises(MegacoreError, match=r"no scales of quant_method mxfp4 beside it; save"):
        import_hf(tmp_path)
    set_quantization(tmp_path, None)
    with pytest.raises(MegacoreError, match=r"must have one of the dtypes .* got F8_E4M3; convert"):
        import_hf(tmp_path)


def set_quantization(folder: Path, entry: dict[str, Any] | None) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": entry}
    path.write_text(json.dumps(config))


def test_experts_that_contradict_the_format_are_refused(tmp_path: Path) -> None:
    save_mxfp4(tmp_path)
    file, name = tmp_path / "model.safetensors", "model.layers.0.mlp.experts.down_proj"
    tensors = load_file(file)
    scales = tensors.pop(f"{name}_scales")
    save_file(tensors, file)
    with pytest.raises(MegacoreError, match=rf"no tensor {name}_scales for {name}_blocks; copy"):
        import_hf(tmp_path)
    save_file({**tensors, f"{name}_scales": scales[:, 1:].contiguous()}, file)
    with pytest.raises(MegacoreError, match=rf"{name}_scales must have shape \(4, 64, 3\)"):
        import_hf(tmp_path)
    save_file({**tensors, f"{name}_scales": scales.float()}, file)
    with pytest.raises(MegacoreError, match=rf"{name}_blocks with .* must be MXFP4 of \(E, O, G"):
        import_hf(tmp_path)
    blocks = tensors.pop(f"{name}_blocks")
    save_file({**tensors, f"{name}_scales": scales}, file)
    with pytest.raises(MegacoreError, match=rf"there is no tensor {name}, which the model needs"):
        import_hf(tmp_path)
    smaller = {f"{name}_blocks": blocks[:, 1:], f"{name}_scales": scales[:, 1:]}
    save_file({**tensors, **{key: value.contiguous() for key, value in smaller.items()}}, file)
    with pytest.raises(MegacoreError, match=rf"{name} must have shape \(4, 96, 64\) .* 63\)"):
        import_hf(tmp_path)
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(MegacoreError, match=rf"cannot read {file}: .* not fully covered"):
        import_hf(tmp_path)


def test_weights_in_bfloat16_beside_an_entry_are_read_as_they_are(tmp_path: Path) -> None:
    wanted = save_fp8("qwen3", tmp_path)
    save_file(wanted, tmp_path / "model.safetensors")
    opened = open_folder(tmp_path)
    assert opened.notes == ("0 tensors in fp8 were read as bfloat16",)
    assert all(same_bits(opened.files[key], value) for key, value in wanted.items())


def test_scales_of_activations_are_left_out(tmp_path: Path) -> None:
    wanted = save_fp8("qwen3", tmp_path)
    file = tmp_path / "model.safetensors"
    name = "model.layers.0.mlp.up_proj"
    save_file({**load_file(file), f"{name}.activation_scale": torch.ones(())}, file)
    assert set(open_folder(tmp_path).files.keys()) == wanted.keys()
    import_hf(tmp_path)
