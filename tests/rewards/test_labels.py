from tidemill.rewards.labels import accepted


def test_labels_are_compared_as_text():
    assert accepted("4") == ("4",)
    assert accepted(4) == ("4",)
    assert accepted(True) == ("true",)
    assert accepted(["4", "four", 4.5]) == ("4", "four", "4.5")
    assert accepted({"a": "é"}) == ('{"a": "é"}',)


def test_no_label_accepts_nothing():
    assert accepted(None) == ()
    assert accepted([None]) == ()
