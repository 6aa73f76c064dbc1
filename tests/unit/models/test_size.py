from __future__ import annotations

import pytest

from megacore.models.size import count_parameters
from tests.support.models import tiny_config, whole_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("num_kv_heads", [1, 4])
def test_the_count_is_that_of_the_model(tied: bool, num_kv_heads: int) -> None:
    config = tiny_config(tie_embeddings=tied, num_kv_heads=num_kv_heads)
    parameters = whole_model(config).param_infos()
    assert count_parameters(config).total == sum(p.numel() for _, p in parameters)


@pytest.mark.parametrize(
    "changes",
    [{"qkv_bias": True}, {"output_bias": True}, {"norm": "layernorm", "num_mtp_layers": 1}],
)
def test_biases_and_norms_count(changes: dict[str, object]) -> None:
    config = tiny_config(**changes)
    parameters = whole_model(config).param_infos()
    assert count_parameters(config).total == sum(p.numel() for _, p in parameters)
