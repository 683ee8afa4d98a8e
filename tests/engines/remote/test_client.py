"""tidemill.engines.remote.client."""

import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from tidemill.engines.remote.client import Client, Refused, ServerFailed, ServerSilent, checked_url
from tidemill.errors import ConfigError


class Line:
    """A server that answers each connection with bytes as they are given, in pieces with pauses."""

    def __init__(self, pieces: list[bytes | float]) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.heard: list[bytes] = []
        self.pieces = pieces
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.socket.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(connection,), daemon=True).start()

    def _answer(self, connection: socket.socket) -> None:
        with connection:
            self.heard.append(connection.recv(65536))
            for piece in self.pieces:
                if isinstance(piece, bytes):
                    try:
                        connection.sendall(piece)
                    except OSError:
                        return
                else:
                    time.sleep(piece)


@pytest.fixture
def line() -> Iterator[Callable[..., Line]]:
    made: list[Line] = []

    def make(*pieces: bytes | float) -> Line:
        made.append(Line(list(pieces)))
        return made[-1]

    yield make
    for each in made:
        each.socket.close()


def told(status: str, body: bytes, kind: bytes = b"application/json") -> bytes:
    head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\nContent-Type: ".encode()
    return head + kind + b"\r\n\r\n" + body


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("http://me:secret@host:80", "user or a password"),
        ("ftp://host", "write it as"),
        ("host:8000", "write it as"),
        ("http://", "write it as"),
        ("http://host:99999", "write it as"),
        ("http://host?x=1", "write it as"),
    ],
)
def test_what_is_no_address_of_a_server_is_refused_without_its_secrets(url: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as error:
        checked_url(url)
    assert "secret" not in str(error.value)


def test_an_answer_is_json_text_or_nothing(line: Callable[..., Line]) -> None:
    assert Client(line(told("200 OK", b'{"a": [1.5]}')).url).get("/x", deadline=5) == {"a": [1.5]}
    assert Client(line(told("200 OK", b"plain", b"text/plain")).url).get("/x", deadline=5) == "plain"
    assert Client(line(told("200 OK", b"")).url).get("/x", deadline=5) is None


def test_a_path_of_the_address_stands_before_every_path(line: Callable[..., Line]) -> None:
    server = line(told("200 OK", b"1"))
    Client(server.url + "/deep/").post("/x", {"a": 1}, deadline=5)
    assert server.heard[0].startswith(b"POST /deep/x HTTP/1.1")


@pytest.mark.parametrize(
    ("answer", "error", "words"),
    [
        (told("404 Not Found", b'{"detail": "nothing here"}'), Refused, r"refuses GET /x \(404\): .*nothing here"),
        (told("401 Unauthorized", b"no, secret-token!"), Refused, "wants a token"),
        (told("429 Too Many", b"busy"), ServerFailed, r"failed at GET /x \(429\): busy"),
        (told("500 Error", b"bad: secret-token"), ServerFailed, r"failed at GET /x \(500\): bad: <token>"),
        (told("302 Found", b""), ServerFailed, "redirection"),
        (told("200 OK", b'{"a": '), ServerFailed, "no JSON"),
        (told("200 OK", b"[" * 100_000), ServerFailed, "no JSON"),
        (told("200 OK", b'{"a": 1}')[:-3], ServerFailed, "broke off after 5 bytes"),
        (b"nonsense\r\n\r\n", ServerFailed, "BadStatusLine"),
        (b"", ServerFailed, "cannot be reached for GET /x"),
    ],
)
def test_whatever_is_no_success_is_one_of_two_errors(
    line: Callable[..., Line], answer: bytes, error: type[Exception], words: str
) -> None:
    client = Client(line(answer).url, token="secret-token", named="engine-0")
    with pytest.raises(error, match=words) as raised:
        client.get("/x", deadline=5)
    assert type(raised.value) is error
    assert "secret-token" not in str(raised.value) and str(raised.value).startswith("engine-0 ")
    assert "secret" not in repr(client)


@pytest.mark.parametrize("pieces", [(9.0,), (told("200 OK", b"[1]")[:-2], 9.0), tuple([b"H", 0.3] * 30)])
def test_a_deadline_is_of_the_whole_call(line: Callable[..., Line], pieces: tuple[bytes | float, ...]) -> None:
    began = time.monotonic()
    with pytest.raises((ServerSilent, ServerFailed)):
        Client(line(*pieces).url).get("/x", deadline=0.5)
    assert time.monotonic() - began < 12 if pieces[0] == b"H" else time.monotonic() - began < 2


def test_nobody_there_is_said_at_once() -> None:
    with pytest.raises(ServerFailed, match="cannot be reached for GET /x: ConnectionRefusedError"):
        Client("http://127.0.0.1:9").get("/x", deadline=5)


def test_an_interruption_ends_calls_under_way_and_later_ones_go_on(line: Callable[..., Line]) -> None:
    server = line(30.0)
    client = Client(server.url)
    errors: list[Exception] = []

    def ask() -> None:
        try:
            client.get("/x", deadline=30)
        except ServerFailed as error:
            errors.append(error)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    while len(server.heard) < 3:
        time.sleep(0.01)
    client.interrupt()
    for thread in threads:
        thread.join(5)
    assert len(errors) == 3
    server.pieces = [told("200 OK", b"7")]
    assert client.get("/x", deadline=5) == 7


def test_a_connection_that_the_server_closed_while_idle_is_opened_again(line: Callable[..., Line]) -> None:
    server = line(told("200 OK", b"1"))
    client = Client(server.url)
    assert [client.get("/x", deadline=5) for _ in range(3)] == [1, 1, 1]
    assert len(server.heard) == 3
