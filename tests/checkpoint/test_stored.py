import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.checkpoint.conftest import FakeTrainer, Rig

from tidemill.checkpoint.manifest import Manifest
from tidemill.checkpoint.safetensors_file import checksum
from tidemill.checkpoint.stored import BrokenCheckpointError, read_checkpoint, weights_of
from tidemill.errors import CheckpointError


@pytest.fixture
def saved(make_rig: Callable[..., Any]) -> Path:
    """A checkpoint of step 2."""
    rig = make_rig()
    rig.run(2)
    return Path(rig.folder) / "step-00000002"


def test_all_that_was_saved_is_read(saved: Path) -> None:
    seen: list[int] = []
    stored = read_checkpoint(saved, step=2, advance=seen.append)
    assert stored.state.step == 2 and stored.manifest.settings == {"model": "folder"}
    assert set(stored.parts) == {"trainer", "recorder", "random"}
    assert stored.parts["recorder"].extra == {"lines": [1, 2]}
    assert sum(seen) == next(saved.glob("trainer-*")).stat().st_size


def test_weights_are_those_of_the_model_under_their_own_names(saved: Path) -> None:
    assert list(weights_of(read_checkpoint(saved, step=2))) == ["w"]


def test_every_flipped_byte_of_every_file_is_noticed(saved: Path) -> None:
    for path in sorted(saved.iterdir()):
        data = path.read_bytes()
        for place in [*range(0, len(data), max(1, len(data) // 40)), len(data) - 1]:
            path.write_bytes(data[:place] + bytes([data[place] ^ 4]) + data[place + 1 :])
            with pytest.raises((BrokenCheckpointError, CheckpointError)):
                read_checkpoint(saved, step=2)
        path.write_bytes(data)
    read_checkpoint(saved, step=2)


@pytest.mark.parametrize("name", ["state.json", "trainer-00000-of-00001.safetensors"])
@pytest.mark.parametrize("damage", ["missing", "empty", "longer"])
def test_the_broken_file_is_named(saved: Path, name: str, damage: str) -> None:
    path = saved / name
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(b"" if damage == "empty" else path.read_bytes() + b"x")
    with pytest.raises(BrokenCheckpointError, match=f"{name} (is missing|has \\d+ of \\d+ bytes)"):
        read_checkpoint(saved, step=2)


def test_everything_that_is_wrong_is_said_at_once(saved: Path) -> None:
    (saved / "state.json").unlink()
    (saved / "trainer-00000-of-00001.safetensors").unlink()
    with pytest.raises(BrokenCheckpointError, match=r"trainer-.* is missing; state.json is missing"):
        read_checkpoint(saved, step=2)


def test_a_tensor_whose_pieces_leave_a_gap_is_named_with_what_is_missing(saved: Path) -> None:
    manifest = Manifest.read(saved / "manifest.json")
    entry = manifest.files[0]
    piece = entry.slices[0]
    doubled = piece._replace(global_shape=(2 * piece.local_shape[0],))
    files = (replace(entry, slices=(doubled, *entry.slices[1:])), *manifest.files[1:])
    (saved / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())
    with pytest.raises(BrokenCheckpointError, match=r"model/w of shape \[2000\] has 1000 of 2000 elements.*\[1000\]"):
        read_checkpoint(saved, step=2)


@pytest.fixture
def in_ranks(make_rig: Callable[..., Any], tmp_path: Path) -> Path:
    """A checkpoint of step 2, by eight ranks."""
    make_rig(tmp_path / "ranks", of=8).run(2)
    return tmp_path / "ranks" / "step-00000002"


def test_shards_that_are_not_there_are_counted_and_named(in_ranks: Path) -> None:
    (in_ranks / "trainer-00005-of-00008.safetensors").unlink()
    with pytest.raises(
        BrokenCheckpointError, match="trainer has 7 of 8 shards, trainer-00005-of-00008.safetensors is missing$"
    ):
        read_checkpoint(in_ranks, step=2)
    (in_ranks / "trainer-00002-of-00008.safetensors").unlink()
    with pytest.raises(BrokenCheckpointError, match="has 6 of 8 shards, trainer-00002.*, trainer-00005.* are missing$"):
        read_checkpoint(in_ranks, step=2)


def test_a_shard_that_the_manifest_does_not_list_is_missing_though_its_file_is_there(in_ranks: Path) -> None:
    manifest = Manifest.read(in_ranks / "manifest.json")
    files = tuple(entry for entry in manifest.files if "00003-of" not in entry.name)
    (in_ranks / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())
    with pytest.raises(BrokenCheckpointError, match="trainer has 7 of 8 shards, trainer-00003.* is missing"):
        read_checkpoint(in_ranks, step=2)


def test_every_broken_shard_is_named_at_once(in_ranks: Path) -> None:
    for rank in (1, 6):
        path = in_ranks / f"trainer-0000{rank}-of-00008.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(BrokenCheckpointError) as raised:
        read_checkpoint(in_ranks, step=2)
    assert str(raised.value).count("the checksum of") == 2 and "trainer-00006-of-00008" in str(raised.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": "I32"}, "as I32 of shape .*as F32"),
        ({"global_shape": (1001,)}, r"of shape \[1001\]"),
        ({"offset": (1,)}, "overlap"),
        ({"offset": (999,)}, "not inside"),
    ],
)
def test_pieces_that_disagree_are_broken_and_named(in_ranks: Path, change: dict[str, Any], said: str) -> None:
    manifest = Manifest.read(in_ranks / "manifest.json")
    entry = manifest.files[1]
    slices = tuple(one._replace(**change) if one.name == "model/w" else one for one in entry.slices)
    if "dtype" in change:  # the header of the file says so as well
        path = in_ranks / entry.name
        data = path.read_bytes()
        at = data.index(b'"model/w":{"dtype":"F32"')
        path.write_bytes(data[:at] + data[at:].replace(b"F32", b"I32", 1))
        entry = replace(entry, blocks=(checksum(path.read_bytes()),))
    files = (manifest.files[0], replace(entry, slices=slices), *manifest.files[2:])
    (in_ranks / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())
    with pytest.raises(BrokenCheckpointError, match=f"model/w.*{said}"):
        read_checkpoint(in_ranks, step=2)


@pytest.fixture
def first_format(tmp_path: Path) -> Path:
    """Step 2 of a trainer of two ranks, as a release whose manifests have a checksum for each slice saved it."""
    folder = tmp_path / "checkpoints"
    shutil.copytree(Path(__file__).parents[1] / "data" / "checkpoints" / "format-1", folder)
    return folder / "step-00000002"


def test_a_checkpoint_of_the_first_format_is_restored(first_format: Path) -> None:
    assert Manifest.read(first_format / "manifest.json").format == 1
    rig = Rig(first_format.parent, {"attempt": 2}, FakeTrainer(size=64, ranks=2))
    rig.restore()
    assert rig.is_at(2) and rig.warnings() == []
    rig.run(4)
    assert [Manifest.read(path / "manifest.json").format for path in sorted(first_format.parent.iterdir())] == [1, 2]


def test_damage_of_a_checkpoint_of_the_first_format_is_noticed(first_format: Path) -> None:
    path = first_format / "trainer-00001-of-00002.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    said = f"the checksum of optimizer/exp_avg/w in bytes [4224, 4288) of {path.name} differs"
    with pytest.raises(BrokenCheckpointError, match=re.escape(said)):
        read_checkpoint(first_format, step=2)


def test_a_checkpoint_of_this_format_without_checksums_is_not_trusted(saved: Path) -> None:
    manifest = Manifest.read(saved / "manifest.json")
    files = tuple(replace(entry, blocks=()) for entry in manifest.files)
    (saved / "manifest.json").write_bytes(replace(manifest, files=files).to_bytes())
    with pytest.raises(BrokenCheckpointError, match=r"manifest.json has no checksums of trainer-00000-of-00001"):
        read_checkpoint(saved, step=2)
