"""`megacore import-hf` and `export-hf` of adapters, as a user calls them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.cli import main
from megatrain.config import LoraConfig, load_config
from megatrain.hf.peft_config import vllm_warnings
from tests.support.hf_models import save_theirs
from tests.support.lora_runs import save_lora_run

safetensors = pytest.importorskip("safetensors.torch")

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Base, run and adapter of a Llama and of a Qwen3-MoE."""
    folder = tmp_path_factory.mktemp("made")
    for name in ("llama", "qwen3-moe"):
        save_theirs(name, folder / name / "base")
        run = folder / name / "run"
        save_lora_run(folder / name / "base", run, rank=2, alpha=3.0)
        assert main(["export-hf", str(run), str(folder / name / "a"), "--adapter"]) == 0
    return folder


def changed(made: Path, out: Path, entries: dict[str, Any], tensors: dict[str, Any]) -> Path:
    """A copy of an adapter with other entries and tensors; those that are `...` are left out."""
    found = json.loads((made / "a" / CONFIG).read_text()) | entries
    files = safetensors.load_file(made / "a" / WEIGHTS) | tensors
    out.mkdir()
    (out / CONFIG).write_text(json.dumps({k: v for k, v in found.items() if v is not ...}))
    safetensors.save_file({k: v for k, v in files.items() if v is not ...}, out / WEIGHTS)
    return out


