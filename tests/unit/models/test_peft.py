"""Adapters in the files of PEFT, against PEFT and `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.parallel import ProcessGroups
from megacore.parallel.batch import Microbatch
from megatrain.checkpoint import StoredWeights, load_full_weights
from megatrain.config import LoraConfig, config_from_values
from megatrain.generation.restore import restore_model
from megatrain.hf import import_hf
from megatrain.hf.export_adapter import export_adapter
from megatrain.hf.export_checkpoint import export_checkpoint
from megatrain.hf.import_adapter import import_adapter
from megatrain.hf.merged_weights import open_base
from megatrain.models.gpt import GPTChunk
from tests.support.campaigns import representatives
from tests.support.hf_models import MODELS, save_theirs
from tests.support.lora_runs import save_lora_run

safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")

# The class of Kimi K2 that the tests make joins experts, unlike that of its publisher. The dynamic
# rotation of `transformers` depends on the length of the text.
NAMES = [name for name in MODELS if name not in ("kimi-k2", "llama, dynamic")]
MAIN = ("llama", "qwen3-moe", "deepseek-v3")
EACH = representatives({name: MODELS[name] for name in NAMES}, dict.fromkeys(MAIN))
TOKENS = torch.randint(0, 260, (2, 24), generator=torch.Generator().manual_seed(5))
WEIGHTS = "adapter_model.safetensors"
SECTIONS: dict[str, dict[str, Any]] = {
    "plain": {"rank": 3, "alpha": 4.0},
    "parts, rs": {
        "rank": 2,
        "rs": True,
        "targets": ["q", "q_up", "layers.1.mlp.gate", "shared.down", "experts.up"],
    },
    "norms of rows": {"rank": 2, "alpha": 3.0, "dora": True, "targets": ["attention.*"]},
    "whole modules": {
        "rank": 2,
        "alpha": 5.0,
        "targets": ["attention.*"],
        "modules_to_save": ["embedding", "head", "layers.1.*norm*", "router*"],
    },
}


def their_logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS).logits


def our_logits(path: Path) -> Tensor:
    """Logits of the merged weights of a run."""
    return logits_of(restore_model(path).model)


def adapted_logits(path: Path) -> Tensor:
    """Logits of the model that trains: frozen weights, and adapters beside them."""
    with StoredWeights(path) as stored:
        config = config_from_values(stored.config, source=str(path))
        model = GPTChunk(
            config.model,
            layers=range(config.model.num_layers),
            has_embedding=True,
            has_head=True,
            groups=ProcessGroups.single(),
            moe=config.moe,
            lora=config.lora,
            initialize=False,
        )
        base, own = open_base(stored), stored.names()
        with torch.no_grad():
            for info, values in (*model.param_infos(), *model.buffer_infos()):
                source = stored if info.name in own else base
                values.copy_(source.read_param(info.name))
    return logits_of(model)


def logits_of(model: GPTChunk) -> Tensor:
    model.eval()
    batch = Microbatch(tokens=TOKENS, labels=TOKENS, sample_ids=torch.arange(len(TOKENS)), step=0)
    with torch.no_grad():
        return model.logits(None, batch)


def with_peft(base: Path, adapter: Path, dtype: torch.dtype = torch.float32) -> Any:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=dtype)
    return peft.PeftModel.from_pretrained(theirs, adapter).eval()


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., dict[str, Tensor]]:
    """Saves a base, and a run of adapters; returns the run's parameters."""

    def make(name: str, dtype: torch.dtype = torch.float32, **lora: Any) -> dict[str, Tensor]:
        save_theirs(name, tmp_path / "base", dtype)
        return save_lora_run(tmp_path / "base", tmp_path / "run", **lora)

    return make


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", EACH)
@pytest.mark.filterwarnings("ignore")
def test_peft_has_our_logits(
    name: str, section: str, tmp_path: Path, make_run: Callable[..., dict[str, Tensor]]
) -> None:
    make_run(name, **SECTIONS[section])
    export_adapter(tmp_path / "run", tmp_path / "adapter")
    found = their_logits(with_peft(tmp_path / "base", tmp_path / "adapter"))
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()
    if name in MAIN:
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "adapter").eval()
        assert torch.equal(their_logits(loaded), found)
    alone = their_logits(base)
    assert (found - alone).abs().max() > 0.1
    # The rounding of float32, of which adapters add none: the base alone is as near.
    pairs = {
        "base": (logits_of(import_hf(tmp_path / "base").chunk), alone),
        "merged": (our_logits(tmp_path / "run"), found),
        "adapted": (adapted_logits(tmp_path / "run"), found),
    }
    for which, (ours, theirs) in pairs.items():
        assert (ours - theirs).abs().max() < 1e-5 * theirs.abs().max(), which


