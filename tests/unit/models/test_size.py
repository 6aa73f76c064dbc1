from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megacore.models.size import count_parameters, flops_per_token
from tests.support.models import random_batch, tiny_config, whole_model


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


def test_flops_are_those_that_torch_counts_in_the_matrix_products() -> None:
    config = tiny_config(tie_embeddings=False)
    model, batch = whole_model(config), random_batch(config)
    with FlopCounterMode(display=False) as counter:
        model(None, batch).backward()
    products = {torch.ops.aten.mm, torch.ops.aten.addmm}
    counted = sum(
        flops for op, flops in counter.get_flop_counts()["Global"].items() if op in products
    )
    heads = config.num_layers * config.seq_length * config.hidden_size
    assert counted == batch.tokens.numel() * (flops_per_token(config) - 6 * heads)
