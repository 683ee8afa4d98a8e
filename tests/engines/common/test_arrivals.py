import pytest

from tidemill.engines.common.arrivals import Arrivals
from tidemill.errors import WeightSyncError


def test_every_name_is_taken_once_and_none_besides() -> None:
    arrivals = Arrivals(["a", "b", "c"])
    assert arrivals.missing() == ("a", "b", "c")
    arrivals.check("b")
    arrivals.add("b")
    assert arrivals.missing() == ("a", "c")
    with pytest.raises(WeightSyncError, match="b into the engine: it came twice"):
        arrivals.check("b")
    with pytest.raises(WeightSyncError, match="module.a into the engine: it has no weight of that name"):
        arrivals.check("module.a")
    arrivals.begin()
    arrivals.check("b")
    assert arrivals.missing() == ("a", "b", "c")
