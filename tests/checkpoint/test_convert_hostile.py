"""Pickles that want something done: a clear error, and nothing is done.

Modules: tidemill.checkpoint.foreign.guard, tidemill.checkpoint.foreign.child, tidemill.checkpoint.foreign.archive,
tidemill.checkpoint.foreign.metadata, tidemill.checkpoint.foreign.unpickler.
"""

import io
import json
import os
import pickle
import resource
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tidemill.checkpoint.foreign import child, guard
from tidemill.checkpoint.foreign.archive import archived_tensors
from tidemill.checkpoint.foreign.metadata import listed_tensors
from tidemill.checkpoint.foreign.sources import open_bins, open_dcp
from tidemill.checkpoint.foreign.unpickler import ForbiddenError, ForeignTensor, StorageKey, read_pickle
from tidemill.errors import CheckpointError


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def archive(path: Path, pickled: bytes, storages: dict[str, bytes] | None = None, packed: bool = False) -> Path:
    """A torch archive of that pickle."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED if packed else zipfile.ZIP_STORED) as made:
        made.writestr("model/data.pkl", pickled)
        for key, data in (storages or {}).items():
            made.writestr(f"model/data/{key}", data)
    return path


def tensor_pickle(offset: int, shape: tuple[Any, ...], strides: tuple[Any, ...], key: str = "0") -> bytes:
    """As torch writes a table of one tensor `w`, protocol 2."""
    inner = pickle.dumps((offset, shape, strides), 2)[2:-1]
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n" + pickle.dumps(key, 2)[2:-1]
    storage += b"X\x03\x00\x00\x00cpuK\x04tQ"
    return b"\x80\x02}X\x01\x00\x00\x00wctorch._utils\n_rebuild_tensor_v2\n(" + storage + _spread(inner) + b"tRs."


def _spread(triple: bytes) -> bytes:
    offset, shape, strides = pickle.loads(b"\x80\x02" + triple + b".")
    return b"".join(_bare(value) for value in (offset, shape, strides)) + b"\x89ccollections\nOrderedDict\n)R"


def _bare(value: Any) -> bytes:
    """A value's opcodes without memo, so that they can stand anywhere."""
    if isinstance(value, tuple):
        return b"(" + b"".join(map(_bare, value)) + b"t"
    if isinstance(value, float):
        return b"G" + struct.pack(">d", value)
    return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)


ATTACKS: dict[str, Callable[[Path], bytes]] = {
    "a shell": lambda mark: pickle.dumps({"w": Calls(os.system, f"touch '{mark}'")}),
    "open": lambda mark: pickle.dumps({"w": Calls(open, str(mark), "w")}),
    "eval": lambda mark: pickle.dumps({"w": Calls(eval, f"open({str(mark)!r}, 'w')")}),
    "getattr": lambda mark: pickle.dumps({"w": Calls(getattr, mark, "touch")}),
    "old protocol": lambda mark: b"cposix\nsystem\n(S'touch \"" + str(mark).encode() + b"\"'\ntR.",
    "instance": lambda mark: b"(S'touch \"" + str(mark).encode() + b"\"'\nios\nsystem\n.",
    "dotted": lambda mark: b"\x80\x04\x8c\x05torch\x8c\x09os.system\x93\x8c\x01x\x85R.",
    "extension": lambda mark: b"\x80\x02\x82\x01)R.",
    "torch itself": lambda mark: b"ctorch\nload\n(S'" + str(mark).encode() + b"'\ntR.",
    "subprocess": lambda mark: pickle.dumps(Calls(subprocess.Popen, ["touch", str(mark)])),
    "state of a function": lambda mark: b"ctorch\nSize\n(N}S'__code__'\nI1\nstb.",
}


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("place", ["bin", "metadata", "piece"])
def test_a_hostile_pickle_is_a_clear_error_and_runs_nothing(tmp_path: Path, attack: str, place: str) -> None:
    mark = tmp_path / "it ran"
    evil = ATTACKS[attack](mark)
    if place == "bin":
        archive(tmp_path / "pytorch_model.bin", evil)
        with pytest.raises(CheckpointError) as raised:
            open_bins(tmp_path)
    elif place == "metadata":
        (tmp_path / ".metadata").write_bytes(evil)
        with pytest.raises(CheckpointError) as raised:
            open_dcp(tmp_path)
    else:
        path = archive(tmp_path / "piece", evil)
        with pytest.raises(CheckpointError) as raised:
            guard.ask_for_archives([(path, 0, path.stat().st_size)])
    assert "nothing of it was run; do not trust this file" in str(raised.value)
    assert not mark.exists()


