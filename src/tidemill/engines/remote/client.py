"""JSON over HTTP to one server, with a deadline on every call, from many threads.

Connections are kept and used again. A call raises one of two errors: the server refused what was asked, or nothing can
be said of the server any more. Promises: the token is in no message, no log and no representation of any object here.
Does not: follow redirects, use proxies, or send a call again that the server may be working on.
"""

import http.client
import json
import math
import socket
import ssl
import threading
import time
from typing import Any
from urllib.parse import SplitResult, urlsplit

from tidemill.errors import ConfigError, EngineError
from tidemill.units import format_seconds

__all__ = ["Client", "Refused", "ServerFailed", "ServerSilent", "checked_url"]

_LARGEST = 256 << 20  # bytes of an answer: no completion comes near, and an endless one ends
_PIECE = 1 << 16
_SHOWN = 300  # characters of a server's words that a message repeats


class ServerFailed(EngineError):
    """The server is gone, silent, or says what makes no sense: whatever it holds is in doubt."""


class ServerSilent(ServerFailed):
    """It did not answer in time, and may only be slow."""


class Refused(EngineError):
    """The server is well and will not do this, today or tomorrow: HTTP 4xx."""

    def __init__(self, message: str, status: int = 400) -> None:
        super().__init__(message)
        self.status = status


def checked_url(url: str) -> SplitResult:
    """The parts of `url`. Raises ConfigError for what is no plain address of a server."""
    parts = urlsplit(url)
    if parts.username is not None or parts.password is not None:
        raise ConfigError("an engine's url holds a user or a password; put a token in the variable engine.token_env")
    try:
        port = parts.port
    except ValueError:
        port = 0
    if parts.scheme not in {"http", "https"} or not parts.hostname or parts.query or parts.fragment or port == 0:
        raise ConfigError(f"cannot use {url!r} as an engine's url; write it as http://host:port or https://host/path")
    return parts


