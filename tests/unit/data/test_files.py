"""Kinds of files, folders of many kinds, and both doors: prepare and sources of training."""

from __future__ import annotations

import gzip
import json
import re
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from megacore.errors import DataError
from megatrain.cli import main
from megatrain.config import DataConfig
from megatrain.data import (
    ByteTokenizer,
    load_data,
    load_tokens,
    read_indexed,
    records,
    write_indexed,
)
from megatrain.data.file_kinds import kind_of_file
from megatrain.data.files import find_files
from megatrain.data.prepare import PrepareOptions, prepare

SEPARATOR = "\n\n"
TEXTS = ["one", "two é", 'three "quoted" {"text": "no"}']
ROWS = [{"id": number, "text": text} for number, text in enumerate(TEXTS)]
LINES = "".join(json.dumps(row) + "\n" for row in ROWS)


def zstd(raw: bytes) -> bytes:
    pyarrow = pytest.importorskip("pyarrow")
    compressed: bytes = pyarrow.compress(raw, codec="zstd", asbytes=True)
    return compressed


def documents(source: Path, prefix: Path, **options: Any) -> list[str]:
    """Return the documents of a source as data prepare writes them."""
    found = find_files(source, options.get("kind"))
    prepare(found.files, prefix, PrepareOptions(**options), workers=1)
    indexed = read_indexed(prefix)
    texts = [
        ByteTokenizer().decode(indexed.sequence(n).tolist()) for n in range(len(indexed.lengths))
    ]
    return [text.removesuffix(SEPARATOR) for text in texts]


def trained(source: Path, cache: Path) -> str:
    """Return the text that training on a source reads."""
    config = DataConfig(source=str(source), cache=str(cache))
    data = load_data(config, seq_length=1, seed=0)
    [stream] = data.sources.values()
    return ByteTokenizer().decode(stream.tokens.tolist())


FORMS: dict[str, bytes] = {
    "lines.json": LINES.encode(),
    "lines.jsonl": LINES.encode(),
    "lines.ndjson": LINES.replace("\n", "\r\n").encode(),
    "lines.txt": LINES.encode(),
    "part-00000": LINES.encode(),
    "lines.00001": b"\xef\xbb\xbf" + LINES.encode(),
    "array.json": json.dumps(ROWS).encode(),
    "array.jsonl": json.dumps(ROWS, indent=1).encode(),
    "array": b"\n " + json.dumps(ROWS, indent=4).encode() + b"\n",
    "objects.json": "\n".join(json.dumps(row, indent=2) for row in ROWS).encode(),
    "objects.txt": "".join(json.dumps(row, indent="\t") for row in ROWS).encode(),
    "lines.json.gz": gzip.compress(LINES.encode()),
    "two members.jsonl.gz": gzip.compress(LINES[:9].encode()) + gzip.compress(LINES[9:].encode()),
    "array.gz": gzip.compress(json.dumps(ROWS).encode()),
}


@pytest.mark.parametrize("name", FORMS)
def test_records_are_read_in_any_form_under_any_name(name: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_bytes(FORMS[name])
    assert documents(path, tmp_path / "x") == TEXTS
    assert trained(path, tmp_path / "cache") == "".join(text + SEPARATOR for text in TEXTS)
    assert load_tokens(str(path), ByteTokenizer()).num_documents == len(TEXTS)


@pytest.mark.parametrize("name", ["lines.jsonl.zst", "array.json.zst"])
def test_zstd_is_read_and_the_missing_package_is_named(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / name
    half = LINES.encode()[:9], LINES.encode()[9:]
    skipped = b"\x50\x2a\x4d\x18\x04\0\0\0pzst"
    frames = skipped + zstd(half[0]) + skipped + zstd(half[1])
    path.write_bytes(frames if "lines" in name else zstd(FORMS["array"]))
    assert documents(path, tmp_path / "x") == TEXTS
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"cannot read data file .*zst: "):
        documents(path, tmp_path / "y")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match=r"needs pyarrow: pip install 'megacore\[parquet\]'"):
        kind_of_file(path)


