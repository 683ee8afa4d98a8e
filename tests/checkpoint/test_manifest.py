import json
from pathlib import Path

import pytest

import tidemill
from tidemill.checkpoint.manifest import FORMAT, FileEntry, Manifest, NewerFormatError, Slice, library_versions
from tidemill.checkpoint.safetensors_file import checksum
from tidemill.errors import CheckpointError

MANIFEST = Manifest(
    step=3,
    attempt=2,
    parts=("recorder", "trainer"),
    files=(
        FileEntry("t.safetensors", "trainer", 4104, "", (Slice("w", "F32", (2,), (0,), (2,), 4096, 4104),), ("ab",)),
        FileEntry("state.json", "", 10, "cd", ()),
    ),
    identity={"model": "ünï"},
    settings={"steps": 3, "nested": {"x": [1, None, 2.5]}},
    retention={"keep_last": 2, "keep_every": 0},
    versions={"torch": "2.11.0"},
    time=5.5,
)


def write(folder: Path, data: bytes) -> Path:
    path = folder / "manifest.json"
    path.write_bytes(data)
    return path


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    assert Manifest.read(write(tmp_path, MANIFEST.to_bytes())) == MANIFEST
    assert MANIFEST.total_bytes == 4114


def test_its_checksum_is_that_of_all_else_as_sorted_json_without_spaces() -> None:
    told = json.loads(MANIFEST.to_bytes())
    assert told.pop("xxh3") == checksum(json.dumps(told, sort_keys=True, separators=(",", ":")).encode())
    assert MANIFEST.to_bytes().count(b"\n    {") == 1


def test_any_flipped_digit_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="checksum of manifest.json differs"):
        Manifest.read(write(tmp_path, MANIFEST.to_bytes().replace(b'"attempt": 2', b'"attempt": 3')))


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"3", b"null", b"{}", b"[" * 100_000, b"\xff"])
def test_a_cut_or_foreign_file_is_said_to_be_one(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(CheckpointError, match="cut short or not JSON"):
        Manifest.read(write(tmp_path, data))


def test_every_cut_is_noticed(tmp_path: Path) -> None:
    whole = MANIFEST.to_bytes()
    for length in range(0, len(whole), 7):
        with pytest.raises(CheckpointError):
            Manifest.read(write(tmp_path, whole[:length]))


def test_a_missing_manifest_is_said_to_be_missing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"manifest.json is missing"):
        Manifest.read(tmp_path / "manifest.json")


def test_a_later_format_names_the_release_that_can_read_it(tmp_path: Path) -> None:
    later = {"format": FORMAT + 1, "release": "9.9.0", "nothing": "else is known"}
    with pytest.raises(NewerFormatError, match=r"use tidemill 9\.9\.0 or later") as raised:
        Manifest.read(write(tmp_path, json.dumps(later).encode()))
    assert tidemill.__version__ in str(raised.value) and str(tmp_path) in str(raised.value)


def test_the_first_format_stays_readable(tmp_path: Path) -> None:
    """A manifest as release 0.1.0 wrote it, letter by letter."""
    fields = (
        '{"step": 1, "attempt": 1, "parts": [], "files": [], "identity": {}, "settings": {}, "retention": {}, '
        '"versions": {}, "time": 0.0, "release": "0.1.0", "format": 1, "xxh3": "8c6a2fe2d1a8e4a8"}'
    )
    first = Manifest(
        step=1, attempt=1, parts=(), files=(), identity={}, settings={}, retention={}, versions={}, time=0.0,
        release="0.1.0", format=1,
    )  # fmt: skip
    known = json.loads(first.to_bytes())["xxh3"]
    assert Manifest.read(write(tmp_path, fields.replace("8c6a2fe2d1a8e4a8", known).encode())) == first


@pytest.mark.parametrize("name", ["../state.json", "a/b", "", ".", "..", "manifest.json"])
def test_a_file_outside_the_folder_cannot_be_named(tmp_path: Path, name: str) -> None:
    entry = FileEntry(name, "", 10, "cd", ())
    hostile = Manifest(**{**vars(MANIFEST), "files": (entry,)})
    with pytest.raises(CheckpointError, match="garbles a field"):
        Manifest.read(write(tmp_path, hostile.to_bytes()))


def test_versions_of_the_libraries_are_known_without_importing_them() -> None:
    versions = library_versions()
    assert versions["tidemill"] == tidemill.__version__ and versions["torch"][0].isdigit()
