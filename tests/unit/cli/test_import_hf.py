"""``megacore import-hf``: what it writes trains and speaks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from megacore.parallel.batch import Microbatch
from megatrain.cli import main
from megatrain.config import load_config, resolve
from megatrain.generation.restore import restore_model
from megatrain.hf import import_hf, sections_from_hf
from megatrain.train.trainer import build_trainer
from tests.support.hf_models import save_theirs
from tests.support.hf_quantized import save_fp8, save_mxfp4

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")

COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 384,
    "max_position_embeddings": 24,
    "initializer_range": 0.2,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "mixtral": ("Mixtral", {"intermediate_size": 24, "num_local_experts": 4}),
    "qwen3-moe": (
        "Qwen3Moe",
        {
            "intermediate_size": 48,
            "moe_intermediate_size": 20,
            "head_dim": 16,
            "num_experts": 6,
            "num_experts_per_tok": 3,
            "mlp_only_layers": [0],
            "tie_word_embeddings": True,
        },
    ),
    "llama": ("Llama", {"intermediate_size": 48}),
}
TEXT = "The quick brown fox jumps over the lazy dog. " * 40


def make_folder(name: str, folder: Path, *, tokenizer: bool = True) -> Any:
    """A random model with a tokenizer of 256 bytes, as the hub would have it."""
    torch.manual_seed(3)
    family, changes = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**COMMON, **changes})
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    model.save_pretrained(folder)
    if tokenizer:
        save_tokenizer(folder)
    return model


def save_tokenizer(folder: Path) -> None:
    """One of 256 bytes."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({letter: i for i, letter in enumerate(alphabet)}, [])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.save(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("name", MODELS)
def test_an_imported_model_trains_and_speaks(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    theirs = make_folder(name, tmp_path / "theirs")
    out = tmp_path / "ours"
    assert main(["import-hf", str(tmp_path / "theirs"), str(out), "--seq-length=16"]) == 0
    said = capfd.readouterr().out
    assert f"{sum(p.numel() for p in theirs.parameters()):,} parameters" in said
    assert f"megacore train {out / 'config.toml'} --data.source=PATH\n" in said
    assert "tokenizer" not in said
    assert ("moe.aux_loss_coef = 0.0" in said) == (name != "llama")

    restored = restore_model(out)
    tokens = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(1))
    batch = Microbatch(tokens=tokens, labels=None, sample_ids=torch.arange(1), step=0)
    restored.model.eval()
    logits = restored.model.logits(None, batch)
    torch.testing.assert_close(
        logits, theirs(input_ids=tokens).logits.detach(), rtol=1e-5, atol=1e-5
    )
    options = ("--prompt", "The quick", "--max-new-tokens", "3", "--temperature", "0")
    assert main(["generate", str(out), *options]) == 0
    said = capfd.readouterr().out
    assert said.startswith("The quick")
    assert main(["generate", str(tmp_path / "theirs"), *options]) == 0
    assert capfd.readouterr().out == said
    assert main(["generate", str(out), *options, "--prompt=A lazy dog"]) == 0
    assert capfd.readouterr().out.startswith(f"{said}\nA lazy dog")

    # Nothing is trained on by default.
    for command in ("train", "eval"):
        assert main([command, str(out / "config.toml" if command == "train" else out)]) == 2
        said = capfd.readouterr().err
        assert "data.source must be text or tokens to train on, got none; set it with" in said

    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    settings = {
        "data.source": text,
        "train.steps": 2,
        "train.microbatch_size": 2,
        "train.global_batch_size": 4,
        "train.eval_interval": 0,
        "optimizer.lr": 1e-3,
        "run.dir": tmp_path / "run",
        "run.plain": "true",
    }
    overrides = [f"--{key}={value}" for key, value in settings.items()]
    assert main(["train", str(out / "config.toml"), "--nproc=1", *overrides]) == 0
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    first, second = (json.loads(line) for line in lines)
    config = load_config(out / "config.toml", [(k, str(v)) for k, v in settings.items()])
    assert first["loss"] == pytest.approx(first_loss(theirs, config), rel=1e-5)
    assert second["step"] == 2


