"""A tokenizer with a chat template, made from a few sentences, and conversations for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

# As in chatml, without and with marks of the answers.
CHATML = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}"
    "{% if message.role not in ['system', 'user', 'assistant', 'tool'] %}"
    "{{ raise_exception('no role ' + message.role) }}{% endif %}"
    "{{ '<|im_start|>' + message.role + '\\n' }}"
    "{{ message.content + '<|im_end|>' }}{{ '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
MARKED = CHATML.replace(
    "{{ message.content + '<|im_end|>' }}{{ '\\n' }}",
    "{% if message.role == 'assistant' %}{% generation %}"
    "{{ message.content + '<|im_end|>\\n' }}{% endgeneration %}"
    "{% else %}{{ message.content + '<|im_end|>' }}{{ '\\n' }}{% endif %}",
)

CONVERSATIONS: list[dict[str, Any]] = [
    {
        "messages": [
            {"role": "system", "content": "Answer in words."},
            {"role": "user", "content": "What is two and two?"},
            {"role": "assistant", "content": "Four, naïvely."},
            {"role": "user", "content": "And doubled?\nQuickly!"},
            {"role": "assistant", "content": "Eight 😀."},
        ]
    },
    {
        "messages": [
            {"role": "user", "content": "<b>Weather</b> & time?"},
            {"role": "assistant", "content": "Sunny"},
        ],
        "tools": [
            {"type": "function", "function": {"name": "<clock>", "description": "Zeit für é"}}
        ],
    },
]


def save_tokenizer(folder: Path, *, template: str) -> Any:
    """Save a small tokenizer of bytes and pairs with a template; return that of transformers."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=specials,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [message["content"] for row in CONVERSATIONS for message in row["messages"]]
    tokenizer.train_from_iterator(texts * 3, trainer)
    whole = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|endoftext|>", eos_token="<|im_end|>"
    )
    whole.chat_template = template
    whole.save_pretrained(folder)
    return whole
