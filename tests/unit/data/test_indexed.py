from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megacore.errors import DataError
from megatrain.data import read_indexed, write_indexed
from megatrain.data.indexed import HEADER, MAGIC, IndexWriter, indexed_prefix
from megatrain.data.merge import merge_indexed

documents = st.lists(st.lists(st.integers(0, 99), max_size=8), max_size=6)


@given(docs=documents, wide=st.booleans())
def test_what_is_written_is_read_back(
    tmp_path_factory: pytest.TempPathFactory, docs: list[list[int]], wide: bool
) -> None:
    prefix = tmp_path_factory.mktemp("indexed") / "x.v1"
    write_indexed(prefix, docs, vocab_size=70_000 if wide else 100)
    data = read_indexed(prefix)
    assert data.tokens.tolist() == [token for doc in docs for token in doc]
    assert data.lengths.tolist() == [len(doc) for doc in docs]
    assert data.num_documents == len(docs)
    assert data.tokens.dtype == (np.int32 if wide else np.uint16)


def test_the_bytes_on_disk_are_those_of_the_format(tmp_path: Path) -> None:
    write_indexed(tmp_path / "x", [[1, 2, 3], [4]], vocab_size=300)
    assert (tmp_path / "x.bin").read_bytes() == struct.pack("<4H", 1, 2, 3, 4)
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 2, 3)
    index += struct.pack("<2i", 3, 1) + struct.pack("<2q", 0, 6) + struct.pack("<3q", 0, 1, 2)
    assert (tmp_path / "x.idx").read_bytes() == index
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.bin", "x.idx"]


def test_sequences_in_another_order_are_gathered(tmp_path: Path) -> None:
    (tmp_path / "x.bin").write_bytes(struct.pack("<5i", 10, 11, 12, 13, 14))
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 4, 2, 2)
    index += struct.pack("<2i", 2, 3) + struct.pack("<2q", 12, 0) + struct.pack("<2q", 0, 2)
    index += b"\0\0"  # modes of a multimodal dataset
    (tmp_path / "x.idx").write_bytes(index)
    data = read_indexed(tmp_path / "x")
    assert data.tokens.tolist() == [13, 14, 10, 11, 12]
    assert data.num_documents == 1


def test_a_small_index_cannot_claim_a_multiple_of_its_data(tmp_path: Path) -> None:
    prefix = tmp_path / "bomb"
    lengths = np.full(100, 1000, dtype="<i4")
    starts = np.zeros(100, dtype="<i8")
    borders = np.arange(101, dtype="<i8")
    header = HEADER.pack(MAGIC, 1, 8, 100, 101)
    (tmp_path / "bomb.idx").write_bytes(
        header + lengths.tobytes() + starts.tobytes() + borders.tobytes()
    )
    (tmp_path / "bomb.bin").write_bytes(bytes(2000))
    with pytest.raises(DataError, match=r"describes 200,000 bytes of tokens in a file of 2,000"):
        read_indexed(prefix)


def test_a_prefix_or_either_file_names_the_dataset(tmp_path: Path) -> None:
    prefix = tmp_path / "corpus_v1.2_document"
    write_indexed(prefix, [[1]], vocab_size=10)
    for name in ("", ".bin", ".idx"):
        assert indexed_prefix(f"{prefix}{name}") == prefix
    assert indexed_prefix(tmp_path / "other") is None


def test_tokens_outside_the_vocabulary_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="document 1 holds token ids from 3 to 10"):
        write_indexed(tmp_path / "x", [[1], [3, 10]], vocab_size=10)
    assert not (tmp_path / "x.bin").exists()


@pytest.mark.parametrize(
    ("document", "message"),
    [
        ([1.0, 2.5], "document 1 holds float64 values, the first is 1.0; token ids must be integ"),
        (np.array([3.9], np.float32), "document 1 holds float32 values"),
        ([True, False], "document 1 holds bool values"),
        ([2**70], "document 1 holds object values"),
        (["a"], "document 1 holds str"),
        (7, r"document 1 has shape \(\); a document is a 1-D array or a list of token ids"),
        ([[1, 2]], r"document 1 has shape \(1, 2\); a document is a 1-D array"),
        ([-1, 3], r"token ids from -1 to 3; with vocab_size = 10 they must be in \[0, 10\)"),
        (np.array([2**16 + 3]), "token ids from 65539 to 65539; with vocab_size = 10"),
    ],
)
def test_what_is_no_token_id_is_not_written(tmp_path: Path, document: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        write_indexed(tmp_path / "x", [[1], document], vocab_size=10)
    assert not (tmp_path / "x.bin").exists()


def test_a_vocabulary_wider_than_the_ids_on_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"vocab_size = 2147483649 .* the largest is 2147483648"):
        write_indexed(tmp_path / "x", [[2**31]], vocab_size=2**31 + 1)
    assert not list(tmp_path.iterdir())
    write_indexed(tmp_path / "x", [[2**31 - 1]], vocab_size=2**31)
    assert read_indexed(tmp_path / "x").tokens.tolist() == [2**31 - 1]


