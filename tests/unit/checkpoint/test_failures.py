"""What a user sees when a checkpoint is missing, damaged, or does not fit; what is never lost."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata

from megacore.errors import CheckpointError
from megacore.parallel.param_info import ParamInfo
from megacore.parallel.process_groups import ProcessGroups
from megatrain.checkpoint import (
    TrainState,
    find_checkpoint,
    load_checkpoint,
    load_full_weights,
    read_index,
    resolve_checkpoint,
    save_checkpoint,
)
from megatrain.checkpoint.metadata import index_of_metadata
from megatrain.checkpoint.tensor_file import write_tensor_index
from tests.support.checkpoints import (
    GROUPS,
    NORM,
    TENSORS,
    WEIGHT,
    ThreadWorld,
    edit_index,
    make_older,
    make_pieces,
    names_in,
    replace_file,
    save_small,
    small_pieces,
)


def _edit_index(change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    """Change ``index.json`` as if it had been written like that."""
    return lambda folder: edit_index(folder, change)


def _edit_metadata(change: Callable[[Metadata], object]) -> Callable[[Path], None]:
    """Change what DCP wrote in an older checkpoint, with a correct checksum."""

    def edit(folder: Path) -> None:
        metadata = FileSystemReader(make_older(folder)).read_metadata()
        change(metadata)
        replace_file(folder, ".metadata", pickle.dumps(metadata))

    return edit


def _drop_tensor(key: str) -> Callable[[Path], None]:
    """Leave a tensor out of the index of tensors, with a correct checksum."""

    def edit(folder: Path) -> None:
        metadata = FileSystemReader(folder).read_metadata()
        metadata.state_dict_metadata.pop(key)
        sum_of_file = write_tensor_index(folder / "tensors.idx", index_of_metadata(metadata))
        entry = {"num_bytes": sum_of_file.num_bytes, "crc32": sum_of_file.crc32}
        edit_index(folder, lambda data: data["files"].update({"tensors.idx": entry}))

    return edit


def _cut_file(folder: Path) -> None:
    file = folder / TENSORS
    file.write_bytes(file.read_bytes()[:-10])


def _flip_a_bit(folder: Path, name: str = TENSORS) -> None:
    file = folder / name
    raw = bytearray(file.read_bytes())
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)


def _become_version_1(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()
    (folder / "index.json").write_text('{"format": "megacore-checkpoint", "format_version": 1}')
    (folder / "rank_00000.safetensors").write_bytes(b"")


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated file": (
        _cut_file,
        r"__0_0\.distcp has [\d,]+ bytes, but was written with [\d,]+: it was cut off",
    ),
    "flipped bit": (
        _flip_a_bit,
        r"__0_0\.distcp is damaged: its content does not match its checksum",
    ),
    "missing file": (lambda folder: (folder / TENSORS).unlink(), r"__0_0\.distcp is missing"),
    "missing metadata": (
        lambda folder: (folder / ".metadata").unlink(),
        r"\.metadata is missing",
    ),
    "flipped bit of the metadata": (
        lambda folder: _flip_a_bit(folder, ".metadata"),
        r"\.metadata is damaged: its content does not match its checksum",
    ),
    "metadata of another torch": (
        lambda folder: replace_file(make_older(folder), ".metadata", b"x"),
        r"cannot read .*\.metadata: unknown opcode",
    ),
    "missing index": (
        lambda folder: (folder / "index.json").unlink(),
        r"is no checkpoint: it has no index\.json",
    ),
    "torn index": (
        lambda folder: (folder / "index.json").write_text('{"format": "mega'),
        r"cannot read .*index\.json: Unterminated string",
    ),
    "another number in the index": (
        lambda folder: (folder / "index.json").write_text(
            (folder / "index.json").read_text().replace('"samples": 24', '"samples": 25')
        ),
        r"index\.json is damaged: its content does not match its checksum",
    ),
    "index without a field": (
        _edit_index(lambda data: data.pop("files")),
        r"index\.json is damaged \(KeyError\('files'\)\)",
    ),
    "index without the metadata": (
        lambda folder: edit_index(make_older(folder), lambda data: data["files"].pop(".metadata")),
        r"index\.json does not list \.metadata",
    ),
    "newer format": (
        _edit_index(lambda data: data.update(format_version=4)),
        r"has format version 4, this megacore reads versions 2 and 3",
    ),
    "older format": (
        _become_version_1,
        r"has format version 1, this megacore reads versions 2 and 3; load it with the meg",
    ),
    "foreign index": (
        _edit_index(lambda data: data.pop("format")),
        r"does not describe a checkpoint of megacore",
    ),
    "missing range": (
        _edit_metadata(lambda data: data.storage_data.clear()),
        r"metadata is refused: the files lack the values of \w+\.[\w.]+ from \[0(, 0)?\] on",
    ),
    "missing parameter": (
        _edit_metadata(lambda data: data.state_dict_metadata.pop("main_param.norm")),
        r"has no parameter norm",
    ),
    "missing moments": (
        _edit_metadata(lambda data: data.state_dict_metadata.pop("exp_avg.norm")),
        r"has no exp_avg of parameter norm",
    ),
    "missing index of tensors": (
        lambda folder: (folder / "tensors.idx").unlink(),
        r"tensors\.idx is missing",
    ),
    "other file as index of tensors": (
        lambda folder: replace_file(folder, "tensors.idx", b"x" * 100),
        r"tensors\.idx is refused: it is not an index of tensors",
    ),
    "newer index of tensors": (
        lambda folder: replace_file(
            folder,
            "tensors.idx",
            (folder / "tensors.idx").read_bytes().replace(b'"version": 1', b'"version": 2'),
        ),
        r"tensors\.idx is refused: it has version 2, this megacore reads version 1; load it with",
    ),
    "no parameter in the index of tensors": (
        _drop_tensor("main_param.norm"),
        r"has no parameter norm",
    ),
    "no moments in the index of tensors": (
        _drop_tensor("exp_avg.norm"),
        r"has no exp_avg of parameter norm",
    ),
}


@pytest.mark.parametrize(("damage", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_damage_is_named_with_its_file_and_parameter(
    tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    folder = save_small(tmp_path)
    damage(folder)
    with pytest.raises(CheckpointError, match=message) as caught:
        load_checkpoint(folder, small_pieces(), groups=GROUPS)
    assert str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("name", ["truncated file", "flipped bit", "missing index", "older format"])
def test_generation_reports_damage_too(tmp_path: Path, name: str) -> None:
    folder = save_small(tmp_path)
    damage, message = DAMAGES[name]
    damage(folder)
    with pytest.raises(CheckpointError, match=message):
        load_full_weights(folder)


def test_no_flipped_bit_of_the_index_goes_unnoticed(tmp_path: Path) -> None:
    state = TrainState(step=1, samples=8, optimizer={"loss_scale": 0.1 + 0.2})
    config = {"model": {"norm_eps": 1e-05}}
    folder = save_checkpoint(tmp_path, small_pieces(), state=state, config=config, groups=GROUPS)
    raw = (folder / "index.json").read_bytes()
    read_index(folder)
    for place in range(len(raw)):
        flipped = bytearray(raw)
        flipped[place] ^= 0x20  # of all bits the one that may leave the same number, 1E-05
        (folder / "index.json").write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            read_index(folder)


def test_an_index_that_is_nonsense_is_one_sentence(tmp_path: Path) -> None:
    folder = save_small(tmp_path)
    head = '{"format": "megacore-checkpoint", "format_version": 2, '
    for text in ("[]", "[" * 100_000, head + '"crc32": 1e999}', head + '"state": []}'):
        (folder / "index.json").write_text(text)
        with pytest.raises(CheckpointError, match=r"index\.json"):
            read_index(folder)


def test_another_shape_names_both_and_the_setting(tmp_path: Path) -> None:
    folder = save_small(tmp_path)
    wide = ParamInfo(name="layers.0.w", full_shape=(32, 16), tp_dim=0)
    message = (
        r"layers\.0\.w has shape \[16, 16\] in checkpoint .*, but \[32, 16\] in this model; "
        r"model\.hidden_size is 16 there and 32 here$"
    )
    with pytest.raises(CheckpointError, match=message):
        load_checkpoint(
            folder,
            small_pieces(wide, NORM),
            groups=GROUPS,
            config={"model": {"num_layers": 1, "hidden_size": 32}},
        )


def test_parameters_the_model_does_not_use_are_an_error(tmp_path: Path) -> None:
    folder = save_small(tmp_path)
    with pytest.raises(CheckpointError, match=r"does not use, such as norm \(1 in all\)"):
        load_checkpoint(folder, small_pieces(WEIGHT), groups=GROUPS)


def test_a_missing_path_suggests_the_closest_folder(tmp_path: Path) -> None:
    save_small(tmp_path / "checkpoints")
    with pytest.raises(
        CheckpointError, match=r"no checkpoint .*checkpoints-1; did you mean .*/check"
    ):
        resolve_checkpoint(tmp_path / "checkpoints-1")
    with pytest.raises(CheckpointError, match=r"no checkpoint .*/zz; .* holds checkpoints"):
        find_checkpoint(str(tmp_path / "zz"), tmp_path, groups=GROUPS)


def test_an_unfinished_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = save_small(tmp_path)
    folder.rename(tmp_path / "step_00000003.partial")
    with pytest.raises(CheckpointError, match="unfinished checkpoint"):
        resolve_checkpoint(tmp_path / "step_00000003.partial")


def test_a_folder_without_checkpoints_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"is no checkpoint: it has no index\.json"):
        resolve_checkpoint(tmp_path)


def test_a_run_and_its_checkpoint_folder_mean_the_latest(tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    save_small(directory, step=1)
    newest = save_small(directory, step=2)
    assert resolve_checkpoint(tmp_path) == newest
    assert resolve_checkpoint(directory) == newest
    assert resolve_checkpoint(newest) == newest
    (directory / "latest").write_text("step_00000001\n")
    assert resolve_checkpoint(directory).name == "step_00000001"


@pytest.mark.parametrize("name", ["/etc", ".", "..", "../other", "step_00000001/.", "notes"])
def test_a_latest_that_names_no_checkpoint_folder_is_refused(tmp_path: Path, name: str) -> None:
    directory = tmp_path / "checkpoints"
    saved = save_small(directory, step=1)
    (tmp_path / "other").mkdir()
    (directory / "notes").mkdir()
    (directory / "latest").write_text(name + "\n")
    for path in (tmp_path, directory, directory / "latest"):
        with pytest.raises(CheckpointError, match=r"latest names .*, which is no checkpoint fold"):
            resolve_checkpoint(path)
    assert resolve_checkpoint(saved) == saved
    assert find_checkpoint("auto", directory, groups=GROUPS).path == saved


def test_an_unfinished_latest_counts_only_if_it_names_a_checkpoint(tmp_path: Path) -> None:
    first, second = save_small(tmp_path, step=1, keep=5), save_small(tmp_path, step=2, keep=5)
    (tmp_path / "latest").write_text(first.name)
    for name, expected in ((second.name, second), ("step_0", first), (".", first)):
        (tmp_path / "latest.partial").write_text(name)
        assert resolve_checkpoint(tmp_path) == expected


# ---- choosing and keeping ----------------------------------------------------------------------


def test_auto_starts_anew_without_a_checkpoint(tmp_path: Path) -> None:
    found = find_checkpoint("auto", tmp_path / "none", groups=GROUPS)
    assert found.path is None
    assert found.skipped == ()
    assert find_checkpoint(None, tmp_path, groups=GROUPS).path is None


def test_auto_takes_the_newest_complete_checkpoint_and_says_what_it_passed_over(
    tmp_path: Path,
) -> None:
    good = save_small(tmp_path, step=1, keep=5)
    _cut_file(save_small(tmp_path, step=2, keep=5))
    save_small(tmp_path, step=3, keep=5).rename(tmp_path / "step_00000003.partial")
    found = find_checkpoint("auto", tmp_path, groups=GROUPS)
    assert found.path == good
    assert len(found.skipped) == 1
    assert "step_00000002" in found.skipped[0]
    assert "cut off" in found.skipped[0]


def test_auto_passes_over_a_checkpoint_with_a_flipped_bit(tmp_path: Path) -> None:
    good = save_small(tmp_path, step=1, keep=5)
    _flip_a_bit(save_small(tmp_path, step=2, keep=5))
    found = find_checkpoint("auto", tmp_path, groups=GROUPS)
    assert found.path == good
    [why] = found.skipped
    assert "step_00000002" in why
    assert why.endswith("does not match its checksum")


def test_ranks_share_the_verification_and_all_pass_over_what_one_finds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = ThreadWorld(monkeypatch, tp=1, dp=4)

    def save(groups: ProcessGroups, step: int) -> Path:
        pieces = make_pieces([WEIGHT, NORM], tp=(0, 1), dp=(groups.dp.position, 4))
        state = TrainState(step=step, samples=8, optimizer={})
        return save_checkpoint(tmp_path, pieces, state=state, config={}, groups=groups)

    good = world.run(lambda groups: save(groups, 1))[0]
    bad = world.run(lambda groups: save(groups, 2))[0]
    _flip_a_bit(bad, "__2_0.distcp")
    found = world.run(lambda groups: find_checkpoint("auto", tmp_path, groups=groups))
    assert {one.path for one in found} == {good}
    assert len({one.skipped for one in found}) == 1
    assert found[0].skipped[0].startswith("rank 3: checkpoint file ")


@pytest.mark.parametrize("name", ["truncated file", "flipped bit", "torn index"])
def test_auto_never_starts_over_when_all_checkpoints_are_damaged(tmp_path: Path, name: str) -> None:
    damage, _ = DAMAGES[name]
    for step in (1, 2):
        damage(save_small(tmp_path, step=step, keep=5))
    message = (
        r"none of 2 checkpoints in .* is sound \(.*step_00000002.*; .*step_00000001.*\); restore"
    )
    with pytest.raises(CheckpointError, match=message) as caught:
        find_checkpoint("auto", tmp_path, groups=GROUPS)
    assert "use another checkpoint" not in str(caught.value)


def test_only_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        save_small(tmp_path, step=step, keep=2)
    assert names_in(tmp_path) == ["latest", "step_00000003", "step_00000004"]
    assert (tmp_path / "latest").read_text() == "step_00000004\n"


def test_going_back_leaves_later_checkpoints_but_continues_from_the_new_one(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        save_small(tmp_path, step=step, keep=5)
    again = save_small(tmp_path, step=15, keep=1)
    assert names_in(tmp_path) == ["latest", "step_00000015", "step_00000020", "step_00000030"]
    assert find_checkpoint("auto", tmp_path, groups=GROUPS).path == again


def test_the_same_step_can_be_saved_again(tmp_path: Path) -> None:
    _cut_file(save_small(tmp_path))
    load_checkpoint(save_small(tmp_path), small_pieces(), groups=GROUPS)
    assert names_in(tmp_path) == ["latest", "step_00000003"]


def test_leftovers_of_a_killed_run_do_not_disturb(tmp_path: Path) -> None:
    leftover = tmp_path / "step_00000003.partial"
    leftover.mkdir()
    (leftover / "__7_0.distcp").write_bytes(b"half")
    folder = save_small(tmp_path)
    assert names_in(folder) == [".metadata", TENSORS, "index.json", "tensors.idx"]
    assert names_in(tmp_path) == ["latest", "step_00000003"]
