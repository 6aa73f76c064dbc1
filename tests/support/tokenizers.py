"""Small tokenizers of usual kinds, made from a few sentences, and their transformers twins."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

TEXTS = [
    "The quick brown fox jumps over the lazy dog, twice.\n",
    "  def add(a, b):\n        return a + b  # naïve 😀\n\n\n",
    "Überraschung: 1234 + 5678 = 6912!\r\n\tend of\u00a0it\n",
]


def save_llama_like(
    folder: Path, *, adds_bos: bool = True, adds_eos: bool = False, **config: Any
) -> Path:
    """Save a BPE of words with a prefixed space and bytes for unknown characters, as Llama 2's.

    Args:
        folder: Folder of ``tokenizer.json`` and ``tokenizer_config.json``.
        adds_bos: Whether the post-processor puts ``<s>`` before a text.
        adds_eos: Whether it puts ``</s>`` after one.
        config: Other entries of the configuration.

    Returns:
        The path of ``tokenizer.json``.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    specials = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE(unk_token="<unk>"))
    steps = [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    trained.normalizer = normalizers.Sequence(steps)
    # Without line ends, which Llama's vocabulary has as bytes only.
    words = " ".join(TEXTS).split()
    trained.train_from_iterator(
        words * 3, trainers.BpeTrainer(vocab_size=420, special_tokens=specials, show_progress=False)
    )
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    tokenizer = Tokenizer(
        models.BPE(model["vocab"], merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(steps)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(specials[:3])
    single = " ".join(["<s>"] * adds_bos + ["$A"] + ["</s>"] * adds_eos)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single, pair=f"{single} $B:1", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(
        json.dumps({**names, "tokenizer_class": "PreTrainedTokenizerFast", **config})
    )
    return folder / "tokenizer.json"


def save_byte_level(folder: Path) -> Path:
    """Save a byte-level BPE with GPT-2's regular expression, as Qwen's; returns its path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def save_unigram(folder: Path) -> Path:
    """Save a unigram model whose words begin with a space, as T5's; returns its path."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]
    )
    trainer = trainers.UnigramTrainer(
        vocab_size=120, special_tokens=["<unk>", "</s>"], unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS * 3, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"
