"""Import and export of a Hugging Face model against `transformers`, in one run.

    python benchmarks/bench_hf.py [--layers 5] [--rounds 3]

A random Llama of about 1.1 GB in float32 is made on the spot. Each contender is a process of its
own, started in turns, with the files in the page cache: `transformers` reads the folder with
`from_pretrained` and writes it with `save_pretrained`; megacore does the same in memory
(`import_hf`, `write_tensors`), and as commands through a checkpoint (`import-hf`, `export-hf`),
which verify checksums. `import-hf` also reads back what it wrote; "not read back" is the same
without that. Times are without imports, but `process` is the processor time of the whole process,
start and imports included; the best round is shown. `peak` is the growth of the process's peak
memory (VmHWM) over its imports, and `beside` the same without the weights in memory, in units of
the largest layer. `ratio` is time of `transformers` / time; processor time (`cpu s`) is less
disturbed by other work on the machine. Before the clock starts, each process touches and frees as
much memory as it will need: a virtual machine that hands free pages back to its host takes up to
four times as long to write into new ones, and which contender meets those is chance.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from _common import header, options

CONTENDERS = ("transformers", "megacore in memory", "not read back", "import-hf", "export-hf")


def make_model(folder: Path, layers: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        intermediate_size=5632,
        vocab_size=8192,
        max_position_embeddings=2048,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="500MB")


def memory(name: str) -> int:
    """Bytes of an entry of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith(name)]
    return 1024 * int(line.split()[1])


def prepare(contender: str) -> None:
    """Import everything, so that only the work is measured."""
    if contender == "transformers":
        from transformers.models.llama import modeling_llama  # noqa: F401
    else:
        pass


def work(contender: str, source: Path, out: Path) -> int:
    """Do a contender's work; returns the bytes of weights that it holds in memory."""
    if contender == "transformers":
        from transformers import LlamaForCausalLM

        model = LlamaForCausalLM.from_pretrained(source, dtype="auto")
        model.save_pretrained(out, max_shard_size="500MB")
        return sum(p.numel() * p.element_size() for p in model.parameters())
    if contender == "megacore in memory":
        from megatrain.hf import HFTensors, config_to_hf, import_hf
        from megatrain.hf_folder import write_json, write_tensors

        imported = import_hf(source)
        values = dict((i.name, p.detach()) for i, p in imported.chunk.param_infos())
        config = config_to_hf(imported.model, imported.moe)
        dtype = next(iter(values.values())).dtype
        tensors = HFTensors(config["model_type"], imported.model, imported.moe, dtype=dtype)
        out.mkdir()
        write_json(out / "config.json", config)
        read = lambda name, first, last, _: values[name][first:last]  # noqa: E731
        parts = ([value] for _, value in tensors.whole(read))
        write_tensors(out, tensors.specs, parts, max_shard_bytes=500_000_000)
        return sum(p.numel() * p.element_size() for p in values.values())
    if contender in ("import-hf", "not read back"):
        from megatrain.checkpoint import checked_files
        from megatrain.hf.import_checkpoint import import_checkpoint

        if contender == "not read back":
            checked_files.check_content = lambda *_: None
        import_checkpoint(source, out)
    else:
        from megatrain.hf.export_checkpoint import export_checkpoint

        export_checkpoint(source, out, max_shard_bytes=500_000_000)
    return 0


def child(contender: str, source: Path, out: Path) -> None:
    import torch

    torch.set_num_threads(1)
    prepare(contender)
    size = sum(file.stat().st_size for file in source.rglob("*") if file.is_file())
    before_touch = time.process_time()
    torch.ones(5 * size // 2, dtype=torch.uint8)  # freed at once: see the docstring
    touch_cpu_s = time.process_time() - before_touch
    Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
    before = memory("VmRSS")
    start, cpu_start = time.perf_counter(), time.process_time()
    held = work(contender, source, out)
    seconds, cpu_s = time.perf_counter() - start, time.process_time() - cpu_start
    print(
        json.dumps(
            [seconds, memory("VmHWM") - before, held, cpu_s, time.process_time() - touch_cpu_s]
        )
    )


def main() -> None:
    parser = options(__doc__)
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--folder", help="folder for the files (default: that of temporary files)")
    parser.add_argument("--child", nargs=3, help="internal: contender, source, out")
    arguments = parser.parse_args()
    if arguments.child:
        contender, source, out = arguments.child
        child(contender, Path(source), Path(out))
        return
    results: dict[str, list[list[float]]] = {name: [] for name in CONTENDERS}
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        made = Path(folder) / "model"
        make_model(made, arguments.layers)
        size = sum(file.stat().st_size for file in made.glob("*.safetensors"))
        # q and o, k and v, the MLP, the norms; the embedding is smaller.
        layer = 4 * (2 * 2048**2 + 2 * 2048 * 1024 + 3 * 2048 * 5632 + 2 * 2048)
        for round_number in range(arguments.rounds):
            for name in CONTENDERS:
                out = Path(folder) / f"{name.replace(' ', '-')}-{round_number}"
                source = made if name != "export-hf" else Path(folder) / f"import-hf-{round_number}"
                command = [sys.executable, __file__, "--child", name, str(source), str(out)]
                ended = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                results[name].append(json.loads(ended.stdout.splitlines()[-1]))
                if name != "import-hf":
                    subprocess.run(["rm", "-rf", str(out)], check=True)
            subprocess.run(["rm", "-rf", str(source)], check=True)
    print(f"{header('torch', 'transformers', 'safetensors')}")
    print(f"# {size / 1e9:.2f} GB, largest layer {layer / 1e6:.0f} MB; best of {arguments.rounds}")
    print(
        "contender          |  seconds  ratio |  cpu s  ratio | process  ratio | peak MB | beside"
    )
    base, cpu_base, all_base = (min(r[i] for r in results["transformers"]) for i in (0, 3, 4))
    for name, rounds in results.items():
        seconds, peak = min(r[0] for r in rounds), min(r[1] for r in rounds)
        held, (cpu_s, all_s) = rounds[0][2], (min(r[i] for r in rounds) for i in (3, 4))
        print(
            f"{name:18s} | {seconds:8.2f} {base / seconds:5.2f}x | "
            f"{cpu_s:6.2f} {cpu_base / cpu_s:5.2f}x | {all_s:7.2f} {all_base / all_s:5.2f}x | "
            f"{peak / 1e6:7.0f} | {(peak - held) / layer:6.2f}"
        )


if __name__ == "__main__":
    main()
