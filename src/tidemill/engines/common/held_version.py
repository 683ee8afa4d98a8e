"""Which version of the weights an engine holds, and when it is none: the rules that no engine may have of its own."""

import contextlib
from collections.abc import Iterator, Sequence

from tidemill.contracts.state import PolicyVersion
from tidemill.errors import WeightSyncError

__all__ = ["HeldVersion"]


class HeldVersion:
    """Unknown from `begin` or `forget` until `take`, and older than none that was taken before."""

    def __init__(self) -> None:
        self._version: PolicyVersion | None = None
        self._newest: PolicyVersion | None = None
        self._updating = False

    @property
    def version(self) -> PolicyVersion | None:
        """Of all the weights; None when unknown."""
        return self._version

    def known(self) -> PolicyVersion:
        """The version to generate under. Raises WeightSyncError when unknown."""
        if self._version is None:
            raise WeightSyncError(
                "cannot generate: the version of the engine's weights is unknown, because it slept or an update did "
                "not end; sync the weights first"
            )
        return self._version

    def forget(self) -> None:
        """The weights are gone."""
        self._version, self._updating = None, False

    def begin(self) -> None:
        """An update is open from now on."""
        self._version, self._updating = None, True

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Weights come within the block; unless it ends well the update is over. Raises WeightSyncError without one."""
        if not self._updating:
            raise WeightSyncError("cannot load weights into the engine: no update is open; call begin_update first")
        self._updating = False
        yield
        self._updating = True

    def check(self, version: PolicyVersion, missing: Sequence[str]) -> None:
        """Raises WeightSyncError unless `version` may be taken now. `missing` are the weights that did not come."""
        if missing or not self._updating:
            why = (
                f"{len(missing)} did not come, among them {', '.join(missing[:3])}" if missing else "no update is open"
            )
            raise WeightSyncError(
                f"cannot publish version {version}: the engine does not hold a whole set of weights ({why}); sync again"
            )
        if self._newest is not None and version < self._newest:
            raise WeightSyncError(
                f"cannot publish version {version}: the engine has held {self._newest} before and versions never go "
                f"back; a restarted run must raise the attempt"
            )

    def take(self, version: PolicyVersion) -> None:
        """Ends the update, whose `check` went well."""
        self._version = self._newest = version
        self._updating = False
