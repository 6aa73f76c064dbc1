from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megacore.errors import DataError
from megatrain.cli import main
from megatrain.config import DataConfig
from megatrain.data import ByteTokenizer, load_data, read_indexed, write_indexed
from megatrain.data import loading as loading_module
from megatrain.data import prepared as prepared_module
from megatrain.data import records as records_module
from megatrain.data.prepare import PrepareOptions, prepare
from megatrain.data.records import shards_of

SEPARATOR = "\n\n"


def _jsonl(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


def _documents(prefix: Path) -> list[str]:
    indexed = read_indexed(prefix)
    return [
        ByteTokenizer().decode(indexed.sequence(n).tolist()) for n in range(len(indexed.lengths))
    ]


@pytest.fixture
def small_shards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "SHARD_BYTES", 100)
    monkeypatch.setattr(records_module, "BLOCK_BYTES", 20)


@pytest.mark.usefixtures("small_shards")
def test_every_line_is_one_document_in_the_order_of_the_file(tmp_path: Path) -> None:
    texts = [f"document {n} " + "é" * (n % 40) for n in range(60)]
    path = _jsonl(tmp_path / "a.jsonl", texts)
    result = prepare([path], tmp_path / "out", PrepareOptions())
    assert _documents(tmp_path / "out") == [text + SEPARATOR for text in texts]
    assert result.num_documents == 60
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.jsonl", "out.bin", "out.idx"]


@pytest.mark.usefixtures("small_shards")
def test_a_text_file_is_one_document_across_all_shards(tmp_path: Path) -> None:
    files = []
    for name in ("one", "two"):
        files.append(tmp_path / f"{name}.txt")
        files[-1].write_text("".join(f"{name} line {n}\n" for n in range(50)))
    prepare(files, tmp_path / "out", PrepareOptions())
    assert _documents(tmp_path / "out") == [path.read_text() + SEPARATOR for path in files]


def test_the_number_of_processes_does_not_change_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [_jsonl(tmp_path / f"{n}.jsonl", [f"text {n} {k}" for k in range(9)]) for n in range(4)]
    prepare(files, tmp_path / "one", PrepareOptions(), workers=1)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    prepare(files, tmp_path / "two", PrepareOptions(), workers=2)
    assert (tmp_path / "one.bin").read_bytes() == (tmp_path / "two.bin").read_bytes()
    assert (tmp_path / "one.idx").read_bytes() == (tmp_path / "two.idx").read_bytes()


def test_an_interrupted_call_continues_with_the_finished_parts(tmp_path: Path) -> None:
    files = [_jsonl(tmp_path / f"{n}.jsonl", [f"text {n}"]) for n in range(5)]
    prepare(files, tmp_path / "whole", PrepareOptions(), workers=1)
    done: list[int] = []

    def stop_after_three(finished: int, total: int) -> None:
        assert total == 5
        done.append(finished)
        if finished == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare(files, tmp_path / "x", PrepareOptions(), workers=1, progress=stop_after_three)
    assert not (tmp_path / "x.bin").exists()
    done.clear()
    prepare(
        files,
        tmp_path / "x",
        PrepareOptions(),
        workers=1,
        progress=lambda *counts: done.append(counts[0]),
    )
    assert done == [3, 4, 5]
    assert (tmp_path / "x.bin").read_bytes() == (tmp_path / "whole.bin").read_bytes()


