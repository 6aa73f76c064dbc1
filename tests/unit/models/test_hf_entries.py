"""Entries of ``config.json``: defaults of transformers, and entries without effect."""

from __future__ import annotations

import re
from typing import Any

import pytest

from megacore.errors import MegacoreError
from megatrain.config import Config, resolve
from megatrain.hf import sections_from_hf
from megatrain.hf.entries import without_entries
from megatrain.hf.families import FAMILIES
from megatrain.hf.family import Family
from megatrain.hf.keys import REQUIRED, Key, Values
from megatrain.hf.rope import rope_from_hf
from megatrain.hf.settings import import_values
from tests.support.hf_models import COMMON, EACH, MODELS, classes

transformers = pytest.importorskip("transformers")

classes("KimiK2")  # so that its model_type is known
# Without those that transformers has no class of.
KNOWN = {kind: family for kind, family in FAMILIES.items() if kind != "bailing_moe_v2"}
KEYS = [(kind, key) for kind, family in KNOWN.items() for key in family.keys]
KEY_IDS = [f"{kind}-{key.theirs[0]}" for kind, key in KEYS]
RULES = [(kind, rule) for kind, family in KNOWN.items() for rule in family.rules]
# Switches that make other entries count.
SWITCHES: list[dict[str, Any]] = [
    {},
    {"use_sliding_window": True},
    {"output_router_logits": True},
    {"topk_method": "group_limited_greedy", "n_group": 4, "topk_group": 2},
]


def their_config(kind: str, **entries: Any) -> dict[str, Any]:
    config: dict[str, Any] = transformers.CONFIG_MAPPING[kind](**entries).to_dict()
    return config


def normal(key: Key, value: Any, config: dict[str, Any]) -> Any:
    """A value, with what an empty one stands for."""
    if value is not None:
        return value
    heads = config["num_attention_heads"]
    if key.theirs == ("num_key_value_heads",):
        return heads
    if key.theirs == ("head_dim",):
        return config["hidden_size"] // heads
    return False if key.kind is bool else key.null


@pytest.mark.parametrize(("kind", "key"), KEYS, ids=KEY_IDS)
def test_a_missing_entry_has_the_value_of_transformers(kind: str, key: Key) -> None:
    if key.default is REQUIRED:
        return  # refused by name
    if key.theirs == ("num_nextn_predict_layers",):
        assert key.default == 0  # layers that transformers does not compute
        return
    theirs = their_config(kind)
    wanted = next((theirs[name] for name in key.theirs if name in theirs), None)
    found = key.read({"model_type": kind})
    assert normal(key, found, theirs) == normal(key, wanted, theirs)


@pytest.mark.parametrize(("kind", "key"), KEYS, ids=KEY_IDS)
def test_an_empty_entry_has_the_value_of_transformers(kind: str, key: Key) -> None:
    name = key.theirs[0]
    try:
        theirs = their_config(kind, **{name: None})
    except Exception:  # of whatever kind: then it is not legal
        return
    if key.default is REQUIRED or name == "num_nextn_predict_layers":
        return
    wanted = normal(key, theirs.get(name), theirs)
    if wanted is not None:  # else the model of transformers fails
        found = key.read({"model_type": kind, name: None})
        assert normal(key, found, theirs) == wanted


def test_every_family_has_a_model_of_transformers() -> None:
    built = {name for name, _ in MODELS.values()}
    models = {classes(family)[1].__name__ for family in built} | {"DeepseekV3ForCausalLM"}
    assert {family.architecture for family in KNOWN.values()} <= models, "add a model to MODELS"


@pytest.mark.parametrize("kind", KNOWN)
def test_fixed_entries_have_the_default_of_transformers(kind: str) -> None:
    theirs = their_config(kind)
    shared = FAMILIES[kind].fixed.keys() & theirs.keys()
    assert {"hidden_act", "hidden_activation", "activation_function"} & shared
    assert "attention_dropout" in {*shared, *FAMILIES[kind].ignored} or not theirs.get(
        "attention_dropout"
    )
    assert {name: theirs[name] for name in shared} == {
        name: FAMILIES[kind].fixed[name] for name in shared
    }


def values_of(family: Family, config: dict[str, Any]) -> Values:
    values: Values = {}
    for key in family.keys:
        values |= dict.fromkeys(key.ours, normal(key, config.get(key.theirs[0]), config))
    return values