def first_loss(theirs: Any, config: Any) -> float:
    """Of the first batch, with their model."""
    trainer = build_trainer(
        resolve(config, 1, vocab_size=256, cuda=False), world_size=1, device=torch.device("cpu")
    )
    losses = []
    for number in range(2):
        batch = trainer._batches(trainer.data.train)(0, number)
        logits = theirs(input_ids=batch.tokens).logits
        losses.append(
            torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.view(-1))
        )
    return torch.stack(losses).mean().item()


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["import-hf", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1, captured.err
    return captured.err


def test_mistakes_are_told_and_leave_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "ours"
    make_folder("llama", theirs, tokenizer=False)
    capsys.readouterr()
    assert "config.json" in complaint(capsys, str(tmp_path / "nowhere"), str(out))
    assert "--seq-length must be at least 1, got 0" in complaint(
        capsys, str(theirs), str(out), "--seq-length=0"
    )
    busy = tmp_path / "busy"
    busy.mkdir()
    (busy / "mine.txt").write_text("x")
    assert "holds files already; name a new folder" in complaint(capsys, str(theirs), str(busy))
    config = json.loads((theirs / "config.json").read_text())
    (theirs / "config.json").write_text(json.dumps({**config, "model_type": "bert"}))
    message = complaint(capsys, str(theirs), str(out))
    assert "must be one of llama, mistral, mixtral, qwen3" in message
    (theirs / "config.json").write_text(json.dumps(config))
    for weights in theirs.glob("*.safetensors"):
        weights.unlink()
    assert "holds no *.safetensors file" in complaint(capsys, str(theirs), str(out))
    assert not out.exists()
    assert [path.name for path in busy.iterdir()] == ["mine.txt"]


def test_the_best_layout_of_a_folder_is_a_whole_configuration(tmp_path: Path) -> None:
    save_theirs("qwen3-moe", tmp_path / "theirs")
    written = tmp_path / "best.toml"
    search = ("--gpus=4", "--search", f"--write={written}")
    assert main(["plan", str(tmp_path / "theirs"), *search]) == 0
    best = load_config(written)
    assert best.model.qk_norm == "head"
    assert best.moe.num_experts == 6
    assert main(["plan", str(written), "--gpus=4"]) == 0


@pytest.mark.parametrize("options", [(), ("--gpus=4",), ("--gpus=4", "--search")])
def test_a_plan_of_what_cannot_be_imported_says_why(
    options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    for source in (tmp_path, tmp_path / "config.json"):
        assert main(["plan", str(source), *options]) == 2
        assert "model_type must be one of llama" in capsys.readouterr().err
    assert main(["plan", str(tmp_path / "none.json"), *options]) == 2
    assert "cannot read" in capsys.readouterr().err
    (tmp_path / "config.json").unlink()
    assert main(["plan", str(tmp_path), *options]) == 2
    assert "is a folder, not a TOML file" in capsys.readouterr().err


@pytest.mark.parametrize("file", ["", "config.json"])
@pytest.mark.parametrize("command", [["train"], ["data", "show"]])
def test_a_command_for_a_configuration_names_the_import_of_a_model(
    command: list[str], file: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder("llama", tmp_path)
    capsys.readouterr()
    assert main([*command, str(tmp_path / file)]) == 2
    assert f"megacore import-hf {tmp_path} OUT makes OUT/config.toml" in capsys.readouterr().err


def test_entries_are_ignored_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs, out = tmp_path / "theirs", tmp_path / "ours"
    make_folder("llama", theirs)
    config = json.loads((theirs / "config.json").read_text()) | {"alpha": 1, "beta": "x"}
    (theirs / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    message = complaint(capsys, str(theirs), str(out), "--ignore=alpha")
    assert "beta = 'x', which is not known for llama models; remove it, or name it as" in message
    message = complaint(capsys, str(theirs), str(out), "--ignore=gamma")
    assert "got gamma, which it does not have" in message
    assert main(["import-hf", str(theirs), str(out), "--ignore=alpha", "--ignore=beta"]) == 0
    assert "note: ignored in config.json: alpha, beta\n" in capsys.readouterr().out
    # The entries come back.
    assert main(["export-hf", str(out), str(tmp_path / "back")]) == 0
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == config


def test_a_plan_of_an_adapter_is_refused_with_the_remedy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    adapter = {"peft_type": "LORA", "base_model_name_or_path": "meta/Llama"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    for source in (tmp_path, tmp_path / "adapter_config.json"):
        assert main(["plan", str(source)]) == 2
        assert "is a LoRA adapter of meta/Llama" in capsys.readouterr().err


def test_a_plan_says_which_layers_for_multi_token_prediction_it_counts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_theirs("deepseek-v3", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))
    said = {}
    for given in ("", "0"):
        options = [f"--model.num_mtp_layers={given}"] if given else []
        assert main(["plan", str(tmp_path), "--gpus=1", "--json", *options]) == 0
        said[given] = capsys.readouterr()
    assert "without layers for multi-token prediction" in said[""].err
    assert "multi-token" not in said["0"].err
    assert said[""].out == said["0"].out  # the files have no tensors of the layer
    next(tmp_path.glob("*.safetensors")).unlink()
    assert main(["plan", str(tmp_path), "--gpus=1", "--json"]) == 0
    more = capsys.readouterr()
    assert "num_nextn_predict_layers = 1 in config.json; for files without them" in more.err
    assert more.out != said["0"].out


def test_weights_that_are_not_finite_are_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder("llama", tmp_path / "theirs", tokenizer=False)
    [file] = (tmp_path / "theirs").glob("*.safetensors")
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    capsys.readouterr()
    assert main(["import-hf", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert capsys.readouterr().err == (
        "warning: model.norm.weight has NaN or infinite values, so the model cannot train; "
        "get the file again, or save the model again\n"
    )


def test_a_folder_without_a_tokenizer_says_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder("llama", tmp_path / "theirs", tokenizer=False)
    capsys.readouterr()
    assert main(["import-hf", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    assert "has no tokenizer.json: set data.tokenizer" in capsys.readouterr().out
    assert (
        import_hf(tmp_path / "theirs").model == load_config(tmp_path / "ours" / "config.toml").model
    )


def test_generating_without_a_tokenizer_is_refused_unless_tokens_are_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_folder("llama", tmp_path / "theirs", tokenizer=False)
    capsys.readouterr()
    command = ["generate", str(tmp_path / "theirs"), "--prompt=x", "--max-new-tokens=2"]
    assert main(command) == 2
    assert "has no tokenizer.json, and its vocabulary of 384" in capsys.readouterr().err
    assert main(["import-hf", str(tmp_path / "theirs"), str(tmp_path / "ours")]) == 0
    capsys.readouterr()
    assert main(["generate", str(tmp_path / "ours"), *command[2:]]) == 0
    assert "has no tokenizer, and its vocabulary of 384 ids is not that of bytes" in (
        capsys.readouterr().err
    )
    model = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**{**COMMON, "vocab_size": 256, "intermediate_size": 48})
    )
    model.save_pretrained(tmp_path / "theirs")
    capsys.readouterr()
    assert main(command) == 0
    assert capsys.readouterr().out.startswith("x")


def notes(capsys: pytest.CaptureFixture[str], folder: Path, **entries: Any) -> list[str]:
    """Import with changed entries of config.json; returns the notes that were printed."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | entries))
    capsys.readouterr()
    assert main(["import-hf", str(folder), f"{folder}-{len(entries)}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    return [line.removeprefix("note: ") for line in lines if line.startswith("note: ")]


def test_settings_for_the_loss_of_transformers_are_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_theirs("deepseek-v3", tmp_path / "deepseek")
    unused = {"aux_loss_alpha": 0.001, "seq_aux": True}
    [note] = notes(capsys, tmp_path / "deepseek", **unused)
    assert note == (
        "training as in transformers: moe.expert_bias_rate = 0 (the biases of experts stay); "
        "aux_loss_alpha = 0.001 and seq_aux = true not used; model.padding_idx = 101 (no gradient "
        "for that row)"
    )
    settings = load_config(tmp_path / "deepseek-2" / "config.toml")
    assert settings.moe.expert_bias_rate == 0.0
    assert settings.moe.aux_loss_coef == 0.0
    save_theirs("mixtral", tmp_path / "mixtral")
    [note] = notes(
        capsys, tmp_path / "mixtral", output_router_logits=True, router_aux_loss_coef=0.3
    )
    assert "moe.aux_loss_coef = 0.2 for each layer (router_aux_loss_coef times top_k over" in note
    settings = load_config(tmp_path / "mixtral-2" / "config.toml")
    assert settings.moe.aux_loss_coef == pytest.approx(0.3 * 2 / 3)
    assert settings.moe.aux_loss_type == "batch"
    save_theirs("llama", tmp_path / "llama", torch.float16)
    assert notes(capsys, tmp_path / "llama", pad_token_id=None) == [
        'the weights are float16, but train.dtype = "bfloat16", whose range is that of float32; '
        "the checkpoint keeps float16, and so does export-hf"
    ]


@pytest.mark.parametrize(
    ("name", "token", "row"),
    [
        ("llama", 3, 3),
        ("llama", -1, 259),
        ("llama", None, None),
        ("llama", 260, None),  # a token that was added to the tokenizer only
        ("olmo2", ..., 1),  # the default of the family
        ("olmo2", None, None),
    ],
)
def test_the_padding_row_is_that_of_transformers(
    name: str, token: Any, row: int | None, tmp_path: Path
) -> None:
    save_theirs(name, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"pad_token_id": token}
    config = {key: value for key, value in config.items() if value is not ...}
    assert sections_from_hf(config)[0].padding_idx == row
    (tmp_path / "config.json").write_text(json.dumps(config))
    if token != 260:  # transformers refuses it
        theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
        assert theirs.get_input_embeddings().padding_idx == row


@pytest.mark.parametrize("with_model", [False, True])
@pytest.mark.parametrize("command", ["eval", "generate"])
def test_folders_of_adapters_are_refused_by_name(
    command: str, with_model: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    entries = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8}
    (folder / "adapter_config.json").write_text(json.dumps(entries))
    if with_model:  # transformers would load the adapter too
        save_theirs("llama", folder)
    rest = {"eval": [], "generate": ["--prompt=a"]}
    assert main([command, str(folder), *rest[command]]) == 2
    said = capsys.readouterr().err
    assert f"{folder} is a LoRA adapter of org/base; import it first (megacore import-hf" in said


@pytest.mark.parametrize("name", ["qwen3", "deepseek-v3", "gpt-oss"])
def test_a_quantized_folder_is_the_dequantized_one(
    name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    quantized, plain = tmp_path / "quantized", tmp_path / "plain"
    quantized.mkdir()
    wanted = save_mxfp4(quantized) if name == "gpt-oss" else save_fp8(name, quantized)
    save_tokenizer(quantized)
    shutil.copytree(quantized, plain)
    save_file(wanted, plain / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    del config["quantization_config"]
    (plain / "config.json").write_text(json.dumps(config))
    (tmp_path / "text.txt").write_text(TEXT)
    data = (f"--data={tmp_path / 'text.txt'}", "--json", "--model.seq_length=16")
    found: dict[Path, list[Any]] = {quantized: [], plain: []}
    for folder, said in found.items():
        assert main(["generate", str(folder), "--prompt=The", "--max-new-tokens=5"]) == 0
        said.append(capfd.readouterr().out)
        assert main(["eval", str(folder), *data]) == 0
        evaluated = json.loads(capfd.readouterr().out)
        said.append({key: evaluated[key] for key in ("parameters", "loss", "perplexity")})
    assert found[quantized] == found[plain]

    out, back = tmp_path / "ours", tmp_path / "back"
    assert main(["import-hf", str(quantized), str(out)]) == 0
    method = "mxfp4" if name == "gpt-oss" else "fp8"
    assert f" tensors in {method} were read as bfloat16\n" in capfd.readouterr().out
    assert load_config(out / "config.toml").train.dtype == "bfloat16"
    assert main(["export-hf", str(out), str(back)]) == 0
    assert json.loads((back / "config.json").read_text()) == config
    exported = load_file(back / "model.safetensors")
    assert exported.keys() == wanted.keys()
    for key, value in wanted.items():
        assert exported[key].dtype == value.dtype
        assert torch.equal(exported[key], value), key
