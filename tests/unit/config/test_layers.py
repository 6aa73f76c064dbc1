"""Layers dealt to stages by a configuration."""

from __future__ import annotations

import pytest

from megacore.errors import ConfigError
from megatrain.config import Config, layers_of_stages, load_config, mtp_stage, resolve


def make(**settings: str) -> Config:
    """A configuration of four layers from ``section__key="value"`` overrides."""
    return load_config(None, [(key.replace("__", "."), text) for key, text in settings.items()])


def message_of(config: Config, world_size: int) -> str:
    with pytest.raises(ConfigError) as caught:
        resolve(config, world_size, vocab_size=256, cuda=False)
    return str(caught.value)


def test_a_layout_deals_the_layers_and_its_mistakes_are_marked() -> None:
    uneven = make(parallel__pp="2", pipeline__layout="Et|tttL")
    assert layers_of_stages(resolve(uneven, 2, vocab_size=256, cuda=False)) == [
        range(0, 1),
        range(1, 4),
    ]
    for layout, sentence in (
        ("Et|ttxL", '): layout "Et|tt>x<L": unknown; use E'),
        ("Et|ttL", "has 3 layers (t), but num_layers is 4; add 1, or set num_layers to 3"),
        ("Et|tt|tL", "has 3 stages, but 2 ranks make 2"),
        ("Et|tttmL", "has 1 m (layers for multi-token prediction), but model.num_mtp_layers is 0"),
    ):
        assert sentence in message_of(make(parallel__pp="2", pipeline__layout=layout), 2)


def test_a_rank_with_nothing_to_train_is_refused() -> None:
    hollow = make(parallel__pp="3", pipeline__layout="Ett||ttL")
    assert "pipeline rank 1 gets neither layers nor embedding nor head" in message_of(hollow, 3)
    ends_only = make(parallel__pp="3", pipeline__layout="E|tttt|L")
    assert [
        len(s) for s in layers_of_stages(resolve(ends_only, 3, vocab_size=256, cuda=False))
    ] == [0, 4, 0]
    settings = {"pipeline__schedule": "interleaved_1f1b", "pipeline__num_chunks": "2"}
    one_of_two = make(parallel__pp="2", pipeline__layout="Ett|t||tL", **settings)
    resolve(one_of_two, 2, vocab_size=256, cuda=False)
    both = make(parallel__pp="3", pipeline__layout="Ett||t||tL|", **settings)
    assert "ends with L" in message_of(both, 3)
    both = make(parallel__pp="3", pipeline__layout="Ett||t|||tL", **settings)
    assert "give one of its stages (1, 4) a layer" in message_of(both, 3)


def test_their_number_is_that_of_the_model() -> None:
    pipeline, parallel = {"layout": "Ett|ttmL"}, {"pp": 2}
    with pytest.raises(ConfigError, match=r"has 1 m .*, but model.num_mtp_layers is 0"):
        resolve(Config(parallel=parallel, pipeline=pipeline), 2, vocab_size=256, cuda=False)
    model = {"num_mtp_layers": 1}
    resolve(
        Config(model=model, parallel=parallel, pipeline=pipeline), 2, vocab_size=256, cuda=False
    )
    assert mtp_stage(Config(parallel=parallel)) is None