def test_kill_9_leaves_no_half_file_and_the_next_call_completes(tmp_path: Path) -> None:
    files = [
        str(_jsonl(tmp_path / f"{n}.jsonl", [f"text {n} {k}" * 50 for k in range(4000)]))
        for n in range(6)
    ]
    command = [sys.executable, "-m", "megacore", "data", "prepare", *files]
    command += ["-o", str(tmp_path / "x"), "--workers", "1"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    parts = tmp_path / "x.parts"
    while process.poll() is None and not list(parts.glob("*[0-9].json")):
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.wait()
    if process.returncode == -signal.SIGKILL:  # else it was faster than this test
        assert not (tmp_path / "x.idx").exists()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    assert len(_documents(tmp_path / "x")) == 24_000
    assert not parts.exists()


def test_other_options_start_anew(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"text": "one", "body": "two"}) + "\n")

    def stop(finished: int, total: int) -> None:
        if finished == total:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepare([path], tmp_path / "x", PrepareOptions(), progress=stop)
    prepare([path], tmp_path / "x", PrepareOptions(field="body"))
    assert _documents(tmp_path / "x") == ["two" + SEPARATOR]


def test_parts_of_other_shards_are_not_continued(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = [f"document {n}" for n in range(60)]
    path = _jsonl(tmp_path / "a.jsonl", texts)

    def stop(finished: int, total: int) -> None:
        if 2 * finished > total:
            raise KeyboardInterrupt

    for size in (300, 200):
        monkeypatch.setattr(records_module, "SHARD_BYTES", size)
        with pytest.raises(KeyboardInterrupt):
            prepare([path], tmp_path / "x", PrepareOptions(), workers=1, progress=stop)
    monkeypatch.undo()
    prepare([path], tmp_path / "x", PrepareOptions(), workers=1)
    assert _documents(tmp_path / "x") == [text + SEPARATOR for text in texts]


def test_a_small_file_of_lines_has_work_for_several_processes(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "a.jsonl", ["x" * 1000] * 4000)
    assert len(shards_of(path, "jsonl")) == 4
    assert len(shards_of(path, "text")) == 1


def test_processes_that_tokenize_do_not_import_torch() -> None:
    code = "import sys, megatrain.data.prepare; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


BAD = [
    (b'{"text": "x"}\n{"text": "y"\n', r"a\.jsonl, line 2, column 13: not valid JSON"),
    (b'{"text": "x"}\n{"body": 1}\n', r'a\.jsonl, line 2: no field "text"; it has body'),
    (b'{"text": "x"}\n{"text": 7}\n', r'a\.jsonl, line 2: the field "text" must be text, got int'),
    (
        b'{"text": "x"}\n{"text": "a\\ud83d"}\n',
        r"a\.jsonl, line 2: the text has \\ud83d, half of a",
    ),
    (b'{"text": "x"}\n' + b"[" * 100_000 + b"\n", r"a\.jsonl, line 2: nested too deeply"),
    (
        b'{"text": "x"}\n{"text": "y", "n": ' + b"9" * 5000 + b"}\n",
        r"a\.jsonl, line 2: an integer has more than 4,300 digits",
    ),
    (
        b'{"text": "x"}\n{"text": ["y", {}, 1]}\n',
        r'line 2: the field "text" must be text or a conversation, .* a list with int and str',
    ),
    (b'{"text": "x"}\n[1]\n', r"line 2: expected a JSON object, got list"),
    (b'{"text": "x"}\n{"text": "abc\xe9"}\n', r"a\.jsonl, line 2: not UTF-8 text: byte 27 is 0xe9"),
]


@pytest.mark.parametrize(("raw", "message"), BAD)
def test_a_bad_record_is_one_sentence_and_can_be_skipped(
    tmp_path: Path, raw: bytes, message: str
) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(raw)
    advice = "; --skip-bad leaves such records out"
    with pytest.raises(DataError, match=message + ".*" + advice):
        prepare([path], tmp_path / "x", PrepareOptions(advice=advice))
    result = prepare([path], tmp_path / "x", PrepareOptions(skip_bad=True))
    assert (result.num_documents, result.num_skipped) == (1, 1)
    assert _documents(tmp_path / "x") == ["x" + SEPARATOR]


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", r"a\.jsonl is empty"),
        ("x".encode("utf-16"), r"a\.jsonl is UTF-16, not text in UTF-8"),
        (b"\x1f\x8b\x08", r"cannot read data file .*a\.jsonl: Compressed file ended before"),
        (b"\n\n", r"a\.jsonl and all other files have no text"),
    ],
)
def test_a_file_without_usable_text_is_named(tmp_path: Path, raw: bytes, message: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(raw)
    with pytest.raises(DataError, match=message):
        prepare([path], tmp_path / "x", PrepareOptions())


def test_parquet_files_are_read_by_column(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    pq = pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    texts = [f"row {n}" for n in range(10)]
    pq.write_table(pa.table({"body": texts}), path, row_group_size=3)
    prepare([path], tmp_path / "x", PrepareOptions(field="body"))
    assert _documents(tmp_path / "x") == [text + SEPARATOR for text in texts]
    with pytest.raises(DataError, match=r'a\.parquet has no column "text"; it has body'):
        prepare([path], tmp_path / "x", PrepareOptions())
    pq.write_table(pa.table({"text": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match=r"a\.parquet is a parquet file without rows"):
        prepare([path], tmp_path / "x", PrepareOptions())
    path.write_bytes(b"")
    with pytest.raises(DataError, match=r"a\.parquet is not a file of the parquet format: it h"):
        prepare([path], tmp_path / "x", PrepareOptions())


def test_the_token_that_ends_documents_is_that_of_the_tokenizer(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"a": 0, "b": 1, "<eos>": 2, "[UNK]": 3}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    name = str(tmp_path / "tokenizer.json")
    tokenizer.save(name)
    path = _jsonl(tmp_path / "a.jsonl", ["a b", "", "b"])

    def tokens(**options: str) -> list[int]:
        result = prepare([path], tmp_path / "x", PrepareOptions(tokenizer=name, **options))
        assert result.num_empty == 1
        found: list[int] = read_indexed(tmp_path / "x").tokens.tolist()
        return found

    assert tokens() == [0, 1, 2, 1, 2]
    assert tokens(eod="") == [0, 1, 1]
    assert tokens(eod="a") == [0, 1, 0, 1, 0]
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "b"}}')
    assert tokens() == [0, 1, 1, 1, 1]
    with pytest.raises(DataError, match='has no token "z"'):
        tokens(eod="z")


def test_json_lines_train_from_a_cache_that_is_made_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = _jsonl(tmp_path / "a.jsonl", [f"document {n}" for n in range(50)])
    config = DataConfig(source=str(path), cache=str(tmp_path / "cache"))
    data = load_data(config, seq_length=16, seed=0)
    expected = "".join(f"document {n}{SEPARATOR}" for n in range(50)).encode()
    assert bytes(data.sources["a.jsonl"].tokens.astype("u1")) == expected

    def fail(*_: object, **__: object) -> None:
        raise AssertionError("prepared twice")

    monkeypatch.setattr(prepared_module, "prepare", fail)
    again = load_data(config, seq_length=16, seed=0)
    assert (again.train.sample(3).tokens == data.train.sample(3).tokens).all()


def test_much_text_is_prepared_instead_of_held_in_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in "ab":
        (folder / f"{name}.txt").write_text(name * 100)
    config = DataConfig(source=str(folder), cache=str(tmp_path / "cache"))
    load_data(config, seq_length=16, seed=0)
    assert not (tmp_path / "cache").exists()
    monkeypatch.setattr(loading_module, "IN_MEMORY_BYTES", 100)
    source = load_data(config, seq_length=16, seed=0).sources["texts"]
    assert source.indexed is not None
    assert source.num_documents == 2


def test_check_names_the_first_bad_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_indexed(tmp_path / "x", [[1], [2, 300], [3]], vocab_size=400)
    write_indexed(tmp_path / "empty", [[1], [], [3]], vocab_size=400)
    assert main(["data", "check", str(tmp_path / "x")]) == 0
    assert "3 documents are good" in capsys.readouterr().out
    assert main(["data", "check", str(tmp_path / "x"), "--tokenizer", "bytes"]) == 2
    assert "x.bin: document 1 holds token id 300 at its position 1" in capsys.readouterr().err
    assert main(["data", "check", str(tmp_path / "empty")]) == 2
    assert "empty.idx: document 1 is empty" in capsys.readouterr().err


def test_info_merge_and_prepare_from_the_command_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = _jsonl(tmp_path / "a.jsonl", ["one", "three"])
    prefix, both = str(tmp_path / "x"), str(tmp_path / "both")
    assert main(["data", "prepare", str(path), "--output", prefix]) == 0
    assert main(["data", "merge", prefix, prefix, "-o", both]) == 0
    assert _documents(Path(both)) == _documents(Path(prefix)) * 2
    capsys.readouterr()
    assert main(["data", "info", both]) == 0
    assert "4 documents, 24 tokens, uint16, 48 bytes" in capsys.readouterr().out
    assert main(["data", "merge", prefix, "-o", prefix]) == 2
    assert "must not be one of the joined files" in capsys.readouterr().err
    assert main(["data", "prepare", str(path)]) == 2
    assert "needs the prefix of its result: --output" in capsys.readouterr().err
    assert main(["data", "info", str(tmp_path / "nothing")]) == 2
    assert "nothing.idx does not exist" in capsys.readouterr().err


def test_show_prints_the_samples_of_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_indexed(tmp_path / "x", [list(range(65, 91))] * 20, vocab_size=256)
    run = tmp_path / "run.toml"
    run.write_text(f'[data]\nsource = "{tmp_path / "x"}"\n[model]\nseq_length = 8\n')
    arguments = ["data", "show", str(run), "--count", "2", "--data.split=1,0"]
    arguments.append("--train.eval_interval=0")
    assert main([*arguments, "--json"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    config = DataConfig(source=str(tmp_path / "x"), split="1,0")
    train = load_data(config, seq_length=8, seed=1234).train
    assert [row["tokens"] for row in rows] == [train.sample(n).tokens.tolist() for n in range(2)]
    assert rows[0]["labels"] == train.sample(0).labels.tolist()
    assert rows[0]["loss_mask"] == [1] * 8
    for row in rows:  # every document begins with the letter A
        assert row["document_starts"] == [n for n, token in enumerate(row["tokens"]) if token == 65]
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    # A bar marks the start of a document.
    assert ByteTokenizer().decode(rows[0]["tokens"]).replace("A", "|A") in shown
    assert main([*arguments, "--set", "other"]) == 2
    assert 'must be one of train, got "other"' in capsys.readouterr().err


def test_show_colours_what_is_learned_and_marks_documents(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"prompt": "ask", "completion": "say"}, {"prompt": "a", "completion": "b"}]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    arguments = ["data", "show", f"--data.source={path}", f"--data.cache={tmp_path / 'cache'}"]
    arguments += ["--data.field=prompt,completion", "--data.packing=best_fit", "--count=1"]
    arguments += ["--data.document_mask=true", "--data.split=1,0", "--train.eval_interval=0"]
    run = tmp_path / "run.toml"
    run.write_text("[model]\nseq_length = 16\n")
    arguments.insert(2, str(run))
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert main(arguments) == 0
    shown = capsys.readouterr().out
    assert "8 of 16 labels count, starts of documents: 3" in shown
    bar, dim, green, end = "\x1b[1;36m|\x1b[0m", "\x1b[2m", "\x1b[32m", "\x1b[0m"
    for prompt, answer in (("ask", "say"), ("a", "b")):
        assert f"{bar}{dim}{prompt}{end}{green}{answer}" in shown
    assert f"{bar}{dim}····{end}" in shown
    monkeypatch.delenv("FORCE_COLOR")
    assert main(arguments) == 0
    assert "|ask{+say\n\n+}|a{+b\n\n+}|····" in capsys.readouterr().out
    assert main([*arguments, "--json"]) == 0
    row = json.loads(capsys.readouterr().out)
    assert sum(row["loss_mask"]) == 8
    assert len(row["document_starts"]) == 3