def test_text_is_read_compressed_and_as_one_document(tmp_path: Path) -> None:
    text = "".join(f"line {number}\n" for number in range(20_000))
    (tmp_path / "a.txt.gz").write_bytes(gzip.compress(text.encode()))
    assert documents(tmp_path / "a.txt.gz", tmp_path / "x") == [text]
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode() + b"\xe9\n"))
    with pytest.raises(DataError, match=r"b\.txt\.gz, line 20001: not UTF-8 text"):
        documents(tmp_path / "b.txt.gz", tmp_path / "y")


def write_dataset(folder: Path, texts: list[str], *, extra: str | None = None) -> None:
    """Write a folder as ``datasets.Dataset.save_to_disk`` does, in two files of a stream each."""
    pa = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    names = [f"data-{number:05}-of-00002.arrow" for number in range(2)]
    half = len(texts) // 2
    parts = dict(zip(names, (texts[:half], texts[half:]), strict=True))
    if extra is not None:
        parts[extra] = ["no"]
    for name, part in parts.items():
        table = pa.table({"id": list(range(len(part))), "text": part})
        with pa.ipc.new_stream(str(folder / name), table.schema) as writer:
            writer.write_table(table, max_chunksize=2)
    state = {"_data_files": [{"filename": name} for name in names], "_fingerprint": "f"}
    (folder / "state.json").write_text(json.dumps(state, indent=2))
    info = {"description": "", "features": {"text": {"dtype": "string", "_type": "Value"}}}
    (folder / "dataset_info.json").write_text(json.dumps(info, indent=2))


def test_a_saved_dataset_is_its_arrow_files(tmp_path: Path) -> None:
    texts = [f"row {number}" for number in range(9)]
    write_dataset(tmp_path / "saved", texts, extra="cache-0123456789abcdef.arrow")
    assert documents(tmp_path / "saved", tmp_path / "x") == texts
    assert trained(tmp_path / "saved", tmp_path / "c") == "".join(t + SEPARATOR for t in texts)
    left_out = find_files(tmp_path / "saved").left_out
    assert [name.split()[0] for name in left_out] == [
        "cache-0123456789abcdef.arrow",
        "dataset_info.json",
        "state.json",
    ]
    (tmp_path / "saved" / "data-00001-of-00002.arrow").unlink()
    with pytest.raises(DataError, match=r"lacks its file data-00001-of-00002\.arrow"):
        find_files(tmp_path / "saved")


def test_splits_of_a_saved_dataset_are_not_mixed(tmp_path: Path) -> None:
    for split in ("train", "test"):
        write_dataset(tmp_path / "all" / split, [split] * 4)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DataError, match=r"with the splits train, test; give the folder of one"):
        find_files(tmp_path / "all")
    assert documents(tmp_path / "all" / "train", tmp_path / "x") == ["train"] * 4


def test_an_arrow_file_and_a_damaged_one(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    table = pa.table({"data": [{"text": text} for text in TEXTS]})
    path = tmp_path / "a.arrow"
    with pa.ipc.new_file(str(path), table.schema) as writer:
        writer.write_table(table)
    assert documents(path, tmp_path / "x", field="data.text") == TEXTS
    with pytest.raises(DataError, match=r'has no column "text"; it has data'):
        documents(path, tmp_path / "y")
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"a\.arrow is damaged: arrow of"):
        documents(path, tmp_path / "y", field="data.text")


def tar(path: Path) -> None:
    with tarfile.open(path, "w") as archive:
        archive.add(__file__, arcname="text.txt")