ENTRIES: dict[str, tuple[dict[str, Any], str]] = {
    "other kind": ({"peft_type": "LOHA"}, 'peft_type must be "LORA", got "LOHA"'),
    "pissa": (
        {"init_lora_weights": "pissa_niter_4"},
        'init_lora_weights = "pissa_niter_4" is not supported (PEFT changes the base weights',
    ),
    "olora": ({"init_lora_weights": "olora"}, 'init_lora_weights = "olora" is not supported'),
    "biases of adapters": (
        {"lora_bias": True},
        "lora_bias = true is not supported (adapters have biases)",
    ),
    "biases": ({"bias": "all"}, 'bias must be "none", got "all"'),
    "layers": (
        {"layer_replication": [[0, 2]]},
        "layer_replication = [[0, 2]] is not supported (layers of the base are repeated)",
    ),
    "tokens": (
        {"trainable_token_indices": [3]},
        "trainable_token_indices = [3] is not supported (rows of the embedding are trained apart)",
    ),
    "task": ({"task_type": "SEQ_CLS"}, 'task_type must be "CAUSAL_LM", got "SEQ_CLS"'),
    "several": (
        {"bias": "all", "use_qalora": True},
        'use_qalora = true is not supported (inputs are pooled); bias must be "none", got "all"',
    ),
    "unknown": (
        {"warp": 9},
        "unknown entries warp; if they do not change what the adapter computes, add --ignore warp",
    ),
    "rank of zero": ({"r": 0}, "r must be a positive integer, got 0"),
    "no factor": ({"lora_alpha": 0}, "lora_alpha must be a number above 0, got 0"),
    "pattern": ({"rank_pattern": {"(": 2}}, 'rank_pattern has "(", which is not a regular'),
    "names": ({"target_modules": [3]}, "target_modules must be a list of names, got [3]"),
    "other rank": (
        {"r": 3},
        "lora_A.weight must have shape (3, 48) for rank 3 and this base, got (2, 48)",
    ),
    "not selected": (
        {"target_modules": ["k_proj"]},
        "which target_modules and target_parameters in adapter_config.json do not select",
    ),
    "dora": ({"use_dora": True}, "has no lora_magnitude_vector of model.layers."),
    "no folder": (
        {"base_model_name_or_path": "org/base"},
        "base_model_name_or_path is org/base, which is not a folder here; name the Hugging Face "
        "folder of its base with --base FOLDER",
    ),
}
TENSORS: dict[str, tuple[dict[str, Any], str]] = {
    "half an adapter": ({f"{Q}.lora_B.weight": ...}, "has no lora_B of model.layers.0.self_attn.q"),
    "missing": (
        {f"{Q}.lora_A.weight": ..., f"{Q}.lora_B.weight": ...},
        "has no adapter of model.layers.0.self_attn.q_proj, which adapter_config.json selects",
    ),
    "other module": (
        {"base_model.model.model.layers.7.self_attn.q_proj.lora_A.weight": torch.ones(2, 32)},
        "layers.7.self_attn.q_proj.lora_A.weight (the base has no such module)",
    ),
    "head": (
        {"base_model.model.lm_head.lora_A.weight": torch.ones(2, 32)},
        "(adapters of lm_head are not supported; merge them with PEFT, or train that module whole",
    ),
    "embedding": (
        {"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 260)},
        "(adapters of model.embed_tokens are not supported",
    ),
    "norm": (
        {"base_model.model.model.norm.lora_A.weight": torch.ones(2, 32)},
        "(there are no adapters of final_norm)",
    ),
    "prefix": ({"model.norm.weight": torch.ones(32)}, "(the name does not start with base_model."),
    "shape": (
        {f"{Q}.lora_B.weight": torch.ones(40, 2)},
        "q_proj.lora_B.weight must have shape (32, 2) for rank 2 and this base, got (40, 2)",
    ),
    "saved module of another shape": (
        {"base_model.model.lm_head.weight": torch.ones(300, 32)},
        "tensor lm_head.weight must have shape (260, 32)",
    ),
}


def complaint(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    capsys.readouterr()
    assert main([str(each) for each in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


@pytest.mark.parametrize("case", ENTRIES)
def test_entries_that_change_the_meaning_are_refused(
    case: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    entries, expected = ENTRIES[case]
    folder = changed(made / "llama", tmp_path / "adapter", entries, {})
    assert expected in complaint(capsys, "import-hf", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("case", TENSORS)
def test_tensors_that_do_not_fit_are_refused(
    case: str, made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors, expected = TENSORS[case]
    folder = changed(made / "llama", tmp_path / "adapter", {}, tensors)
    assert expected in complaint(capsys, "import-hf", folder, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_unknown_entries_can_be_ignored(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, out = changed(made / "llama", tmp_path / "adapter", {"warp": 9}, {}), tmp_path / "out"
    said = complaint(capsys, "import-hf", folder, out, "--ignore=r")
    assert "that does not change what the adapter computes, got r; change it" in said
    said = complaint(capsys, "import-hf", folder, out, "--ignore=woof")
    assert "must name an entry of adapter_config.json, got woof, which it does not have" in said
    assert main(["import-hf", str(folder), str(out), "--ignore=warp"]) == 0


def test_experts_have_adapters_in_one_form_or_none(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = made / "qwen3-moe"
    expert = "base_model.model.model.layers.1.mlp.experts"
    gone = {f"{expert}.4.up_proj.lora_{each}.weight": ... for each in "AB"}
    adapter = changed(folder, tmp_path / "gone", {}, gone)
    said = complaint(capsys, "import-hf", adapter, tmp_path / "out")
    assert "has no adapter of model.layers.1.mlp.experts.4.up_proj, but those of other" in said
    both = {
        f"{expert}.lora_A.weight": torch.ones(12, 20),
        f"{expert}.lora_B.weight": torch.ones(32, 12),
    }
    adapter = changed(folder, tmp_path / "both", {}, both)
    said = complaint(capsys, "import-hf", adapter, tmp_path / "out")
    assert "has adapters both of" in said
    assert "which are the same; keep one form" in said
    router = {"base_model.model.model.layers.1.mlp.gate.lora_A.weight": torch.ones(2, 32)}
    adapter = changed(folder, tmp_path / "router", {}, router)
    said = complaint(capsys, "import-hf", adapter, tmp_path / "out")
    assert "(there are no adapters of layers.1.moe.router)" in said


def test_other_mistakes(made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    adapter, out = made / "llama" / "a", tmp_path / "out"
    said = complaint(capsys, "import-hf", adapter, out, "--base", tmp_path)
    assert f"--base must be a Hugging Face folder with config.json, got {tmp_path}" in said
    said = complaint(capsys, "import-hf", adapter, out, "--base", made / "qwen3-moe" / "base")
    assert "a qwen3_moe model" in said
    said = complaint(capsys, "import-hf", made / "llama" / "base", out, "--base", tmp_path)
    assert "has no adapter_config.json; leave --base out" in said
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / CONFIG).write_text((adapter / CONFIG).read_text())
    assert f"{empty} has no {WEIGHTS}\n" in complaint(capsys, "import-hf", empty, out)
    (empty / "adapter_model.bin").touch()
    assert "is a pickled file, which is not read" in complaint(capsys, "import-hf", empty, out)

    run = made / "llama" / "run"
    said = complaint(capsys, "export-hf", run, out)
    assert "has adapters and no whole weights; add --merge" in said
    assert main(["import-hf", str(made / "llama" / "base"), str(tmp_path / "whole")]) == 0
    for form in ("merge", "adapter"):
        said = complaint(capsys, "export-hf", tmp_path / "whole", out, f"--{form}")
        assert f"(lora.rank is not set); leave --{form} out" in said
    said = complaint(capsys, "export-hf", tmp_path / "whole", out, "--base=x")
    assert "--base x is the base of adapters; add --adapter or --merge" in said
    save_theirs("llama", tmp_path / "other", initializer_range=0.1)
    said = complaint(capsys, "export-hf", run, out, "--merge", "--base", tmp_path / "other")
    assert "trained on" in said
    assert not out.exists()


def test_forms_that_peft_lacks_are_refused(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = made / "qwen3-moe" / "base"
    save_lora_run(base, tmp_path / "dora", rank=2, dora=True)
    said = complaint(capsys, "export-hf", tmp_path / "dora", tmp_path / "out", "--adapter")
    assert "PEFT has no DoRA for model.layers.0.mlp.experts.down_proj, a parameter" in said
    save_lora_run(base, tmp_path / "saved", rank=2, modules_to_save=["attention.qkv"])
    said = complaint(capsys, "export-hf", tmp_path / "saved", tmp_path / "out", "--adapter")
    assert "k_proj (layers.0.attention.qkv) whole, since it has adapters too; write" in said


def test_what_the_commands_print(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base, run = made / "qwen3-moe" / "base", tmp_path / "run"
    save_lora_run(base, run, rank=20, dropout=0.1, modules_to_save=["head"])
    capsys.readouterr()
    assert main(["export-hf", str(run), str(tmp_path / "a"), "--adapter"]) == 0
    printed = capsys.readouterr()
    assert f"in adapters of rank 20 of {base}: {tmp_path / 'a'}\n" in printed.out
    assert "note: lora_dropout is 0, not lora.dropout = 0.1" in printed.out
    assert printed.err.splitlines() == [
        "warning: vLLM refuses modules that are saved whole (modules_to_save: lm_head); give it "
        "merged weights (--merge)",
        "warning: vLLM needs --max-lora-rank 40, above its default of 16",
    ]
    assert main(["import-hf", str(tmp_path / "a"), str(tmp_path / "in"), "--seq-length=16"]) == 0
    printed = capsys.readouterr()
    assert "parameters in adapters of rank 20, 3 layers, sequence 16" in printed.out
    assert main(["export-hf", str(run), str(tmp_path / "m"), "--merge", "--dtype=bfloat16"]) == 0
    assert "bfloat16, as Qwen3MoeForCausalLM" in capsys.readouterr().out


def test_settings_of_training_come_back(made: Path, tmp_path: Path) -> None:
    lora = {"rank": 2, "alpha": 3.0, "rs": True, "dropout": 0.25, "dora": True}
    save_lora_run(made / "llama" / "base", tmp_path / "run", **lora)
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "a"), "--adapter"]) == 0
    config = json.loads((tmp_path / "a" / CONFIG).read_text())
    assert (config["lora_dropout"], config["use_rslora"], config["use_dora"]) == (0.25, True, True)
    assert main(["import-hf", str(tmp_path / "a"), str(tmp_path / "in"), "--seq-length=16"]) == 0
    found = load_config(tmp_path / "in" / "config.toml").lora
    assert found == LoraConfig.model_validate(lora)


def test_the_base_may_be_a_checkpoint(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    base = made / "llama" / "base"
    assert main(["import-hf", str(base), str(tmp_path / "base")]) == 0
    save_lora_run(base, tmp_path / "run", rank=2, origin=tmp_path / "base")
    save_lora_run(base, tmp_path / "same", rank=2)
    capsys.readouterr()
    assert main(["export-hf", str(tmp_path / "run"), str(tmp_path / "a"), "--adapter"]) == 0
    printed = capsys.readouterr().out
    recorded = f"not a Hugging Face folder or not there ({tmp_path / 'base'}"
    assert f"base_model_name_or_path is empty, since the recorded base is {recorded}" in printed
    assert f"parameters in adapters of rank 2: {tmp_path / 'a'}\n" in printed
    for name in ("run", "same"):
        assert (
            main(["export-hf", str(tmp_path / name), str(tmp_path / f"m_{name}"), "--merge"]) == 0
        )
    files = [tmp_path / f"m_{name}" / "model.safetensors" for name in ("run", "same")]
    assert files[0].read_bytes() == files[1].read_bytes()


def test_what_vllm_refuses_is_a_warning() -> None:
    config = {"r": 8, "rank_pattern": {}}
    assert vllm_warnings(config) == ()
    [dora] = vllm_warnings({**config, "use_dora": True})
    assert dora.startswith("vLLM refuses DoRA (use_dora)")