@pytest.mark.parametrize("name", EACH)
@pytest.mark.filterwarnings("ignore")
def test_each_tensor_changes_the_logits_of_peft(
    name: str, tmp_path: Path, make_run: Callable[..., dict[str, Tensor]]
) -> None:
    make_run(name, **SECTIONS["plain"])
    export_adapter(tmp_path / "run", tmp_path / "adapter")
    model = with_peft(tmp_path / "base", tmp_path / "adapter")
    expected = their_logits(model)
    tensors = safetensors.load_file(tmp_path / "adapter" / WEIGHTS)
    for key, tensor in tensors.items():
        changed = {**tensors, key: 0.3 - 1.5 * tensor}
        peft.set_peft_model_state_dict(model, changed)
        assert not torch.equal(their_logits(model), expected), key
    peft.set_peft_model_state_dict(model, tensors)
    assert torch.equal(their_logits(model), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAIN)
@pytest.mark.filterwarnings("ignore")
def test_peft_merges_to_our_weights(
    name: str, dtype: torch.dtype, tmp_path: Path, make_run: Callable[..., dict[str, Tensor]]
) -> None:
    make_run(name, dtype, **SECTIONS["plain"])
    export_adapter(tmp_path / "run", tmp_path / "adapter")
    export_checkpoint(tmp_path / "run", tmp_path / "merged", merged=True)
    merged = with_peft(tmp_path / "base", tmp_path / "adapter", dtype).merge_and_unload()
    merged.save_pretrained(tmp_path / "theirs")
    theirs = safetensors.load_file(tmp_path / "theirs" / "model.safetensors")
    ours = safetensors.load_file(tmp_path / "merged" / "model.safetensors")
    base = safetensors.load_file(tmp_path / "base" / "model.safetensors")
    assert ours.keys() == theirs.keys() == base.keys()
    changed = 0
    for key, tensor in ours.items():
        assert tensor.dtype == theirs[key].dtype == base[key].dtype, key
        changed += not torch.equal(tensor, base[key])
        if dtype == torch.bfloat16 and name != "llama" and ".mlp." in key:
            # PEFT rounds the product of parameters first, then the sum.
            torch.testing.assert_close(tensor, theirs[key], rtol=2**-7, atol=2**-9)
        else:
            assert torch.equal(tensor, theirs[key]), key
    assert changed == sum(".weight" in key and "proj" in key for key in base)


@pytest.mark.parametrize("section", SECTIONS)
@pytest.mark.parametrize("name", representatives(MODELS, dict.fromkeys(MAIN)))
def test_an_exported_adapter_comes_back(
    name: str, section: str, tmp_path: Path, make_run: Callable[..., dict[str, Tensor]]
) -> None:
    values = make_run(name, **SECTIONS[section])
    first = export_adapter(tmp_path / "run", tmp_path / "adapter")
    done = import_adapter(tmp_path / "adapter", tmp_path / "again")
    _, found = load_full_weights(tmp_path / "again")
    assert found.keys() == values.keys()
    for key, value in values.items():
        assert torch.equal(found[key], value), key
    second = export_adapter(tmp_path / "again", tmp_path / "second")
    assert second.config == first.config
    files = [(tmp_path / each / WEIGHTS).read_bytes() for each in ("adapter", "second")]
    assert files[0] == files[1]
    section_of_run = LoraConfig.model_validate(SECTIONS[section])
    assert done.config.lora.scale == pytest.approx(section_of_run.scale, rel=1e-15)


