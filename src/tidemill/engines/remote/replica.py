"""One server among several that answer for one engine: what it holds, and whether it may be asked.

A server that fails at anything is out, with the reason, until it has been well again, has taken the present weights
anew and has proven that it answers from them.
"""

import contextlib
from dataclasses import dataclass

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.footprint import Part
from tidemill.engines.remote.client import Client, Refused, ServerFailed
from tidemill.engines.remote.dialect import Dialect, Served, ServerAnswer, checked_answer, request_seed
from tidemill.engines.remote.probe import NoReference, Probe, check_log_probs
from tidemill.engines.remote.staged_weights import StagedWeights
from tidemill.engines.remote.watching import NoProcess, Process
from tidemill.errors import ConfigError, EngineError, TidemillError, WeightSyncError

__all__ = ["TEXT", "Expected", "Patience", "Replica"]

TEXT = "Ab 12, x!"
_SHOWN = 8
_DYING = 3.0  # seconds for a process whose connections are gone to be known as gone too


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a server must have: a model of `kind` with `vocabulary` ids, room for `context` tokens, a tokenizer."""

    kind: str
    vocabulary: int
    context: int
    text_ids: tuple[int, ...]
    ends: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Patience:
    """Seconds: for one answer, for taking weights or moving memory, for short questions."""

    answer: float
    transition: float
    control: float


class Replica:
    """`name` is as in `engine-0 at http://host:8000`. `process` is who ends and starts the server, if anybody here."""

    def __init__(
        self,
        *,
        name: str,
        client: Client,
        dialect: Dialect,
        expected: Expected,
        patience: Patience,
        seeded: bool,
        process: Process | None = None,
    ) -> None:
        self.name = name
        self._client, self._dialect, self._expected, self._patience = client, dialect, expected, patience
        self._seeded = seeded
        self.process: Process = process or NoProcess()
        self._model = ""
        self._stamp = ""
        self._proven = False
        self._epoch = 0
        self._awake = Part.NONE
        self.serving = False
        # Whether it failed since it was to take the present weights: then it does not hold them.
        self.lost = False
        self.why = "it has no weights yet"

    def introduce(self, wanted: str = "") -> None:
        """Find out what is behind the address. Raises ConfigError for another model, EngineError when nobody is."""
        self._dialect.healthy(self._client, deadline=self._patience.control)
        served = self._dialect.served(self._client, text=TEXT, deadline=self._patience.control)
        if wrong := self._wrong(served, wanted):
            raise ConfigError(f"{self.name} serves another model than this run's: {wrong}")
        self._model = served.name

    def _wrong(self, served: Served, wanted: str) -> str:
        mine = self._expected
        if wanted and served.name != wanted:
            return f"it calls it {served.name}, and engine.served_model is {wanted}"
        if served.kind and mine.kind and served.kind != mine.kind:
            return f"it is a {served.kind}, and the model folder holds a {mine.kind}"
        if served.context and served.context < mine.context:
            return f"it takes {served.context} tokens, and prompts and answers are up to {mine.context}"
        if served.token_ids and served.token_ids != mine.text_ids:
            theirs, ours = list(served.token_ids)[:_SHOWN], list(mine.text_ids)[:_SHOWN]
            return f"its tokenizer makes {theirs} of {TEXT!r}, and the model folder's makes {ours}"
        return ""

    def out(self, why: str) -> None:
        """Not to be asked any more. Ends what it is being asked."""
        self.serving, self._proven, self.lost, self.why = False, False, True, why
        self._client.interrupt()

    def forget(self) -> None:
        """Its weights are no version any more: whoever is bringing it back to the present one comes too late."""
        self._epoch += 1
        self.serving, self._proven, self.lost, self.why = False, False, False, "its weights are being replaced"

    def renew(self, staged: StagedWeights, stamp: str, probe: Probe | NoReference, version: str) -> None:
        """Bring one that was out back: well, with the staged weights, and proven. Raises TidemillError."""
        epoch = self._epoch
        self._be_well()
        self.take(staged, stamp)
        self._compare(probe, staged, version)
        if epoch != self._epoch:
            raise WeightSyncError(f"{self.name} was brought to version {version}, which is the present one no more")
        self._proven, self.serving, self.lost, self.why = True, True, False, ""

    def _be_well(self) -> None:
        """Start it again if it is gone, or does not answer, and if that is ours to do."""
        try:
            if self.process.alive():
                self._dialect.healthy(self._client, deadline=self._patience.control)
                return
            failure = ServerFailed(f"{self.name} is gone: {self.process.last_words()}")
        except ServerFailed as error:
            failure = error
        if not self.process.restart():
            raise failure

    def take(self, staged: StagedWeights, stamp: str) -> None:
        """Let it load the staged weights. It serves after `prove`. Raises TidemillError."""
        try:
            self._stamp = self._dialect.load(
                self._client, folder=staged.folder, stamp=stamp, deadline=self._patience.transition
            )
        except Refused as error:
            raise WeightSyncError(f"cannot hand the weights to {self.name}: {error}") from error

    def prove(self, probe: Probe | NoReference, staged: StagedWeights, version: str) -> None:
        """Compare it with a forward over the staged weights, once a version; then it serves. Raises TidemillError."""
        if self._proven:
            self._check_stamp()
        else:
            self._compare(probe, staged, version)
        self._proven, self.serving, self.why = True, True, ""

    def _compare(self, probe: Probe | NoReference, staged: StagedWeights, version: str) -> None:
        vocabulary = self._expected.vocabulary
        probe.check(self.ask, staged.views(), named=self.name, version=version)
        check_log_probs(self.ask, dialect=self._dialect, vocabulary=vocabulary, named=self.name)
        self._check_stamp()

    def confirm(self) -> None:
        """Raises ServerFailed unless it is well and holds what it was given last."""
        self._dialect.healthy(self._client, deadline=self._patience.control)
        self._check_stamp()

    def _check_stamp(self) -> None:
        stamp = self._dialect.stamp(self._client, deadline=self._patience.control)
        if stamp != self._stamp:
            raise ServerFailed(
                f"{self.name} holds other weights than it was given: it says {stamp!r} and should say {self._stamp!r}; "
                "it was started again, or somebody else changed them"
            )

    def ask(self, request: Request, sampling: Sampling) -> ServerAnswer:
        """Its answer, checked. Raises ServerFailed, after which nothing can be said of it, or EngineError."""
        dialect = self._dialect
        seed = request_seed(sampling.seed, request.key) if self._seeded else None
        stops = sorted({*self._expected.ends, *sampling.stop_token_ids})
        body = dialect.body(request, sampling, ends=stops, seed=seed, model=self._model)
        try:
            said = self._client.post(dialect.path(), body, deadline=self._patience.answer)
        except ServerFailed as error:
            raise ServerFailed(f"request {request.key}: {error}") from None
        except Refused as error:
            raise EngineError(f"cannot answer request {request.key}: {error}") from None
        answer = checked_answer(
            dialect,
            said,
            sampling=sampling,
            vocabulary=self._expected.vocabulary,
            ends=self._expected.ends,
            named=self.name,
            key=request.key,
        )
        if answer.stamp and answer.stamp != self._stamp:
            raise ServerFailed(
                f"{self.name} answered request {request.key} from other weights than it was given: it says "
                f"{answer.stamp!r} and should say {self._stamp!r}"
            )
        return answer

    # Memory

    def take_turns(self) -> None:
        """Put it to sleep as it was found: it shares a device from now on. Raises EngineError."""
        self._awake = self._dialect.awake(self._client, deadline=self._patience.control)
        self.sleep()

    def sleep(self) -> None:
        """Give its device memory back; one that is gone holds none. Raises EngineError."""
        self.forget()
        try:
            if self._awake:
                self._dialect.sleep(self._client, self._awake, deadline=self._patience.transition)
        except ServerFailed:
            if not self.process.ended(_DYING):
                raise
        self._awake = Part.NONE

    def wake_up(self, part: Part) -> None:
        """Take device memory. One of ours that is gone is started again first. Raises EngineError."""
        try:
            self._dialect.wake_up(self._client, part, deadline=self._patience.transition)
        except ServerFailed:
            if not (self.process.ended(_DYING) and self.process.restart()):
                raise
            # A new one has taken everything, and has other weights than it had.
            self.out("it was started again")
            whole = self._dialect.awake(self._client, deadline=self._patience.control)
            self._dialect.sleep(self._client, whole, deadline=self._patience.transition)
            self._dialect.wake_up(self._client, part | self._awake, deadline=self._patience.transition)
        self._awake |= part

    def interrupt(self) -> None:
        """End what it is being asked, without holding that against it."""
        self._client.interrupt()

    def close(self) -> None:
        """End connections, and the server if it is ours."""
        with contextlib.suppress(TidemillError):
            self._client.close()
        self.process.close()
