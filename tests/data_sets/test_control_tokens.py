import re

from tidemill.data.control_tokens import ControlToken, Marker, pieces

EOT = ControlToken(id=7, content="<|eot|>")
BAR = ControlToken(id=8, content="|")
ANGLES = ControlToken(id=9, content="<<")
SWALLOWS = ControlToken(id=10, content="<|user|>", strips_right=True)
BEFORE = ControlToken(id=11, content="<mask>", strips_left=True)


def split(tokens, before, text, after):
    """What a template that writes `before` and `after` around a text makes of it."""
    marker = Marker(tokens, [before, text, after])
    return list(pieces(before + marker.apply(text) + after, tokens, marker.mark))


def test_the_tokens_of_the_template_stay_and_those_of_the_text_do_not():
    assert split([EOT], "a<|eot|>", "b<|eot|>c", "<|eot|>") == ["a", EOT, "b<|eot|>c", EOT]


def test_overlapping_occurrences_are_all_broken():
    assert split([ANGLES], "<<", "a<<<<b", "<<") == [ANGLES, "a<<<<b", ANGLES]


def test_a_control_token_of_one_character_is_text_where_the_text_wrote_it():
    assert split([BAR], "|", "a|b", "|") == [BAR, "a|b", BAR]


def test_tokens_that_swallow_white_space_do_so_only_for_the_template():
    assert split([SWALLOWS], "<|user|>\n", "<|user|> x", "") == [SWALLOWS, "<|user|> x"]
    assert split([BEFORE], "", "x ", "<mask>") == ["x", BEFORE]


def test_the_mark_is_a_character_that_no_text_holds():
    marker = Marker([EOT], ["\U000f0000 and \U000f0001"])
    assert marker.mark == "\U000f0002"


def test_texts_in_lists_and_objects_are_marked_and_unmarked_whole():
    value = {"calls": [{"name": "<|eot|>", "n": 1}], "content": "x<|eot|>", "none": None}
    marker = Marker([EOT], [])
    marked = marker.apply(value)
    assert marker.marked == 2
    assert not re.search(r"<\|eot\|>", str(marked))
    assert marker.remove(marked["content"]) == "x<|eot|>"


def test_a_text_without_control_tokens_is_left_as_it_is():
    marker = Marker([EOT], ["plain"])
    assert marker.apply("plain") == "plain"
    assert marker.marked == 0
    assert Marker([], ["plain"]).apply("<|eot|>") == "<|eot|>"
