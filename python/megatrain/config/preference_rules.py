"""Rules between ``[preference]`` and other sections."""

from __future__ import annotations

from megatrain.config.problems import ConfigErrors
from megatrain.config.resolved import ResolvedConfig


def check_preference(problems: ConfigErrors, config: ResolvedConfig) -> None:
    """Check that the data are pairs that fit, and that nothing else decides on the loss."""
    shown = problems.shown
    if config.preference.loss is None:
        return
    for key, others, advice in (
        ("train.loss", config.train.loss is not None, "leave one of them out"),
        ("model.factory", config.model.factory is not None, "use megacore's GPT"),
        ("data.factory", config.data.factory is not None, "name files of pairs in data.source"),
        ("data.sources", bool(config.data.sources), "name one file or folder in data.source"),
        ("data.order", config.data.order == "megatron", "leave it out"),
        ("graphs.mode", config.graphs.mode != "off", "set it to off"),
        (
            "model.mtp_loss_coef",
            config.model.num_mtp_layers > 0 and config.model.mtp_loss_coef > 0.0,
            "set it to 0",
        ),
    ):
        if others:
            problems.add(f"{shown('preference.loss')} does not go with {shown(key)}; {advice}")
    limit, longest = config.preference.max_length, config.model.seq_length // 2
    if limit is not None and limit > longest:
        problems.add(
            f"{shown('preference.max_length')} must be at most {longest:,}, half of "
            f"{shown('model.seq_length')}, since a sample has both answers of a pair; set it to "
            f"{longest:,}, or model.seq_length to {2 * limit:,}"
        )
