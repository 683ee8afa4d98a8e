from tidemill.data.text import has_surrogates, without_surrogates


def test_half_a_pair_is_replaced_wherever_it_stands():
    value = {"a\ud83d": ["x\udc00", {"b": "ok \U0001f600"}, 1, None]}
    assert has_surrogates(value)
    assert without_surrogates(value) == {"a\ufffd": ["x\ufffd", {"b": "ok \U0001f600"}, 1, None]}


def test_ordinary_values_are_left_alone():
    value = {"a": ["\u2028", 1.5, True, None], "b": "\U0001f600\x00"}
    assert not has_surrogates(value)
    assert without_surrogates(value) == value