def test_the_error_names_what_was_wanted(tmp_path: Path) -> None:
    archive(tmp_path / "pytorch_model.bin", ATTACKS["a shell"](tmp_path / "x"))
    with pytest.raises(CheckpointError, match=r"it holds posix.system, which is nothing that weights are made of"):
        open_bins(tmp_path)


def test_the_attacks_would_work_on_a_reader_that_believes_them(tmp_path: Path) -> None:
    for attack in ("a shell", "open", "eval", "old protocol", "instance"):
        mark = tmp_path / attack
        pickle.loads(ATTACKS[attack](mark))
        assert mark.exists(), attack


@pytest.mark.parametrize(
    ("offset", "shape", "strides"),
    [(0, (5,), (1,)), (1, (4,), (1,)), (0, (2,), (4,)), (1 << 61, (1,), (1,)), (-1, (1,), (1,)), (0, (-1,), (1,)),
     (0, (1,), ()), (0, (1.0,), (1,)), (0, (1 << 40, 1 << 40), (1, 1))],
)  # fmt: skip
def test_a_tensor_beyond_its_storage_is_refused(tmp_path: Path, offset: int, shape: Any, strides: Any) -> None:
    path = archive(tmp_path / "pytorch_model.bin", tensor_pickle(offset, shape, strides), {"0": bytes(16)})
    with pytest.raises(CheckpointError, match="it holds a tensor"):
        open_bins(tmp_path)
    archive(path, tensor_pickle(0, (4,), (1,)), {"0": bytes(16)})
    assert open_bins(tmp_path).shapes == {"w": (4,)}


def test_archives_that_torch_does_not_write_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    good = tensor_pickle(0, (4,), (1,))
    cases: dict[str, Callable[[], object]] = {
        "no torch archive": lambda: path.write_bytes(b"PK not at all"),
        "no torch archive,": lambda: path.write_bytes(b""),
        "a packed entry": lambda: archive(path, good, {"0": bytes(1600)}, packed=True),
        "no entry model/data/1": lambda: archive(path, tensor_pickle(0, (4,), (1,), "1"), {"0": bytes(16)}),
        "no entry model/data/../0": lambda: archive(path, tensor_pickle(0, (4,), (1,), "../0"), {"0": bytes(16)}),
        "of before torch 1.6": lambda: torch.save({}, path, _use_new_zipfile_serialization=False),
        "something that is no pickle": lambda: archive(path, b"\x80\x02}"),
    }
    for why, make in cases.items():
        make()
        with pytest.raises(CheckpointError, match=why.rstrip(",")):
            open_bins(tmp_path)
    archive(path, good, {"0": bytes(16)})
    with zipfile.ZipFile(path, "a") as made:
        made.writestr("model/byteorder", "big")
    with pytest.raises(CheckpointError, match="big-endian"):
        open_bins(tmp_path)


def test_bombs_end_as_errors(tmp_path: Path) -> None:
    path = tmp_path / "pytorch_model.bin"
    loop: dict[str, Any] = {}
    loop["x"] = loop
    archive(path, pickle.dumps(loop))
    with pytest.raises(CheckpointError, match="tables in tables more than 32 deep"):
        open_bins(tmp_path)
    archive(path, b"\x80\x04\x8e" + (1 << 40).to_bytes(8, "little") + b"x.")  # a text of a TiB
    with pytest.raises(CheckpointError, match="it holds"):
        open_bins(tmp_path)
    archive(path, b"\x80\x02" + b"]" * 10 + b"Nr\xff\xff\xff\x7f.")  # the two thousand millionth memo
    with pytest.raises(CheckpointError, match="nothing of it was run"):
        open_bins(tmp_path)


