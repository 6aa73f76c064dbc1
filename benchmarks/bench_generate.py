"""Generation with kept keys and values against computing every token's whole context, in one run.

    python benchmarks/bench_generate.py [--config examples/demo.toml] [--tokens 256] [--rounds 3]

The model is that of the configuration, with random weights, which take the same time; greedy. Its
context is `--context` tokens, so that 256 tokens fit; the last row has the configuration's own. The
contenders take turns; the best round is shown, in processor time of one thread, and both must
choose the same tokens. ``ratio`` is time without / time with kept keys and values. The last two
columns have a dense model of the same width and depth, ours and a Llama of `transformers` with its
cache (if installed), in turns.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from _common import header, options, take_turns
from megacore.parallel import ProcessGroups
from megacore.parallel.batch import Microbatch
from megatrain.config import Config, MoEConfig, load_config, resolve
from megatrain.generation.decoding import Sampling, generate
from megatrain.models.gpt import GPTChunk

GREEDY = Sampling(temperature=0.0)


def whole_model(config: Config, *, context: int, moe: MoEConfig) -> GPTChunk:
    model = config.model.model_copy(update={"seq_length": context})
    return GPTChunk(
        model,
        layers=range(model.num_layers),
        has_embedding=True,
        has_head=True,
        groups=ProcessGroups.single(),
        moe=moe,
    ).eval()


@torch.inference_mode()
def without_past(model: GPTChunk, tokens_BS: Tensor, count: int) -> Tensor:
    """The same tokens, each from its whole context (see `stream` for which tokens that has)."""
    begin, limit = 0, model.shape.seq_length
    for _ in range(count):
        end = tokens_BS.shape[1]
        begin = end - (limit + 1) // 2 if end - begin > limit else begin
        window_BS = tokens_BS[:, begin:]
        ids_B = torch.arange(len(window_BS))
        batch = Microbatch(tokens=window_BS, labels=None, sample_ids=ids_B, step=0)
        best_B = model.logits(None, batch, last_only=True)[:, 0].argmax(-1)
        tokens_BS = torch.cat((tokens_BS, best_B[:, None]), 1)
    return tokens_BS


def dense(config: Config, prompts_BS: Tensor, count: int, context: int, rounds: int) -> str:
    """Times per token of a dense model, ours and that of `transformers`, as two columns."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return "-"
    sizes = config.model
    llama = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=sizes.hidden_size,
            num_hidden_layers=sizes.num_layers,
            num_attention_heads=sizes.num_heads,
            num_key_value_heads=sizes.num_kv_heads,
            intermediate_size=sizes.ffn_hidden_size,
            vocab_size=sizes.vocab_size,
            max_position_embeddings=context,
        )
    ).eval()
    settings = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    model = whole_model(config, context=context, moe=MoEConfig())
    times = take_turns(
        {
            "ours": partial(generate, model, prompts_BS, max_new_tokens=count, sampling=GREEDY),
            "theirs": partial(llama.generate, prompts_BS, max_new_tokens=count, **settings),
        },
        rounds=rounds,
        clock=time.process_time,
    )
    ours, theirs = (1e3 * min(times[name]) / count for name in ("ours", "theirs"))
    return f"{ours:6.2f} ms/tok {theirs:6.2f} ms/tok {ours / theirs:5.2f}x"


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--config", default=Path(__file__).parents[1] / "examples" / "demo.toml")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    config = load_config(arguments.config)
    settings = config.model_copy(update={"parallel": type(config.parallel)()})
    config = resolve(settings, 1, vocab_size=256, cuda=False)
    count = arguments.tokens
    print(
        f"{header('torch')}\n# {count} tokens after {arguments.prompt}; best of {arguments.rounds}"
    )
    print("context | batch |    with past | without past  ratio | dense: ours, transformers, ratio")
    for context, batch in (
        (arguments.context, 1),
        (arguments.context, 8),
        (arguments.context, 32),
        (config.model.seq_length, 1),
    ):
        model = whole_model(config, context=context, moe=config.moe)
        prompts_BS = torch.randint(0, 256, (batch, arguments.prompt))
        with_past = generate(model, prompts_BS, max_new_tokens=count, sampling=GREEDY)
        assert torch.equal(with_past, without_past(model, prompts_BS, count))
        times = take_turns(
            {
                "with": partial(generate, model, prompts_BS, max_new_tokens=count, sampling=GREEDY),
                "without": partial(without_past, model, prompts_BS, count),
            },
            rounds=arguments.rounds,
            warmup=0,
            clock=time.process_time,
        )
        ours, plain = (min(times[name]) for name in ("with", "without"))
        fits = context > count
        others = dense(config, prompts_BS, count, context, arguments.rounds) if fits else "-"
        print(
            f"{context:7d} | {batch:5d} | {1e3 * ours / count:6.2f} ms/tok | "
            f"{1e3 * plain / count:6.2f} ms/tok {plain / ours:5.1f}x | "
            f"{others}",
            flush=True,
        )


if __name__ == "__main__":
    main()
