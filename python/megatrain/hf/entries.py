"""Entries of ``config.json`` that are refused, and those without effect."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from megacore.errors import MegacoreError
from megatrain.hf.families import FAMILIES
from megatrain.hf.family import Family
from megatrain.hf.rope import ROPE_NAMES
from megatrain.hf_quantized import quantization_of

# Entries that do not change what the model computes.
_WITHOUT_EFFECT = frozenset(
    {
        "architectures",
        "auto_map",
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "id2label",
        "label2id",
        "model_type",
        "name_or_path",
        "num_labels",
        "output_router_logits",
        "problem_type",
        "quantization_config",
        "return_dict",
        "sep_token_id",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        # Of tokenizers, fine-tuning and other programs.
        "attn_implementation",
        "finetuning_task",
        "is_llama_config",
        "max_sequence_length",
        "prefix",
        "task_specific_params",
        "tokenizer_class",
        "transformers.js_config",
    }
)
# Entries that other programs write, with the only value that is true of all families.
_STATED: Mapping[str, Any] = {"is_causal": True}
_HARMLESS_STARTS = ("_", "unsloth_")
# Settings of `generate`, which `transformers` 4 wrote into config.json.
_GENERATION_NAMES = """
    assistant_confidence_threshold assistant_early_exit assistant_ensemble_weight
    assistant_lookbehind bad_words_ids begin_suppress_tokens cache_config cache_implementation
    compile_config constraints continuous_batching_config decoder_start_token_id disable_compile
    diversity_penalty do_sample dola_layers early_stopping encoder_no_repeat_ngram_size
    encoder_repetition_penalty epsilon_cutoff eta_cutoff exponential_decay_length_penalty
    force_words_ids forced_bos_token_id forced_eos_token_id guidance_scale is_assistant
    length_penalty low_memory max_cache_len max_length max_matching_ngram_size max_new_tokens
    max_time min_length min_new_tokens min_p no_repeat_ngram_size num_assistant_tokens
    num_assistant_tokens_schedule num_beam_groups num_beams num_return_sequences output_attentions
    output_hidden_states output_logits output_scores penalty_alpha prefill_chunk_size
    prompt_lookup_num_tokens remove_invalid_values renormalize_logits repetition_penalty
    return_dict_in_generate sequence_bias speculation_type stop_strings suppress_tokens
    target_lookbehind temperature token_healing top_h top_k top_p typical_p use_mtp
    watermarking_config
"""
_GENERATION = frozenset(_GENERATION_NAMES.split())
# Attention to chunks of long texts, the same as attention without chunks up to a length.
_CHUNKS, _CHUNKS_LIMIT = "dual_chunk_attention_config", "original_max_position_embeddings"


def family_of(config: Mapping[str, Any]) -> Family:
    """Return the family of a ``config.json``.

    Raises:
        MegacoreError: If its ``model_type`` is not supported.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        raise MegacoreError(
            f"model_type must be one of {', '.join(FAMILIES)} to be imported, got {kind!r}"
        )
    return FAMILIES[kind]


def refused_entries(family: Family, config: Mapping[str, Any], seq_length: int | None) -> list[str]:
    """Return a message for each kind of entry that is not supported or not known.

    Args:
        family: The family of the model.
        config: Content of ``config.json``.
        seq_length: Tokens per sequence, if they are chosen.
    """
    refused = []
    try:
        quantization_of(config)
    except MegacoreError as error:
        refused.append(str(error))
    stated = {**family.fixed, **family.stated, **_STATED}
    for name, supported in stated.items():
        value = config.get(name, supported)
        # To `transformers`, an empty switch is off.
        is_off = value is None and supported is not True
        if value != supported and not is_off:
            refused.append(
                f"{name} in config.json of a {family.model_type} model must be {supported!r}, got "
                f"{value!r}, which megacore does not support"
            )
    limit = longest_unchunked(config)
    if limit is not None and seq_length is not None and seq_length > limit:
        refused.append(
            f"seq_length must be at most {limit}, {_CHUNKS_LIMIT} of {_CHUNKS} in config.json, got "
            f"{seq_length}: longer texts are read in chunks, which megacore does not support"
        )
    known = {*_read_entries(family), *family.ignored, *stated}
    known |= _WITHOUT_EFFECT | _GENERATION
    known |= {_CHUNKS} if limit is not None else set()
    unknown = [
        f"{name} = {value!r}"
        for name, value in config.items()
        if name not in known
        and not name.startswith(_HARMLESS_STARTS)
        and value not in (None, False, [], {}, 0)
    ]
    if unknown:
        are, them, they_do = "is", "it", "it does"
        if len(unknown) > 1:
            are, them, they_do = "are", "them", "they do"
        refused.append(
            f"config.json has {', '.join(unknown)}, which {are} not known for {family.model_type} "
            f"models; remove {them}, or name {them} as --ignore of import-hf, if "
            f"{they_do} not change what the model computes"
        )
    return refused


def longest_unchunked(config: Mapping[str, Any]) -> int | None:
    """Return the tokens up to which attention in chunks is plain attention, if there are chunks."""
    chunks = config.get(_CHUNKS)
    limit = chunks.get(_CHUNKS_LIMIT) if isinstance(chunks, Mapping) else None
    return limit if isinstance(limit, int) and limit > 0 else None


def without_entries(config: Mapping[str, Any], ignored: Collection[str]) -> dict[str, Any]:
    """Return a ``config.json`` without the entries that a user declares to have no effect.

    Args:
        config: Content of ``config.json``.
        ignored: Names of entries that megacore does not read.

    Raises:
        MegacoreError: If there is no such entry, or megacore reads it.
    """
    family = family_of(config)
    for name in ignored:
        if name not in config:
            raise MegacoreError(
                f"--ignore must name an entry of config.json, got {name}, which it does not have"
            )
        if name in _read_entries(family):
            raise MegacoreError(
                f"--ignore must name an entry that does not change the model, got {name}, which a "
                f"{family.model_type} model of megacore depends on; change it in config.json"
            )
    return {name: value for name, value in config.items() if name not in ignored}


def _read_entries(family: Family) -> set[str]:
    names = {name for key in family.keys for name in key.theirs}
    names |= {name for rule in family.rules for name in rule.names}
    return names | ROPE_NAMES | {"model_type"}