def test_metadata_that_lies_is_refused(tmp_path: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.metadata import Metadata

    dcp.save({"w": torch.zeros(4)}, checkpoint_id=tmp_path / "dcp", no_dist=True)
    good: Metadata = dcp.FileSystemReader(tmp_path / "dcp").read_metadata()
    (index, info), *_ = good.storage_data.items()
    place = tmp_path / "dcp" / ".metadata"

    def told(**fields: Any) -> str:
        changed = type(info)(**{**vars(info), **fields})
        place.write_bytes(pickle.dumps(Metadata(good.state_dict_metadata, storage_data={index: changed})))
        with pytest.raises(CheckpointError) as raised:
            open_dcp(tmp_path / "dcp").tensors(["w"])
        return str(raised.value)

    assert "'../x', which .metadata names, is not there" in told(relative_path="../x")
    assert "'/etc/passwd', which .metadata names, is not there" in told(relative_path="/etc/passwd")
    assert f"of {info.offset + 10**9} bytes" in told(length=10**9)
    assert "no torch archive" in told(offset=info.offset + 1, length=info.length - 1)
    assert "whole numbers" in told(offset=-1)
    assert "written through ['zstd']" in told(transform_descriptors=["zstd"])
    good.state_dict_metadata["w"].size = torch.Size([5])
    assert "cannot read w: " in told()
    good.state_dict_metadata["w"].chunks[0].sizes = torch.Size([5])
    assert "holds F32 of shape [4], .metadata says F32 of shape [5]" in told()
    good.state_dict_metadata["w"].chunks[0].offsets = torch.Size([1])
    assert "a piece of w at [1] that lies in no file" in told()
    place.write_bytes(pickle.dumps({"state_dict_metadata": {}}))
    with pytest.raises(CheckpointError, match="something else than the metadata"):
        open_dcp(tmp_path / "dcp")


def test_the_process_that_reads_can_neither_write_nor_start_others(tmp_path: Path) -> None:
    code = (
        "import os, resource, subprocess, sys\n"
        "from tidemill.checkpoint.foreign import child\n"
        "child._give_up()\n"
        f"file = os.open({str(tmp_path / 'x')!r}, os.O_CREAT | os.O_WRONLY)\n"
        "try: os.write(file, b'x')\n"
        "except OSError as error: print('cannot write')\n"
        "print(resource.getrlimit(resource.RLIMIT_NPROC)[0], resource.getrlimit(resource.RLIMIT_AS)[0])\n"
        "print([name for name in ('torch', 'numpy') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["cannot write", f"0 {child._MEMORY}", "[]"]
    assert resource.getrlimit(resource.RLIMIT_NPROC)[0] != 0


@pytest.mark.parametrize(
    "script",
    ["print('{}')", "print('[]')", "print('no JSON')", "import os; os.kill(os.getpid(), 9)",
     """print('{"result": {"tensors": []}}')""", """print('{"result": [1, 2]}')"""],
)  # fmt: skip
def test_a_process_that_was_taken_over_is_not_believed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str
) -> None:
    wrong = tmp_path / "python"
    wrong.write_text(f"#!{sys.executable}\n{script}\n")
    wrong.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(wrong))
    with pytest.raises(CheckpointError, match="cannot read"):
        guard.ask_for_metadata(tmp_path / ".metadata")
    with pytest.raises(CheckpointError, match="cannot read"):
        guard.ask_for_archives([(tmp_path / "a", 0, 1)])
    assert guard.ask_for_archives([]) == []


def test_secrets_stay_with_the_parent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = tmp_path / "python"
    spy.write_text(
        f"#!{sys.executable}\nimport json, os\nprint(json.dumps({{'refused': str('HF_TOKEN' in os.environ)}}))\n"
    )
    spy.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(spy))
    monkeypatch.setenv("HF_TOKEN", "secret")
    with pytest.raises(CheckpointError, match="it holds False"):
        guard.ask_for_metadata(tmp_path / ".metadata")


def test_the_reader_gives_plain_values_records_and_tensors() -> None:
    assert read_pickle(tensor_pickle(1, (2, 3), (3, 1))) == {
        "w": ForeignTensor(StorageKey("0", "F32"), "F32", 1, (2, 3), (3, 1))
    }
    with pytest.raises(ForbiddenError, match="a persistent id that is no storage"):
        read_pickle(b"\x80\x02K\x01Q.")
    with pytest.raises(ForbiddenError, match="a tensor without a storage"):
        read_pickle(b"ctorch._utils\n_rebuild_tensor_v2\n(I1\nI2\nI3\nI4\ntR.")
    with pytest.raises(ForbiddenError, match="something else than the metadata"):
        listed_tensors(pickle.dumps([1]))
    with pytest.raises(ForbiddenError, match="no torch archive"):
        archived_tensors(io.BytesIO(b"x" * 100), 10, 50)


def test_the_child_answers_on_its_output(tmp_path: Path) -> None:
    path = archive(tmp_path / "a", tensor_pickle(0, (2,), (2,)), {"0": bytes(16)})
    requests: dict[str, dict[str, Any]] = {
        "result": {"archives": [[str(path), 0, path.stat().st_size]]},
        "refused": {"metadata": str(path)},
        "unreadable": {"metadata": str(tmp_path / "none")},
    }
    for kind, request in requests.items():
        done = subprocess.run(
            [sys.executable, "-m", "tidemill.checkpoint.foreign.child"],
            input=json.dumps(request).encode(),
            capture_output=True,
            check=True,
        )
        assert list(json.loads(done.stdout)) == [kind], done.stderr