def _damage(prefix: Path, how: str) -> None:
    index, data = prefix.with_suffix(".idx"), prefix.with_suffix(".bin")
    raw = bytearray(index.read_bytes())
    if how == "magic":
        raw[0] = 0
    elif how == "version":
        raw[9] = 2
    elif how == "type":
        raw[17] = 9
    elif how == "floats":
        raw[17] = 7
    elif how == "index cut":
        raw = raw[:-8]
    elif how == "borders":
        raw[-8] = 7
    elif how == "tokens cut":
        data.write_bytes(data.read_bytes()[:-1])
    elif how == "odd byte":
        data.write_bytes(data.read_bytes() + b"x")
    elif how == "odd start":
        raw[50:58] = struct.pack("<q", 5)
    elif how == "huge start":
        raw[50:58] = struct.pack("<q", 2**63 - 2)
    index.write_bytes(raw)


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("magic", "is no index of an indexed dataset"),
        ("version", "format version 2"),
        ("type", "token type 9"),
        ("floats", "holds float32 values"),
        ("index cut", r"has 74 bytes; .* take 82"),
        ("borders", r"borders must rise from 0 to 2"),
        ("tokens cut", r"has 7 bytes, but x.idx describes 8"),
        ("odd byte", r"x\.bin has 9 bytes, which is no multiple of 2, .* x\.idx, .* describes 8"),
        ("odd start", r"x\.idx is damaged: sequence 1 of 2 starts at byte 5, .* multiple of 2"),
        ("huge start", r"has 8 bytes, but x.idx describes 9,223,372,036,854,775,808"),
    ],
)
def test_damage_is_reported_with_the_file_and_numbers(
    tmp_path: Path, how: str, message: str
) -> None:
    prefix = tmp_path / "x"
    write_indexed(prefix, [[1, 2, 3], [4]], vocab_size=300)
    _damage(prefix, how)
    with pytest.raises(DataError, match=message) as caught:
        read_indexed(prefix)
    assert str(prefix) in str(caught.value)


def test_a_missing_half_is_named(tmp_path: Path) -> None:
    write_indexed(tmp_path / "x", [[1]], vocab_size=300)
    (tmp_path / "x.bin").unlink()
    with pytest.raises(DataError, match=r"x\.bin does not exist"):
        read_indexed(tmp_path / "x")


def test_an_index_cut_off_in_its_header_is_named_as_such(tmp_path: Path) -> None:
    write_indexed(tmp_path / "x", [[1, 2, 3]], vocab_size=256)
    index = tmp_path / "x.idx"
    index.write_bytes(index.read_bytes()[:20])
    with pytest.raises(DataError, match=r"x\.idx has 20 bytes, .* takes 34: the file is cut off"):
        read_indexed(tmp_path / "x")


nested = st.lists(st.lists(st.lists(st.integers(0, 99), max_size=4), max_size=3), max_size=5)


@given(parts=st.lists(nested, min_size=1, max_size=3))
def test_merging_keeps_documents_of_several_sequences(
    tmp_path_factory: pytest.TempPathFactory, parts: list[list[list[list[int]]]]
) -> None:
    folder = tmp_path_factory.mktemp("merge")
    for number, docs in enumerate(parts):
        with IndexWriter(folder / str(number), np.dtype("<u2")) as writer:
            for document in docs:
                for sequence in document:
                    writer.append(np.array(sequence, dtype=np.int64))
                    writer.add(len(sequence), ends_document=False)
                writer.end_document()
    prefixes = [folder / str(number) for number in range(len(parts))]
    docs = [document for part in parts for document in part]
    assert merge_indexed(prefixes, folder / "all") == len(docs)
    data = read_indexed(folder / "all")
    lengths = [len(document) for document in docs]
    assert data.document_borders.tolist() == np.cumsum([0, *lengths]).tolist()
    assert data.lengths.tolist() == [len(seq) for document in docs for seq in document]
    assert data.tokens.tolist() == [t for document in docs for seq in document for t in seq]


def test_a_document_longer_than_a_sequence_may_be_is_one_document(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatrain.data import prepare as prepare_module

    monkeypatch.setattr(prepare_module, "_MAX_SEQUENCE", 10)
    (tmp_path / "a.txt").write_text("x" * 25)
    options = prepare_module.PrepareOptions(eod="")
    assert prepare_module.prepare([tmp_path / "a.txt"], tmp_path / "x", options).num_documents == 1
    data = read_indexed(tmp_path / "x")
    assert data.lengths.tolist() == [10, 10, 5]
    assert data.document_borders.tolist() == [0, 3]
