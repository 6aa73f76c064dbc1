"""Entries of ``config.json``: defaults of transformers, and entries without effect."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.hf.families import FAMILIES, Family
from megatrain.hf.keys import REQUIRED, Key, Values
from megatrain.hf.rope import rope_from_hf

transformers = pytest.importorskip("transformers")

KEYS = [(kind, key) for kind, family in FAMILIES.items() for key in family.keys]
KEY_IDS = [f"{kind}-{key.theirs[0]}" for kind, key in KEYS]
RULES = [(kind, rule) for kind, family in FAMILIES.items() for rule in family.rules]
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


@pytest.mark.parametrize("kind", FAMILIES)
def test_fixed_entries_have_the_default_of_transformers(kind: str) -> None:
    theirs = their_config(kind)
    shared = FAMILIES[kind].fixed.keys() & theirs.keys()
    assert {"hidden_act", "attention_dropout"} <= shared
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
    theirs = their_config(kind, num_hidden_layers=32, **switch) | {"model_type": kind}
    values = values_of(FAMILIES[kind], theirs | {"num_experts_per_tok": 2})
    wanted = rule.read(theirs, values)
    short = {name: value for name, value in theirs.items() if name not in rule.names} | switch
    assert rule.read(short, values) == wanted
    for name in set(rule.names) - switch.keys():
        each = {key: value for key, value in theirs.items() if key != name}
        assert rule.read(each, values) == wanted, name


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_rotation_has_the_defaults_of_transformers(kind: str) -> None:
    family, theirs = FAMILIES[kind], their_config(kind)
    known = {"base": family.rope_base, "fraction": family.rotary_fraction, "default": family.rope}
    length = {"model_type": kind, "max_position_embeddings": theirs["max_position_embeddings"]}
    assert rope_from_hf(length, **known) == rope_from_hf(theirs, **known)
    # An empty share is the whole head; transformers sets no other then.
    empty = their_config(kind, partial_rotary_factor=None)
    assert empty["rope_parameters"].get("partial_rotary_factor") is None
    found = rope_from_hf({**length, "partial_rotary_factor": None}, **known)
    assert found["model.rotary_fraction"] == 1.0