@pytest.mark.parametrize("switch", SWITCHES, ids=str)
@pytest.mark.parametrize(("kind", "rule"), RULES)
def test_rules_have_the_defaults_of_transformers(
    kind: str, rule: Any, switch: dict[str, Any]
) -> None:
    if not switch.keys() <= set(rule.names):
        switch = {}
    if kind == "granitemoehybrid":
        # Its default is layers of other kinds.
        switch = {"layer_types": ["full_attention"] * 32, "num_local_experts": 0}
    theirs = their_config(kind, num_hidden_layers=32, **switch) | {"model_type": kind}
    values = values_of(FAMILIES[kind], theirs | {"num_experts_per_tok": 2})
    wanted = rule.read(theirs, values)
    short = {name: value for name, value in theirs.items() if name not in rule.names} | switch
    assert rule.read(short, values) == wanted
    for name in set(rule.names) - switch.keys():
        each = {key: value for key, value in theirs.items() if key != name}
        assert rule.read(each, values) == wanted, name


@pytest.mark.parametrize("kind", KNOWN)
def test_the_rotation_has_the_defaults_of_transformers(kind: str) -> None:
    family, theirs = FAMILIES[kind], their_config(kind)
    if not family.rotates:
        return
    length = {"model_type": kind, "max_position_embeddings": theirs["max_position_embeddings"]}
    assert rope_from_hf(length, family) == rope_from_hf(theirs, family)
    # An empty share is the whole head; transformers sets no other then.
    try:
        empty = their_config(kind, partial_rotary_factor=None)
    except Exception:  # of whatever kind: then it is not legal
        return
    assert empty["rope_parameters"].get("partial_rotary_factor") is None
    found = rope_from_hf({**length, "partial_rotary_factor": None}, family)
    assert found["model.rotary_fraction"] == 1.0


# ---- entries without effect, and refusals --------------------------------------------------------

LLAMA = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 260,
    "max_position_embeddings": 64,
}
# Written by transformers 4 into config.json, with its defaults; the names are those of 4.57.
GENERATION_4: dict[str, Any] = {
    "begin_suppress_tokens": None,
    "diversity_penalty": 0.0,
    "do_sample": False,
    "early_stopping": False,
    "encoder_no_repeat_ngram_size": 0,
    "length_penalty": 1.0,
    "max_length": 20,
    "min_length": 0,
    "num_beam_groups": 1,
    "num_beams": 1,
    "num_return_sequences": 1,
    "output_scores": False,
    "repetition_penalty": 1.0,
    "temperature": 1.0,
    "top_k": 50,
    "top_p": 1.0,
    "typical_p": 1.0,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "SmolLM2": {"is_llama_config": True, "transformers.js_config": {"dtype": "q4"}},
    "Unsloth": {"unsloth_fixed": True, "unsloth_version": "2025.1.5", "unsloth_other": "x"},
    "yarn-Llama-2": {"rope_scaling": {"type": "linear", "factor": 2.0, "finetuned": True}},
    "Llama-1": {"max_sequence_length": 2048},
    "transformers 4": GENERATION_4,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_entries_without_effect_change_nothing(name: str) -> None:
    plain = dict(LLAMA)
    if "rope_scaling" in PUBLISHED[name]:
        plain["rope_scaling"] = {"type": "linear", "factor": 2.0}
    assert sections_from_hf({**LLAMA, **PUBLISHED[name]}) == sections_from_hf(plain)


def test_settings_of_generation_have_no_effect() -> None:
    names = transformers.GenerationConfig().to_dict().keys() - {"pad_token_id"}
    assert {"temperature", "max_length"} <= names
    assert sections_from_hf(LLAMA | dict.fromkeys(names, 7)) == sections_from_hf(LLAMA)


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "olmo2"])
def test_norms_of_queries_and_keys_are_true_of_families_that_have_them(kind: str) -> None:
    config = their_config(kind) | {"model_type": kind}
    assert sections_from_hf(config | {"use_qk_norm": True}) == sections_from_hf(config)
    with pytest.raises(MegacoreError, match=r"use_qk_norm in config\.json of a \w+ model must be"):
        sections_from_hf(config | {"use_qk_norm": False})


def tiny_config(name: str) -> dict[str, Any]:
    family, entries = MODELS[name]
    entries = {name: value for name, value in (COMMON | entries).items() if value is not ...}
    config: dict[str, Any] = classes(family)[0](**entries).to_dict()
    return config


@pytest.mark.parametrize("name", EACH)
def test_attention_is_causal(name: str) -> None:
    config = tiny_config(name)
    assert sections_from_hf(config | {"is_causal": True}) == sections_from_hf(config)
    for value in (False, None):  # to transformers, both are attention without a mask
        with pytest.raises(
            MegacoreError, match=r"is_causal in config\.json of a \w+ model must be"
        ):
            sections_from_hf(config | {"is_causal": value})


