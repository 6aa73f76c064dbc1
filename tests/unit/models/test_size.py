from __future__ import annotations

import pytest

from megatrain.models.size import count_parameters
from tests.support.models import tiny_config, whole_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_the_count_is_that_of_the_model(tied: bool, num_kv_heads: int) -> None:
    config = tiny_config(tie_embeddings=tied, num_kv_heads=num_kv_heads)
    parameters = whole_model(config).param_infos()
    assert count_parameters(config).total == sum(p.numel() for _, p in parameters)


@pytest.mark.parametrize(("tied", "matrices"), [(True, 1), (False, 2)])
def test_the_padding_of_the_vocabulary_is_counted_apart(tied: bool, matrices: int) -> None:
    sizes = {"tie_embeddings": tied, "vocab_size": 50}
    padded, exact = (
        count_parameters(tiny_config(**sizes, vocab_pad_multiple=unit)) for unit in (64, 1)
    )
    assert (padded.padding, exact.padding) == (matrices * 14 * tiny_config().hidden_size, 0)
    assert padded.total - padded.padding == exact.total


@pytest.mark.parametrize(
    "changes",
    [{"qkv_bias": True}, {"output_bias": True}, {"norm": "layernorm", "num_mtp_layers": 1}],
)
def test_biases_and_norms_count(changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    parameters = whole_model(config).param_infos()
    assert count_parameters(config).total == sum(p.numel() for _, p in parameters)
