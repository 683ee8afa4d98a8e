import json

import pytest

from tidemill.contracts.state import Cursor
from tidemill.data.demonstrations import Demonstrations
from tidemill.errors import DataError


def write(path, labels):
    path.write_text(
        "".join(json.dumps({"prompt": f"hello {n}", "label": label}) + "\n" for n, label in enumerate(labels))
    )
    return path


def test_pairs_are_the_prompts_and_labels_of_the_rows_each_answer_ended(load, tiny, tmp_path):
    data = load(write(tmp_path / "rows.jsonl", ["the", "ing", "hello"]))
    pairs, cursor = Demonstrations(data, tiny, 2).take(Cursor())
    assert pairs == [
        (tiny.encode_plain("hello 0"), tiny.encode_completion("the")),
        (tiny.encode_plain("hello 1"), tiny.encode_completion("ing")),
    ]
    following, _ = Demonstrations(data, tiny, 2).take(cursor)
    assert following[0] == (tiny.encode_plain("hello 2"), tiny.encode_completion("hello"))
    assert following[1] == pairs[0]


def test_rows_without_a_text_to_imitate_are_refused_and_named(load, tiny, tmp_path):
    data = load(write(tmp_path / "rows.jsonl", ["the", None, 4]))
    with pytest.raises(DataError, match=r"2 of 3 rows have no text as label, the first is 'line-2'"):
        Demonstrations(data, tiny, 2)