def test_layers_of_windows_matter_only_with_a_window() -> None:
    config = their_config("qwen2") | {"model_type": "qwen2", "layer_types": None}
    plain = sections_from_hf(config)
    assert sections_from_hf(config | {"max_window_layers": None}) == plain
    windows = config | {"use_sliding_window": True, "sliding_window": 4}
    for value in (None, "8"):
        with pytest.raises(MegacoreError, match=r"max_window_layers in .* integer of at least 0"):
            sections_from_hf(windows | {"max_window_layers": value})
    for value in (1, ["full_attention"], [["full_attention"]] * 32):
        with pytest.raises(MegacoreError, match=r"layer_types in config\.json must name"):
            sections_from_hf(config | {"layer_types": value})


def test_attention_in_chunks_is_plain_up_to_its_length() -> None:
    chunks = {"chunk_size": 48, "local_size": 8, "original_max_position_embeddings": 48}
    config = LLAMA | {"dual_chunk_attention_config": chunks}
    assert sections_from_hf(config)[0].seq_length == 48
    assert sections_from_hf(config, seq_length=48) == sections_from_hf(LLAMA, seq_length=48)
    with pytest.raises(MegacoreError, match=r"seq_length must be at most 48, .* got 49"):
        sections_from_hf(config, seq_length=49)
    with pytest.raises(MegacoreError, match=r"dual_chunk_attention_config = .* not known"):
        sections_from_hf(LLAMA | {"dual_chunk_attention_config": {"chunk_size": 48}})


def test_sparse_attention_is_refused_beyond_the_tokens_it_chooses() -> None:
    config = tiny_config("deepseek-v32") | {"model_type": "deepseek_v32", "index_topk": 12}
    assert sections_from_hf(config)[0].seq_length == 12
    with pytest.raises(MegacoreError, match=r"seq_length must be at most mla.index_top_k = 12"):
        sections_from_hf(config, seq_length=13)


def test_one_error_has_all_refusals() -> None:
    wrong = {"alpha": 1, "beta": "x", "hidden_act": "gelu", "rms_norm_eps": "small"}
    config = LLAMA | wrong | {"rope_scaling": {"type": "mrope"}, "pad_token_id": 1.5}
    config.pop("vocab_size")
    with pytest.raises(MegacoreError) as caught:
        sections_from_hf(config)
    message = str(caught.value)
    assert "alpha = 1, beta = 'x', which are not known for llama models" in message
    assert all(name in message for name in ("hidden_act", "rms_norm_eps", "mrope", "vocab_size"))
    with pytest.raises(MegacoreError) as caught:
        sections_from_hf(LLAMA | {"pad_token_id": 1.5, "attention_dropout": 0.5})
    assert all(name in str(caught.value) for name in ("pad_token_id", "attention_dropout"))


def test_an_invalid_model_is_refused_with_the_entries_it_follows_from() -> None:
    wanted = "norm_eps must be greater than 0, got 0.0 (config.json has rms_norm_eps = 0.0)"
    with pytest.raises(MegacoreError, match=re.escape(wanted)):
        sections_from_hf(LLAMA | {"rms_norm_eps": 0.0})


def test_ignored_entries_must_be_there_and_unread() -> None:
    config = LLAMA | {"alpha": 1, "attention_dropout": 0.5}
    assert without_entries(config, ["alpha", "attention_dropout"]) == LLAMA
    with pytest.raises(
        MegacoreError, match=r"--ignore must name an entry of config\.json, got beta"
    ):
        without_entries(config, ["alpha", "beta"])
    with pytest.raises(MegacoreError, match="got hidden_size, which a llama model of megacore"):
        without_entries(config, ["hidden_size"])


@pytest.mark.parametrize("coef", [0.0, 0.5])
@pytest.mark.parametrize("name", MODELS)
def test_every_setting_of_an_import_has_an_effect(name: str, coef: float) -> None:
    loss = {"output_router_logits": True, "router_aux_loss_coef": coef}
    config = tiny_config(name)
    if "output_router_logits" in FAMILIES[config["model_type"]].fixed:
        loss = {}  # refused
    config |= {key: value for key, value in loss.items() if key in config}
    values = import_values(*sections_from_hf(config))
    done = resolve(Config.model_validate(values), 1, cuda=False)
    assert not [note for note in done.notes if "no effect" in note]
