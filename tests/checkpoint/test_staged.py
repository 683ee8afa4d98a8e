from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
from tests.checkpoint.pieces import counted, piece, shards_of

from tidemill.checkpoint.shard import LocalShard
from tidemill.checkpoint.staged import Stager, stage
from tidemill.contracts.checkpoint import HeldTensor, Snapshot, TensorBytes
from tidemill.contracts.state import Cursor, RunState
from tidemill.errors import CheckpointError

STATE = RunState(step=4, attempt=1, seed=0, cursor=Cursor(), warm_up_cursor=Cursor())


def staged(**snapshot: Any) -> Any:
    return stage(STATE, {"trainer": Snapshot(**snapshot)})


def test_files_are_named_by_part_and_number_and_their_sizes_known_from_specs_alone() -> None:
    shards = shards_of({"w": counted((5, 3)), "v": counted((4,), "F32")}, 4)
    made = staged(shards=shards)
    assert [file.name for file in made.files] == [f"trainer-{rank:05d}-of-00004.safetensors" for rank in range(4)]
    assert [file.specs["w"].shape for file in made.files] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert [file.bytes - 4096 for file in made.files] == [28, 28, 16, 4]
    assert made.total_bytes == sum(file.bytes for file in made.files) + len(made.state)


def test_a_part_in_one_piece_is_one_shard_and_a_part_without_tensors_none() -> None:
    whole = TensorBytes(dtype="F32", shape=(3,), data=memoryview(bytes(12)))
    assert [file.name for file in staged(tensors={"w": whole}).files] == ["trainer-00000-of-00001.safetensors"]
    assert staged(extra={"x": 1}).files == ()


def test_tensors_and_shards_at_once_are_refused() -> None:
    whole = TensorBytes(dtype="F32", shape=(3,), data=memoryview(bytes(12)))
    with pytest.raises(CheckpointError, match="both tensors and shards"):
        staged(tensors={"w": whole}, shards=shards_of({"w": counted((3,))}, 2))


@pytest.mark.parametrize(
    ("pieces", "said"),
    [
        ([((0, 0), (2, 4)), ((2, 0), (1, 4))], r"w of shape \[4, 4\] has 12 of 16 elements.*\[3, 0\]"),
        ([((0, 0), (3, 4)), ((2, 0), (2, 4))], r"00000-of-00002.* and .*00001-of-00002.* overlap, at \[2, 0\]"),
        ([((0, 0), (4, 4)), ((0, 0), (4, 4))], "overlap"),
    ],
)
def test_ranks_that_do_not_make_whole_tensors_are_refused(pieces: list[Any], said: str) -> None:
    array = counted((4, 4))
    shards = [LocalShard({"w": piece(array, offset, shape)}) for offset, shape in pieces]
    with pytest.raises(CheckpointError, match=said):
        staged(shards=shards)


def test_a_piece_whose_bytes_do_not_fit_is_refused() -> None:
    wrong = TensorBytes(dtype="F32", shape=(3,), data=memoryview(bytes(8)))
    with pytest.raises(CheckpointError, match="it has 8 bytes"):
        staged(tensors={"w": wrong})


def test_a_scalar_of_one_rank_is_whole() -> None:
    scalar = piece(np.float32(1).reshape(()), (), ())
    rows = shards_of({"w": counted((4,))}, 2)
    assert len(staged(shards=[LocalShard({"step": scalar}), *rows]).files) == 3


class Counted(Mapping[str, HeldTensor]):
    """Tensors that say how often they were looked at."""

    def __init__(self, tensors: Mapping[str, HeldTensor]) -> None:
        self.tensors, self.looks = tensors, 0

    def __getitem__(self, name: str) -> HeldTensor:
        self.looks += 1
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)


def test_what_has_the_layout_of_the_save_before_is_not_laid_out_again() -> None:
    lay_out, layout = Stager(), object()
    tensors = Counted({f"w{i}": TensorBytes(dtype="U8", shape=(i,), data=memoryview(bytes(i))) for i in range(9)})
    first = lay_out(STATE, {"trainer": Snapshot(tensors=tensors, layout=layout)})
    looks = tensors.looks
    again = lay_out(STATE, {"trainer": Snapshot(tensors=tensors, layout=layout)})
    assert tensors.looks == looks > 0
    assert [(file.name, file.layout.slots, file.layout.header) for file in again.files] == [
        (file.name, file.layout.slots, file.layout.header) for file in first.files
    ]
    assert again.files[0].shard is not first.files[0].shard
    assert again.files[0].entry(("ab",)).slices is first.files[0].entry(("cd",)).slices
    for other in (object(), None):
        less = Snapshot(tensors={"w1": tensors["w1"]}, layout=other)
        assert [slot.name for slot in lay_out(STATE, {"trainer": less}).files[0].layout.slots] == ["w1"]
    more = lay_out(STATE, {"trainer": Snapshot(tensors=tensors)})
    assert len(more.files[0].layout.slots) == 9