@pytest.mark.parametrize("name", ["mixtral", "qwen3-moe", "deepseek-v3", "gpt-oss"])
@pytest.mark.filterwarnings("ignore")
def test_joined_experts_of_transformers_5(
    name: str, tmp_path: Path, make_run: Callable[..., dict[str, Tensor]]
) -> None:
    values = make_run(name, **SECTIONS["plain"])
    export_adapter(tmp_path / "run", tmp_path / "adapter")
    with_peft(tmp_path / "base", tmp_path / "adapter").save_pretrained(tmp_path / "saved")
    tensors = safetensors.load_file(tmp_path / "saved" / WEIGHTS)
    assert any("experts.base_layer.lora_A" in key for key in tensors)
    import_adapter(tmp_path / "saved", tmp_path / "again", base=tmp_path / "base")
    _, found = load_full_weights(tmp_path / "again")
    assert found.keys() == values.keys()
    for key, value in values.items():
        assert torch.equal(found[key], value), key


def trained_by_peft(base: Path, folder: Path, **settings: Any) -> Any:
    """An adapter that PEFT made, with random factors."""
    torch.manual_seed(1)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **settings)
    model = peft.get_peft_model(theirs, config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_" in key:
                parameter.normal_(0.0, 0.2)
    model.save_pretrained(folder)
    return model


PEFT_SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "ends of names": ("llama", {"r": 4, "target_modules": ["q_proj", "mlp.down_proj"]}),
    "regular expression": (
        "qwen2",
        {"r": 4, "lora_alpha": 6, "target_modules": r".*layers\.[02]\.self_attn\.[qv]_proj"},
    ),
    "all-linear": ("llama", {"r": 2, "use_rslora": True, "target_modules": "all-linear"}),
    "layers": ("llama", {"target_modules": ["v_proj"], "layers_to_transform": [0, 2]}),
    "patterns": (
        "llama",
        {
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "k_proj", "up_proj"],
            "rank_pattern": {"k_proj": 2, "layers.1.mlp.up_proj": 6},
            "alpha_pattern": {"q_proj": 3},
        },
    ),
    "excluded": ("llama", {"target_modules": ["q_proj"], "exclude_modules": r".*\.1\..*"}),
    "fused modules": ("phi3", {"r": 4, "target_modules": ["qkv_proj", "gate_up_proj"]}),
    "latent attention": ("deepseek-v3", {"target_modules": ["q_b_proj", "kv_a_proj_with_mqa"]}),
    "joined experts": (
        "qwen3-moe",
        {
            "r": 3,
            "target_modules": ["q_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
        },
    ),
    "one parameter of experts": (
        "qwen3-moe",
        {"r": 3, "target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj"]},
    ),
    "a dense MLP beside experts": (
        "deepseek-v3",
        {"r": 3, "target_modules": [], "target_parameters": ["layers.0.mlp.gate_proj.weight"]},
    ),
    "embedding and head": (
        "llama",
        {"r": 3, "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens", "lm_head"]},
    ),
}


@pytest.mark.parametrize("case", PEFT_SETTINGS)
@pytest.mark.filterwarnings("ignore")
def test_adapters_of_peft_have_its_logits(case: str, tmp_path: Path) -> None:
    name, settings = PEFT_SETTINGS[case]
    base, folder = tmp_path / "base", tmp_path / "adapter"
    save_theirs(name, base)
    model = trained_by_peft(base, folder, **settings)
    import_adapter(folder, tmp_path / "run")
    torch.testing.assert_close(
        our_logits(tmp_path / "run"), their_logits(model), rtol=1e-5, atol=1e-4
    )
    # and back
    export_adapter(tmp_path / "run", tmp_path / "exported")
    again = their_logits(with_peft(base, tmp_path / "exported"))
    torch.testing.assert_close(again, their_logits(model), rtol=1e-5, atol=1e-4)


def test_configuration_for_peft(tmp_path: Path, make_run: Callable[..., dict[str, Tensor]]) -> None:
    make_run("deepseek-v3", rank=32, modules_to_save=["head"])
    done = export_adapter(tmp_path / "run", tmp_path / "adapter", base="org/model")
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text()) == done.config
    assert done.config["base_model_name_or_path"] == "org/model"
    assert done.config["modules_to_save"] == ["lm_head"]
    assert done.config["rank_pattern"] == {"gate_up_proj": 64}
    assert done.config["target_modules"] == [
        "kv_a_proj_with_mqa",
        "kv_b_proj",
        "o_proj",
        "q_a_proj",
        "q_b_proj",
    ]
    assert "vLLM refuses modules that are saved whole" in done.warnings[0]
    assert "--max-lora-rank 64" in done.warnings[1]