class Client:
    """One server. `named` is how messages call it."""

    def __init__(self, url: str, *, token: str = "", named: str = "") -> None:
        self._parts = checked_url(url)
        self._prefix = self._parts.path.rstrip("/")
        self.url = f"{self._parts.scheme}://{self._parts.netloc}{self._prefix}"
        self.named = named or self.url
        self._headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if token:
            self._headers["Authorization"] = f"Bearer {token}"
        self._secret = token
        self._lock = threading.Lock()
        self._idle: list[http.client.HTTPConnection] = []
        self._busy: dict[http.client.HTTPConnection, None] = {}
        self._cut = 0

    def __repr__(self) -> str:
        return f"Client({self.url})"

    def get(self, path: str, *, deadline: float) -> Any:
        """See `call`."""
        return self.call("GET", path, None, deadline=deadline)

    def post(self, path: str, body: Any, *, deadline: float) -> Any:
        """See `call`."""
        return self.call("POST", path, body, deadline=deadline)

    def call(self, method: str, path: str, body: Any, *, deadline: float) -> Any:
        """The JSON value that the server answers, its text when that is no JSON by its own account, or None for none.

        Raises Refused for 4xx, ServerFailed for whatever else is no success within `deadline` seconds.
        """
        ends = time.monotonic() + deadline
        data = b"" if body is None else json.dumps(body).encode()
        what = f"{method} {path.partition('?')[0]}"
        try:
            status, kind, raw = self._exchange(method, path, data, ends)
        except TimeoutError:
            raise ServerSilent(
                f"{self.named} did not answer {what} within {format_seconds(deadline)}; see its log, or raise "
                "engine.request_deadline if that is normal here"
            ) from None
        except (OSError, http.client.HTTPException) as error:
            raise ServerFailed(f"{self.named} cannot be reached for {what}: {_words(error)}") from None
        if status >= 400:
            self._raise_for(status, what, raw)
        if status >= 300:
            raise ServerFailed(f"{self.named} answered {what} with a redirection ({status}); name the server itself")
        return self._parsed(what, kind, raw)

    def interrupt(self) -> None:
        """End every call under way, from another thread: their callers get ServerFailed, and the server lets go."""
        with self._lock:
            self._cut += 1
            for connection in self._busy:
                _shut(connection)
            idle, self._idle = self._idle, []
        for connection in idle:
            connection.close()

    def close(self) -> None:
        """End calls and connections."""
        self.interrupt()

    def _exchange(self, method: str, path: str, data: bytes, ends: float) -> tuple[int, str, bytes]:
        cut = self._cut
        connection, kept = self._take(ends, cut)
        try:
            response = self._sent(connection, method, path, data, ends)
        except (http.client.RemoteDisconnected, ConnectionError):
            self._drop(connection)
            if not kept:
                raise
            # A server closes what was idle too long: nothing of this call reached it.
            connection, _ = self._take(ends, cut, fresh=True)
            try:
                response = self._sent(connection, method, path, data, ends)
            except BaseException:
                self._drop(connection)
                raise
        except BaseException:
            self._drop(connection)
            raise
        try:
            raw = _body(response, connection, ends)
        except BaseException:
            self._drop(connection)
            raise
        status, kind, closes = response.status, response.getheader("Content-Type", ""), response.will_close
        self._give(connection, keep=not closes)
        return status, kind, raw

    def _sent(
        self, connection: http.client.HTTPConnection, method: str, path: str, data: bytes, ends: float
    ) -> http.client.HTTPResponse:
        connection.timeout = _left(ends)
        if connection.sock is not None:
            connection.sock.settimeout(_left(ends))
        connection.request(method, self._prefix + path, body=data or None, headers=self._headers)
        connection.sock.settimeout(_left(ends))
        return connection.getresponse()

    def _take(self, ends: float, cut: int, *, fresh: bool = False) -> tuple[http.client.HTTPConnection, bool]:
        """A connection, and whether it was used before. Refused to a call that began before cut number `cut` + 1."""
        with self._lock:
            if self._idle and not fresh and cut == self._cut:
                connection = self._idle.pop()
                self._busy[connection] = None
                return connection, True
        made = _connection(self._parts, _left(ends))
        made.connect()
        with self._lock:
            if cut != self._cut:
                made.close()
                raise ConnectionAbortedError("the call was ended by its caller")
            self._busy[made] = None
        return made, False

    def _give(self, connection: http.client.HTTPConnection, *, keep: bool) -> None:
        with self._lock:
            self._busy.pop(connection, None)
            if keep:
                self._idle.append(connection)
                return
        connection.close()

    def _drop(self, connection: http.client.HTTPConnection) -> None:
        with self._lock:
            self._busy.pop(connection, None)
        connection.close()

    def _raise_for(self, status: int, what: str, raw: bytes) -> None:
        said = self._said(raw)
        if status in {401, 403}:
            raise Refused(
                f"{self.named} refuses {what}: it wants a token ({status}); put it in a variable of the environment "
                "and name that in engine.token_env",
                status,
            )
        # 408 and 429 pass: they tell of the server's load, not of what was asked.
        if status < 500 and status not in {408, 429}:
            raise Refused(f"{self.named} refuses {what} ({status}): {said}", status)
        raise ServerFailed(f"{self.named} failed at {what} ({status}): {said}")

    def _parsed(self, what: str, kind: str, raw: bytes) -> Any:
        if not raw.strip():
            return None
        if "json" not in kind:
            return raw.decode(errors="replace")
        try:
            return json.loads(raw)
        except (ValueError, RecursionError) as error:
            raise ServerFailed(f"{self.named} answered {what} with what is no JSON: {_words(error)}") from None

    def _said(self, raw: bytes) -> str:
        text = " ".join(raw.decode(errors="replace").split())
        if self._secret:
            text = text.replace(self._secret, "<token>")
        return text[:_SHOWN] or "no reason given"


def _connection(parts: SplitResult, seconds: float) -> http.client.HTTPConnection:
    host = parts.hostname or ""
    if parts.scheme == "https":
        return http.client.HTTPSConnection(host, parts.port, timeout=seconds, context=ssl.create_default_context())
    return http.client.HTTPConnection(host, parts.port, timeout=seconds)


def _left(ends: float) -> float:
    left = ends - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return math.nextafter(left, math.inf)


def _body(response: http.client.HTTPResponse, connection: http.client.HTTPConnection, ends: float) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        # A response that closes its connection has taken the socket over; then the time set last holds.
        if connection.sock is not None:
            connection.sock.settimeout(_left(ends))
        _left(ends)
        piece = response.read1(_PIECE)
        if not piece:
            break
        pieces.append(piece)
        size += len(piece)
        if size > _LARGEST:
            raise http.client.HTTPException(f"more than {_LARGEST} bytes came")
    if response.length:
        raise http.client.IncompleteRead(b"".join(pieces), response.length)
    # The connection asks whether the response before was read to its end; older Pythons do not notice it here.
    response.close()
    return b"".join(pieces)


def _shut(connection: http.client.HTTPConnection) -> None:
    try:
        if connection.sock is not None:
            connection.sock.shutdown(socket.SHUT_RDWR)
    except OSError:
        return


def _words(error: BaseException) -> str:
    if isinstance(error, http.client.IncompleteRead):
        return f"the answer broke off after {len(error.partial)} bytes"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
