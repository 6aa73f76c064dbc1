"""Every entry of ``config.json`` left out, empty or changed: as in transformers, or refused."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megacore.errors import MegacoreError
from megacore.parallel.batch import Microbatch
from megatrain.hf import import_hf
from tests.support.campaigns import representatives
from tests.support.hf_models import MODELS, save_theirs

transformers = pytest.importorskip("transformers")

# Entries whose value is the name of something, with another legal name.
_NAMES = {
    "hidden_act": "gelu",
    "rope_type": "linear",
    "type": "linear",
    "topk_method": "group_limited_greedy",
}
# The family itself, and number formats, which transformers casts the weights to.
_KEPT = ("model_type", "dtype")
Place = tuple[str, ...]


def variants(config: dict[str, Any]) -> Iterator[tuple[Place, str, dict[str, Any]]]:
    """Yield the path of an entry, a description and a configuration that differs in it."""
    places = [(name,) for name in config]
    for rope in ("rope_parameters", "rope_scaling"):
        places += [(rope, name) for name in config.get(rope) or {}]
    for place in places:
        without = copy.deepcopy(config)
        holder = _holder(without, place)
        value = holder.pop(place[-1])
        if place[-1] in _KEPT:
            continue
        yield place, "left out", without
        for other in (None, *others(place[-1], value)):
            changed = copy.deepcopy(config)
            _holder(changed, place)[place[-1]] = other
            yield place, f"{value!r} to {other!r}", changed


def older(config: dict[str, Any]) -> dict[str, Any]:
    """Return the same configuration as transformers 4 wrote it."""
    config = copy.deepcopy(config)
    rope = config.pop("rope_parameters", None)
    if rope is None:
        return config
    if "sliding_attention" in rope:
        full = rope["full_attention"]
        config["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        config["rope_theta"] = full.pop("rope_theta")
        return {**config, "rope_scaling": full if full["rope_type"] != "default" else None}
    for name in ("rope_theta", "partial_rotary_factor"):
        if name in rope:
            config[name] = rope.pop(name)
    return {**config, "rope_scaling": rope if rope["rope_type"] != "default" else None}


def _holder(config: dict[str, Any], place: Place) -> dict[str, Any]:
    for name in place[:-1]:
        config = config[name]
    return config


def others(name: str, value: Any) -> list[Any]:
    """Return other legal values of an entry."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [0, 1, value + 1, 2 * value]
    if isinstance(value, float):
        return [0.0, value / 2, value * 2 + 0.5]
    if isinstance(value, str):
        return [_NAMES[name]] if name in _NAMES else []
    if isinstance(value, list):
        return [[], value[::-1]]
    return [{}] if isinstance(value, dict) else [1, 0.5, True]


def theirs_of(config: dict[str, Any], state: dict[str, Tensor], tokens: Tensor) -> Tensor | None:
    """Return the logits of transformers, or ``None`` if it does not load or run such a model."""
    config = copy.deepcopy(config)
    try:
        family = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(config)
        model = transformers.AutoModelForCausalLM.from_config(
            family, dtype=torch.float32, attn_implementation="eager"
        )
        missing, unexpected = model.load_state_dict(state, strict=False)
        if unexpected or missing != (["lm_head.weight"] if family.tie_word_embeddings else []):
            return None  # it would warn, and leave tensors out or random
        model.tie_weights()
        logits = model.eval()(input_ids=tokens).logits.detach()
    except Exception:  # of whatever kind: then there is nothing to compare with
        return None
    return logits if logits.isfinite().all() else None


@torch.no_grad()
def ours_of(folder: Path, tokens: Tensor) -> Tensor:
    imported = import_hf(folder, seq_length=tokens.shape[1])
    batch = Microbatch(tokens=tokens, labels=None, sample_ids=torch.arange(tokens.shape[0]), step=0)
    return imported.chunk.eval().logits(None, batch)


def difference(found: Tensor, expected: Tensor) -> str | None:
    """Describe the difference of logits, if there is one, as a share of the largest."""
    off = ((found - expected).abs().max() / max(1.0, expected.abs().max())).item()
    return None if off <= 1e-5 else f"logits differ by {off:.3g}"


@pytest.mark.filterwarnings("ignore")  # transformers warns about odd values
@pytest.mark.parametrize("name", representatives(MODELS, ["mistral, window"]))
def test_an_entry_has_the_effect_of_transformers_or_is_refused(name: str, tmp_path: Path) -> None:
    saved = save_theirs(name, tmp_path)
    state = {key: value for key, value in saved.state_dict().items() if key != "lm_head.weight"}
    if not saved.config.tie_word_embeddings:
        state["lm_head.weight"] = saved.lm_head.weight.detach()
    vocab = saved.config.vocab_size
    tokens = torch.randint(0, vocab, (2, 16), generator=torch.Generator().manual_seed(1))
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    wrong, num_equal = [], 0
    for place, change, changed in (*variants(config), *variants(older(config))):
        file.write_text(json.dumps(changed))
        expected = theirs_of(changed, state, tokens)
        try:
            found = ours_of(tmp_path, tokens)
        except MegacoreError as error:
            text = str(error) if expected is not None and place[-1] not in str(error) else None
        except Exception as error:
            text = f"{type(error).__name__}: {error}"
        else:
            text = None if expected is None else difference(found, expected)
            num_equal += expected is not None and text is None
        if text is not None:
            wrong.append(f"{'.'.join(place)} {change}: {text}")
    assert not wrong, "\n".join(wrong)
    assert num_equal > 50  # most entries have no effect, or several legal values