REFUSED: dict[str, tuple[bytes | Callable[[Path], None], str]] = {
    "a.csv": (b"id,text\n1,one\n", "a table of comma-separated values"),
    "a.tsv": (b"id\ttext\n1\tone\n", "a table of tab-separated values"),
    "a.tar": (tar, "a tar archive"),
    "a.txt": (tar, "a tar archive"),
    "a.zip": (b"PK\x03\x04rest", "a ZIP archive"),
    "a.jsonl.bz2": (b"BZh91AY&SYrest", "compressed with bzip2"),
    "a.jsonl.xz": (b"\xfd7zXZ\0rest", "compressed with xz"),
    "a.text": (b"text\0text", "binary, not text"),
    "a": (b"\x80\x04\x95rest", "of an unknown kind"),
    "a.dat": (b"plain text", 'of an unknown kind; kind = "text"'),
    "a.pdf": (b"%PDF-1.7\n", "a PDF file"),
    "a.parquet": (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
    "a.arrow": (b'{"text": "one"}', "not a file of the arrow format: it begins with"),
    "a.jsonl": ("x".encode("utf-16"), "UTF-16"),
    "b.jsonl": ("x".encode("utf-32"), "UTF-32"),
    "a.gz": (gzip.compress(b"PAR1rest"), "a compressed parquet file"),
    "a.idx": (b"MMIDIDX\0\0rest", "the index of token files"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_data_is_refused_by_what_it_is(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "good.txt").write_text("good")
    path = folder / name
    contents, what = REFUSED[name]
    if callable(contents):
        contents(path)
    else:
        path.write_bytes(contents)
    with pytest.raises(DataError) as alone:
        load_tokens(str(path), ByteTokenizer())
    assert f"data file {path} is {what}" in str(alone.value)
    with pytest.raises(DataError) as inside:
        trained(folder, tmp_path / "cache")
    assert f"holds files that cannot be read: {name} ({what}" in str(inside.value)
    assert main(["data", "prepare", str(folder), "-o", str(tmp_path / "x")]) == 2


def test_broken_and_circular_links_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("a")
    (tmp_path / "self").symlink_to(tmp_path)
    found = find_files(tmp_path)
    assert found.files == (tmp_path / "a.txt",)
    assert found.notes(tmp_path)[0].startswith(
        f"{tmp_path}: left out: self (a link to a folder that is read under another"
    )
    (tmp_path / "b.txt").symlink_to(tmp_path / "nothing")
    with pytest.raises(DataError, match=r"b\.txt \(a link to nothing\)"):
        find_files(tmp_path)


def test_a_description_is_text_only_if_it_is_asked_for(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("about")
    with pytest.raises(DataError, match=r"README\.md is a description, not data; kind = \"text\""):
        documents(tmp_path / "README.md", tmp_path / "x")
    assert documents(tmp_path / "README.md", tmp_path / "x", kind="text") == ["about"]


def test_a_folder_of_a_download_trains_on_its_data_only(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "corpus"
    (folder / "data").mkdir(parents=True)
    for number in range(3):
        raw = json.dumps({"text": f"gz {number}"}).encode()
        (folder / "data" / f"{number}.jsonl.gz").write_bytes(gzip.compress(raw))
    (folder / "more.jsonl").write_text('{"text": "plain"}\n')
    for name in ("README.md", "LICENSE", ".gitattributes", "dataset_infos.json", "corpus.py"):
        (folder / name).write_text("{}" if name.endswith("json") else "not a document")
    assert main(["data", "prepare", str(folder), "-o", str(tmp_path / "x")]) == 0
    out = capsys.readouterr().out
    assert "4 documents" in out
    for name in ("README.md", "LICENSE", ".gitattributes", "dataset_infos.json", "corpus.py"):
        assert name in out
    expected = "".join(f"gz {number}{SEPARATOR}" for number in range(3)) + f"plain{SEPARATOR}"
    assert trained(folder, tmp_path / "cache") == expected
    data = load_data(
        DataConfig(source=str(folder), cache=str(tmp_path / "cache")), seq_length=1, seed=0
    )
    assert data.notes[0].startswith(f"{folder}: left out: .gitattributes (hidden), LICENSE (a desc")


def test_links_to_files_of_the_folder_are_named_and_left_out(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere.jsonl"
    folder.mkdir()
    for path in (folder / "b.jsonl", elsewhere):
        path.write_text(json.dumps({"text": path.stem}) + "\n")
    for name, target in {"a": "b.jsonl", "c": elsewhere, "d": elsewhere, "e": "c.jsonl"}.items():
        (folder / f"{name}.jsonl").symlink_to(target)
    found = find_files(folder)
    assert [path.name for path in found.files] == ["b.jsonl", "c.jsonl"]
    reason = "a link to a file that is read under another name"
    assert found.left_out == tuple(f"{name}.jsonl ({reason})" for name in "ade")


@pytest.mark.parametrize(
    "name", ["a.jsonl.bak", "a.jsonl~", "a.json.part", "a.json.crdownload", "a.jsonl.gz.tmp"]
)
def test_copies_and_unfinished_files_are_refused_by_name(name: str, tmp_path: Path) -> None:
    for each in ("a.jsonl", name):
        (tmp_path / each).write_text('{"text": "a"}\n')
    with pytest.raises(DataError, match=rf"{re.escape(name)} \(by its name, a copy or an unf"):
        find_files(tmp_path)
    assert find_files(tmp_path / name).files == (tmp_path / name,)  # meant
    assert len(find_files(tmp_path, "jsonl").files) == 2


JSON_ERRORS = [
    ('[{"text": "a"},\n {"text": "b"\n', r"a\.json, line 3, column 1: not valid JSON: Expecting"),
    ('[{"text": "a"} {"text": "b"}]', r"line 1, column 16: not valid JSON: Expecting ',' or '\]'"),
    ('[{"text": "a"}]\n[]', r"line 2, column 1: not valid JSON: text after the end of the array"),
    ('[{"text": "a"},]', r"line 1, column 16: not valid JSON"),
    ('{\n"text": "a"\n}\n{\n"text": }', r"line 5, column 9: not valid JSON: Expecting value"),
    ('[{"text": "a"}, 12]', r"line 1: expected a JSON object, got int"),
    ('[{"text": "a"},\n{"body": "b"}]', r'line 2: no field "text"; it has body'),
    ('[{"text": "\\ud83d"}]', r"line 1: the text has \\ud83d, half of a surrogate pair"),
    ("[" * 100_000, r"a\.json, line 1: nested too deeply"),
    (
        '[{"text": "a"},\n{"n": ' + "9" * 5000 + "}]",
        r"a\.json, line 2: an integer has more than 4,3",
    ),
    ("[]", r"a\.json and all other files have no text"),
]


@pytest.mark.parametrize("raw", ['{"a": 1} and so on', '{"a": [\nand so on'])
def test_text_that_begins_like_json_has_advice(raw: str, tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text(raw)
    with pytest.raises(DataError, match=r"not valid JSON: .*--kind text\) reads it"):
        documents(path, tmp_path / "x")


@pytest.mark.parametrize(("raw", "message"), JSON_ERRORS)
def test_an_error_in_json_of_several_lines_has_its_place(
    raw: str, message: str, tmp_path: Path
) -> None:
    (tmp_path / "a.json").write_text(raw)
    with pytest.raises(DataError, match=message):
        documents(tmp_path / "a.json", tmp_path / "x")


def test_bytes_that_are_not_utf8_in_an_array_have_their_line(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b'[\n{"text": "abc\xe9"}]')
    with pytest.raises(DataError, match=r"a\.json, line 2: not UTF-8 text: byte 15 is 0xe9"):
        documents(tmp_path / "a.json", tmp_path / "x")


@given(
    texts=st.lists(st.text(max_size=8), min_size=1, max_size=5),
    indent=st.sampled_from([None, 0, 3]),
    form=st.sampled_from(["lines", "array", "objects"]),
    step=st.integers(1, 40),
)
def test_json_is_read_in_pieces_of_any_size(
    texts: list[str],
    indent: int | None,
    form: str,
    step: int,
) -> None:
    rows: Any = [{"text": text, "n": 10**step, "deep": [{"a": []}]} for text in texts]
    if form == "array":
        raw = json.dumps(rows, indent=indent)
    else:
        raw = "\n".join(json.dumps(row, indent=indent) for row in rows)

    class Slow:
        def __init__(self) -> None:
            self.at = 0

        def read(self, _: int) -> str:
            self.at += step
            return raw[self.at - step : self.at]

    text = records._JsonText(Slow())  # type: ignore[arg-type]
    values = text.elements() if text.next_character() == "[" else text.values()
    found = list(values)
    assert [value for _, value in found] == rows
    lines = [line for line, _ in found]
    assert lines == sorted(lines)
    assert lines[-1] <= raw.count("\n") + 1


# ---- random folders --------------------------------------------------------------------------

Maker = Callable[[Path, str], list[str]]


def _file(name: str, make: Callable[[str], bytes], *, count: int = 1) -> tuple[str, Maker]:
    def write(folder: Path, text: str) -> list[str]:
        (folder / name).write_bytes(make(text))
        return [f"{text}{n}" for n in range(count)] if count > 1 else [text] * count

    return name, write


def _rows(text: str) -> list[dict[str, str]]:
    return [{"text": f"{text}{n}"} for n in range(2)]


def _json_lines(text: str) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in _rows(text)).encode()


def _parquet(text: str) -> bytes:
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist(_rows(text)), sink)
    return bytes(sink.getvalue().to_pybytes())


def _arrow(text: str) -> bytes:
    import pyarrow as pa

    table = pa.Table.from_pylist(_rows(text))
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    return bytes(sink.getvalue().to_pybytes())


# Files that are read, with their number of documents.
GOOD = [
    _file("a.txt", str.encode),
    _file("b.text.gz", lambda text: gzip.compress(text.encode())),
    _file("c.json", _json_lines, count=2),
    _file("d.jsonl", _json_lines, count=2),
    _file("e", _json_lines, count=2),
    _file("f.json", lambda text: json.dumps(_rows(text)).encode(), count=2),
    _file("g.json", lambda text: json.dumps(_rows(text), indent=2).encode(), count=2),
    _file("h.jsonl.gz", lambda text: gzip.compress(_json_lines(text)), count=2),
    _file("i.jsonl.zst", lambda text: zstd(_json_lines(text)), count=2),
    _file("j.parquet", _parquet, count=2),
    _file("k.arrow", _arrow, count=2),
]
# Files that are left out and named.
LEFT_OUT = [
    _file(name, lambda text: b"about " + text.encode(), count=0)
    for name in (
        "README.md",
        "LICENSE",
        "dataset_card.md",
        ".gitattributes",
        "conf.yaml",
        "merges.txt",
    )
] + [
    _file("dataset_info.json", lambda text: json.dumps({"text": text}).encode(), count=0),
    _file("picture.png", lambda text: b"\x89PNG\0" + text.encode(), count=0),
    _file("z.txt", lambda text: text[:0].encode(), count=0),
]
# Files that are refused and named.
BAD = [
    _file("n.csv", lambda text: f"id,text\n1,{text}\n".encode(), count=0),
    _file("o.tar", lambda text: b"\0" * 257 + b"ustar" + text.encode(), count=0),
    _file("p.bin", lambda text: text.encode(), count=0),
    _file("q.jsonl.bz2", lambda text: b"BZh91AY&SY" + text.encode(), count=0),
    _file("r.unknown", lambda text: text.encode(), count=0),
]


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    chosen=st.sets(st.sampled_from(range(len(GOOD) + len(LEFT_OUT) + len(BAD)))),
    folders=st.lists(st.sampled_from(["", "sub"]), min_size=25, max_size=25),
)
def test_every_document_of_a_folder_is_one_that_somebody_wrote(
    tmp_path_factory: pytest.TempPathFactory, chosen: set[int], folders: list[str]
) -> None:
    pytest.importorskip("pyarrow")
    root = tmp_path_factory.mktemp("mixture")
    source = root / "source"
    (source / "sub").mkdir(parents=True)
    kinds = GOOD + LEFT_OUT + BAD
    written: dict[str, list[str]] = {}
    for number in sorted(chosen):
        name, write = kinds[number]
        written[name] = write(source / folders[number], f"document {number} ")
    bad = [name for name, _ in BAD if name in written]
    texts = sorted(text for part in written.values() for text in part)
    if bad or not texts:
        for read in (lambda: documents(source, root / "x"), lambda: trained(source, root / "c")):
            with pytest.raises(DataError) as error:
                read()
            assert all(name in str(error.value) for name in bad)
        return
    assert sorted(documents(source, root / "x")) == texts
    stream = trained(source, root / "c")
    assert sorted(part for part in stream.split(SEPARATOR) if part) == texts
    left_out = " ".join(find_files(source).left_out)
    assert all(name in left_out for name, _ in LEFT_OUT if name in written)


# ---- names -----------------------------------------------------------------------------------


def test_two_readings_of_a_name_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "a.txt").write_text("folder")
    write_indexed("text", [[65, 66]], vocab_size=256)
    for read in (
        lambda: load_tokens("text", ByteTokenizer()),
        lambda: trained(Path("text"), tmp_path),
    ):
        with pytest.raises(DataError, match=r"text is both a folder and the token files text\.bin"):
            read()
    assert load_tokens("text/", ByteTokenizer()).num_tokens == 6
    assert load_tokens("text.bin", ByteTokenizer()).num_tokens == 2
    sources: list[Any] = [{"path": "text", "kind": "text"}]
    assert (
        load_data(DataConfig(sources=sources), seq_length=1, seed=0).sources["text"].num_tokens == 6
    )
    sources = [{"path": "text", "kind": "indexed"}]
    assert (
        load_data(DataConfig(sources=sources), seq_length=1, seed=0).sources["text"].num_tokens == 2
    )
    (tmp_path / "stdlib").mkdir()
    with pytest.raises(
        DataError, match=r"stdlib is both text that comes with Python and a name in"
    ):
        load_tokens("stdlib", ByteTokenizer())
    with pytest.raises(DataError, match=r"patterns are not expanded here, give the folder"):
        load_tokens("*.jsonl", ByteTokenizer())


def test_nothing_foreign_is_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.txt").write_text("one")
    arguments = ["data", "prepare", str(tmp_path / "a.txt"), "-o", str(tmp_path / "x")]
    assert main(arguments) == 0
    before = (tmp_path / "x.bin").read_bytes()
    (tmp_path / "a.txt").write_text("two")
    assert main(arguments) == 2
    assert "x.bin exists already; choose another prefix, or replace" in capsys.readouterr().err
    assert (tmp_path / "x.bin").read_bytes() == before
    merge = ["data", "merge", str(tmp_path / "x"), "-o", str(tmp_path / "y")]
    (tmp_path / "y.mask").write_text("of somebody else")
    assert main(merge) == 2
    assert (tmp_path / "y.mask").read_text() == "of somebody else"
    assert main([*merge, "--force"]) == 0
    assert main([*arguments, "--force"]) == 0
    assert (tmp_path / "x.bin").read_bytes() != before
    # As after kill -9 between the renames of both files.
    (tmp_path / "x.idx").rename(tmp_path / "x.idx.partial")
    assert main(arguments) == 0
    (tmp_path / "z").mkdir()
    assert main([*arguments[:-1], str(tmp_path / "z"), "--force"]) == 2
    assert "is also the name of a folder" in capsys.readouterr().err
    (tmp_path / "texts").mkdir()
    inside = ["data", "prepare", str(tmp_path / "texts"), "-o", str(tmp_path / "texts" / "x")]
    assert main(inside) == 2
    assert "must not be inside of the input" in capsys.readouterr().err
    assert main(["data", "prepare", str(tmp_path / "x"), "-o", str(tmp_path / "v")]) == 2
    assert "names token files, which are prepared already" in capsys.readouterr().err
    (tmp_path / "w.parts").mkdir()
    (tmp_path / "w.parts" / "mine").write_text("of somebody else")
    assert main([*arguments[:-1], str(tmp_path / "w")]) == 2
    assert (tmp_path / "w.parts" / "mine").exists()
