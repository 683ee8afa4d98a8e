"""Weights in one buffer (`tidemill.weights.parcel`) and the names of their dtypes (`tidemill.weights.elements`)."""

import itertools
import pickle
import warnings

import numpy as np
import pytest
import torch

from tidemill.errors import WeightSyncError
from tidemill.weights.elements import torch_dtype
from tidemill.weights.parcel import ALIGNMENT, aligned, host_bytes, pack, unpack

WEIGHTS = [
    ("embed", torch.randn(11, 4)),
    ("scale", torch.tensor(3.25)),
    ("nothing", torch.zeros(0, 3)),
    ("strided", torch.randn(6, 5).t()),
    ("nan", torch.tensor([float("nan"), -0.0, float("inf")])),
]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_what_is_unpacked_is_what_was_packed_cast_once(dtype: str) -> None:
    parcel = pickle.loads(pickle.dumps(pack(WEIGHTS, dtype)))
    found = dict(unpack(parcel.entries, host_bytes(parcel.payload)))
    assert list(found) == [name for name, _ in WEIGHTS]
    for name, weight in WEIGHTS:
        expected = weight.to(torch_dtype(dtype))
        assert found[name].dtype == expected.dtype
        assert found[name].shape == expected.shape
        assert (
            found[name]
            .contiguous()
            .view(torch.uint8 if weight.dim() else expected.dtype)
            .equal(expected.contiguous().view(torch.uint8 if weight.dim() else expected.dtype))
        )


def test_every_weight_starts_aligned_and_none_overlaps_another() -> None:
    entries = pack(WEIGHTS, "bfloat16").entries
    assert all(entry.start % ALIGNMENT == 0 for entry in entries)
    assert all(one.start + one.nbytes <= other.start for one, other in itertools.pairwise(entries))
    assert [aligned(size) for size in (0, 1, 256, 257)] == [0, 256, 256, 512]


def test_read_only_memory_is_read_without_a_warning() -> None:
    parcel = pack(WEIGHTS, "float32")
    parcel.payload.flags.writeable = False
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = dict(unpack(parcel.entries, host_bytes(parcel.payload)))
    assert torch.equal(found["embed"], WEIGHTS[0][1])


def test_no_weights_make_an_empty_parcel() -> None:
    parcel = pack([], "float32")
    assert parcel.entries == ()
    assert isinstance(parcel.payload, np.ndarray)
    assert list(unpack(parcel.entries, host_bytes(parcel.payload))) == []


def test_a_dtype_that_weights_are_not_cast_to_is_refused_by_name() -> None:
    with pytest.raises(WeightSyncError, match="int4"):
        torch_dtype("int4")
