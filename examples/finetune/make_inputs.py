"""Write inputs of the examples: a tiny Hugging Face model with a chat template, and its data.

Usage: ``make_inputs.py FOLDER`` writes ``FOLDER/model``, ``FOLDER/conversations.jsonl`` and
``FOLDER/pairs.jsonl``, of a right and a wrong answer. The weights are random, so nothing is
downloaded; use any supported model in its place.
"""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"]
WORDS += ["eleven"]
TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\\n' }}"
    "{{ message.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def conversations() -> list[dict[str, list[dict[str, str]]]]:
    """Two questions and answers each: a sum, and its successor."""
    rows = []
    for first, second in itertools.product(range(6), repeat=2):
        turns = [
            ("user", f"What is {WORDS[first]} plus {WORDS[second]}?"),
            ("assistant", f"It is {WORDS[first + second]}."),
            ("user", "And one more?"),
            ("assistant", f"Then it is {WORDS[first + second + 1]}."),
        ]
        rows.append({"messages": [{"role": role, "content": text} for role, text in turns]})
    return rows


def pairs() -> list[dict[str, list[dict[str, str]]]]:
    """A right and a wrong answer to each question about a sum."""
    rows = []
    for first, second in itertools.product(range(6), repeat=2):
        right, wrong = first + second, (first + second + 1 + first % 3) % len(WORDS)
        turns = {
            "prompt": ("user", f"What is {WORDS[first]} plus {WORDS[second]}?"),
            "chosen": ("assistant", f"It is {WORDS[right]}."),
            "rejected": ("assistant", f"Surely {WORDS[wrong]}!"),
        }
        rows.append({k: [{"role": role, "content": text}] for k, (role, text) in turns.items()})
    return rows


def tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """A tokenizer of bytes and frequent pairs."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=384,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts, trainer)
    whole = PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|im_end|>")
    whole.chat_template = TEMPLATE
    return whole


def main(folder: Path) -> None:
    """Write all."""
    rows = conversations()
    chosen = tokenizer([turn["content"] for row in rows for turn in row["messages"]])
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(chosen),
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=128,
        )
    )
    model.save_pretrained(folder / "model")
    chosen.save_pretrained(folder / "model")
    for name, written in (("conversations", rows), ("pairs", pairs())):
        lines = "".join(json.dumps(row) + "\n" for row in written)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
