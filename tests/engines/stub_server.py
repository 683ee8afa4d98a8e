"""A server that speaks vLLM's or SGLang's protocol over the engine of this repository, and fails when it is told to.

It samples as `TransformersEngine` does, under the seed that a request brings. Weights come from folders, as they do to
the real ones; after a start it serves what its model folder holds. As a program it stands in for a server's process.
"""

import argparse
import contextlib
import json
import os
import socket
import struct
import threading
import time
from collections import Counter
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from safetensors.torch import load_file

from tidemill.contracts.engine import Request, Sampling
from tidemill.contracts.events import ignore
from tidemill.contracts.footprint import Part
from tidemill.contracts.sample import StopReason
from tidemill.contracts.state import PolicyVersion
from tidemill.engines.transformers.engine import TransformersEngine

_FORGES = ("ids", "logprobs", "outside", "late", "shape", "nan")


class Fault:
    """Armed by a test. `times` is how often it strikes, from call number `after` + 1 on."""

    def __init__(self, kind: str, *, after: int = 0, times: int = 10**9, value: Any = None) -> None:
        self.kind, self.after, self.left, self.value = kind, after, times, value

    def strikes(self) -> bool:
        self.after -= 1
        if self.after >= 0 or self.left <= 0:
            return False
        self.left -= 1
        return True


class Stub:
    """One server. `url` is stable over `die` and `rise`. `calls` counts requests by path."""

    def __init__(self, folder: Path, *, dialect: str, modern: bool = True, token: str = "", port: int = 0) -> None:
        self.folder, self.dialect, self.modern, self.token = Path(folder), dialect, modern, token
        self.calls: Counter[str] = Counter()
        self.prompts: list[tuple[int, ...]] = []
        self.faults: dict[str, Fault] = {}
        self.lock = threading.RLock()
        self.sleeping: set[str] = set()
        self.port = port
        self.temperature = True
        self.name = "stub"
        self.text_shift = 0
        self.over = threading.Event()
        self.rise()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    # Its process

    def rise(self) -> None:
        """Start, with the weights of the folder that it was made with."""
        self.engine = TransformersEngine(
            model=self.folder, device="cpu", dtype="float32", max_batch=8, emit=ignore, stop_on_leak=False
        )
        self.engine.wake_up(Part.ALL)
        self.engine.gate.open(Part.ALL)
        self.engine.load_pretrained(PolicyVersion(1, 0))
        self.version, self.started, self.paused = "default", time.time(), False
        self.sleeping, self.cached, self.seen = set(), set(), set()
        self.open: set[socket.socket] = set()
        handler = type("Handler", (_Handler,), {"stub": self})
        self.server = _bound(self.port, handler)
        self.port = self.server.server_address[1]
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def die(self) -> None:
        """Be gone at once, with every connection."""
        threading.Thread(target=self.server.shutdown, daemon=True).start()
        self.server.socket.close()
        for connection in list(self.open):
            with contextlib.suppress(OSError):
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                connection.shutdown(socket.SHUT_RDWR)

    def arm(self, kind: str, **how: Any) -> None:
        self.faults[kind] = Fault(kind, **how)

    def struck(self, kind: str) -> bool:
        with self.lock:
            return kind in self.faults and self.faults[kind].strikes()

    # What it does

    def sample(self, ids: list[int], how: dict[str, Any]) -> dict[str, Any]:
        """`how` in this project's words. Raises ValueError for what a server answers with 400."""
        if self.sleeping:
            os.write(2, b"stub: asked to generate while asleep\n")
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        seed = how.pop("seed")
        sampling = Sampling(**how, seed=seed or 0)
        try:
            with self.lock:
                self.prompts.append(tuple(ids))
                (answer,) = self.engine.generate([Request(key="", token_ids=tuple(ids))], sampling)
        except Exception as error:
            raise ValueError(str(error)) from error
        logprobs = list(answer.logprobs)
        if not self.temperature and how["temperature"]:
            logprobs = [value / 3 - 0.5 for value in logprobs]
        # As a prefix cache would: what was computed under old weights is used until it is dropped.
        if tuple(ids) in self.cached:
            logprobs = [value - 3.0 for value in logprobs]
        self.seen.add(tuple(ids))
        return {"ids": list(answer.token_ids), "logprobs": logprobs, "reason": answer.stop_reason, "text": answer.text}

    def load(self, folder: str) -> None:
        tensors = load_file(Path(folder) / "model.safetensors")
        names = set(self.engine.weight_checksums())
        with self.lock:
            if not self.struck("keep_old_weights"):
                self.engine.begin_update()
                self.engine.load_weights((name, tensor) for name, tensor in tensors.items() if name in names)
                self.engine.publish(PolicyVersion(1, 0))
            self.cached = set(self.seen)

    def drop_cache(self) -> None:
        if not self.struck("keep_cache"):
            self.cached, self.seen = set(), set()

    def forged(self, found: dict[str, Any]) -> dict[str, Any]:
        """Wrong in the way that was armed."""
        for kind in _FORGES:
            if not self.struck(kind):
                continue
            match kind:
                case "ids":
                    found["ids"] = found["ids"][:-1]
                case "logprobs":
                    found["logprobs"] = found["logprobs"] + [-1.0]
                case "outside":
                    found["ids"][0] = 10**6
                case "late":
                    found["ids"][0] = self.end_id
                case "shape":
                    found["logprobs"] = None
                case "nan":
                    found["logprobs"][0] = float("nan")
        return found

    @property
    def end_id(self) -> int:
        return int(json.loads((self.folder / "config.json").read_text())["eos_token_id"])


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True
    request_queue_size = 128

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def _bound(port: int, handler: Any) -> _Server:
    """A server at `port`, which one that died just now may still hold for a moment."""
    ends = time.monotonic() + 5
    while True:
        try:
            return _Server(("127.0.0.1", port), handler)
        except OSError:
            if time.monotonic() > ends:
                raise
            time.sleep(0.02)


class _Handler(BaseHTTPRequestHandler):
    stub: Stub
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.stub.open.add(self.connection)

    def finish(self) -> None:
        self.stub.open.discard(self.connection)
        with contextlib.suppress(OSError):
            super().finish()

    def log_message(self, *_: Any) -> None:
        pass

    def do_GET(self) -> None:
        self._serve(None)

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self._serve(json.loads(raw) if raw.strip() else None)

    def _serve(self, body: Any) -> None:
        stub, path = self.stub, urlsplit(self.path).path
        stub.calls[path] += 1
        if stub.token and self.headers.get("Authorization") != f"Bearer {stub.token}":
            return self._reply(401, {"error": f"Unauthorized: {self.headers.get('Authorization')}"})
        try:
            for work in (_VLLM if stub.dialect == "vllm" else _SGLANG).get(path, ()):
                return work(self, body, parse_qs(urlsplit(self.path).query))
        except (ValueError, KeyError) as error:
            return self._reply(400, {"error": {"message": str(error)}})
        except Exception as error:
            return self._reply(500, {"error": {"message": str(error)}})
        self._reply(404, {"detail": "Not Found"})

    def _reply(self, status: int, value: Any, *, cut: bool = False) -> None:
        raw = json.dumps(value).encode() if value is not None else b""
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw[: len(raw) // 2] if cut else raw)
        if cut:
            self.close_connection = True

    def _text(self, text: str) -> None:
        raw = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def _generated(self, ids: list[int], how: dict[str, Any], shape: Any) -> None:
        stub = self.stub
        if stub.struck("die"):
            stub.die()
            return
        if stub.struck("kill"):
            os.kill(os.getpid(), 9)
        if stub.struck("restart"):
            stub.die()
            stub.rise()
            return
        if stub.struck("hang"):
            stub.over.wait(stub.faults["hang"].value or 60)
        if stub.struck("slow"):
            stub.over.wait(stub.faults["slow"].value)
        if stub.over.is_set():
            return
        if stub.struck("error"):
            return self._reply(stub.faults["error"].value or 500, {"error": {"message": "internal error"}})
        found = stub.sample(ids, how)
        if stub.struck("abort"):
            found["reason"] = StopReason.ABORTED
        self._reply(200, shape(stub.forged(found)), cut=stub.struck("truncate"))

    # vLLM

    def completions(self, body: Any, query: Any) -> None:
        assert body["return_token_ids"] and body["logprobs"] == 0 and not body["stream"]
        if body["model"] != self.stub.name:
            return self._reply(404, {"error": {"message": f"The model `{body['model']}` does not exist."}})
        how = {
            "max_new_tokens": body["max_tokens"],
            "temperature": body["temperature"],
            "top_p": body["top_p"],
            "top_k": body["top_k"],
            "stop": tuple(body["stop"]),
            "stop_token_ids": tuple(body["stop_token_ids"]),
            "seed": body.get("seed"),
        }

        def shape(found: dict[str, Any]) -> dict[str, Any]:
            reason = {StopReason.LENGTH: "length", StopReason.ABORTED: "abort"}.get(found["reason"], "stop")
            values = found["logprobs"]
            logprobs = None if values is None else {"token_logprobs": values, "tokens": []}
            choice = {"index": 0, "text": found["text"], "token_ids": found["ids"], "logprobs": logprobs}
            return {"object": "text_completion", "choices": [{**choice, "finish_reason": reason}]}

        self._generated(list(body["prompt"]), how, shape)

    def models(self, body: Any, query: Any) -> None:
        self._reply(200, {"data": [{"id": self.stub.name, "max_model_len": 2048}]})

    def tokenize(self, body: Any, query: Any) -> None:
        ids = self.stub.engine._tokenizer(body["prompt"], add_special_tokens=False)["input_ids"]
        self._reply(200, {"tokens": [one + self.stub.text_shift for one in ids], "max_model_len": 2048})

    def health(self, body: Any, query: Any) -> None:
        if self.stub.struck("sick"):
            time.sleep(self.stub.faults["sick"].value or 0)
            return self._reply(503, None)
        self._reply(200, None)

    def weight_info(self, body: Any, query: Any) -> None:
        if not self.stub.modern:
            return self._reply(404, {"detail": "Not Found"})
        self._reply(200, {"weight_version": self.stub.version})

    def update_weight_version(self, body: Any, query: Any) -> None:
        if not self.stub.modern:
            return self._reply(404, {"detail": "Not Found"})
        self.stub.version = body["new_version"]
        self._reply(200, {"success": True})

    def metrics(self, body: Any, query: Any) -> None:
        self._text(f"# TYPE process_start_time_seconds gauge\nprocess_start_time_seconds {self.stub.started}\n")

    def pause(self, body: Any, query: Any) -> None:
        self.stub.paused = True
        self._reply(200, {"status": "paused"})

    def resume(self, body: Any, query: Any) -> None:
        self.stub.paused = False
        self._reply(200, {"status": "resumed"})

    def collective_rpc(self, body: Any, query: Any) -> None:
        assert body["method"] == "reload_weights" and self.stub.paused
        self._load(body["kwargs"]["weights_path"])
        self._reply(200, {"results": [None]})

    def reset_prefix_cache(self, body: Any, query: Any) -> None:
        self.stub.drop_cache()
        self._reply(200, {"success": True} if self.stub.modern else None)

    def vllm_sleep(self, body: Any, query: Any) -> None:
        assert query["level"] == ["2"]
        # As vLLM's executor: it believes that it sleeps when any of it does.
        if not self.stub.sleeping:
            self.stub.sleeping = {"weights", "kv_cache"}
            self.stub.drop_cache()
        self._reply(200, None)

    def is_sleeping(self, body: Any, query: Any) -> None:
        self._reply(200, {"is_sleeping": bool(self.stub.sleeping)})

    def vllm_wake(self, body: Any, query: Any) -> None:
        # A tag that does not sleep makes it ignore the whole call.
        if self.stub.sleeping.issuperset(query["tags"]):
            return self._wake(query["tags"])
        self._reply(200, None)

    # SGLang

    def generate(self, body: Any, query: Any) -> None:
        asked = body["sampling_params"]
        assert body["return_logprob"] and asked["no_stop_trim"] and asked["top_k"] == -1
        how = {
            "max_new_tokens": asked["max_new_tokens"],
            "temperature": asked["temperature"],
            "stop": tuple(asked["stop"]),
            "stop_token_ids": tuple(asked["stop_token_ids"]),
            "seed": asked.get("sampling_seed"),
        }

        def shape(found: dict[str, Any]) -> dict[str, Any]:
            reason = {StopReason.LENGTH: "length", StopReason.ABORTED: "abort"}.get(found["reason"], "stop")
            values = found["logprobs"]
            pairs = (
                None if values is None else [[v, i, None] for v, i in zip_longest(values, found["ids"], fillvalue=5)]
            )
            told = {"finish_reason": {"type": reason}, "output_token_logprobs": pairs}
            version = self.stub.faults["version"].value if self.stub.struck("version") else self.stub.version
            return {"text": "", "output_ids": found["ids"], "meta_info": {**told, "weight_version": version}}

        self._generated(list(body["input_ids"]), how, shape)

    def model_info(self, body: Any, query: Any) -> None:
        kind = json.loads((self.stub.folder / "config.json").read_text())["model_type"]
        self._reply(200, {"model_path": self.stub.name, "model_type": kind, "weight_version": self.stub.version})

    def update_weights_from_disk(self, body: Any, query: Any) -> None:
        try:
            self._load(body["model_path"])
        except Exception as error:
            return self._reply(400, {"success": False, "message": str(error)})
        if body["flush_cache"]:
            self.stub.drop_cache()
        self.stub.version = body["weight_version"]
        self._reply(200, {"success": True, "message": "Succeeded to update model weights."})

    def flush_cache(self, body: Any, query: Any) -> None:
        self.stub.drop_cache()
        self._text("Cache flushed.\n")

    def abort_request(self, body: Any, query: Any) -> None:
        self._reply(200, None)

    def release(self, body: Any, query: Any) -> None:
        if self.stub.sleeping & {*body["tags"]}:
            return self.stub.die()
        self.stub.sleeping |= {*body["tags"]}
        self._reply(200, None)

    def resume_memory(self, body: Any, query: Any) -> None:
        if not self.stub.sleeping.issuperset(body["tags"]):
            return self.stub.die()
        self._wake(body["tags"])

    # Both

    def _load(self, folder: str) -> None:
        if "weights" in self.stub.sleeping:
            raise RuntimeError("weights are asleep")
        if self.stub.struck("load_fails"):
            raise RuntimeError("out of memory while loading")
        if self.stub.struck("die_in_load"):
            self.stub.die()
            raise ConnectionError
        self.stub.load(folder)

    def _wake(self, tags: list[str]) -> None:
        if self.stub.struck("wake_fails"):
            raise RuntimeError("CUDA out of memory")
        if "weights" in tags and "weights" in self.stub.sleeping:
            # The memory is back, with anything in it.
            with self.stub.lock:
                self.stub.engine.begin_update()
                noise = {n: t.mul(-3.0) for n, t in self.stub.engine._weights.views().items()}
                self.stub.engine.load_weights(noise.items())
                self.stub.engine.publish(PolicyVersion(1, 0))
        self.stub.sleeping -= {*tags}
        self._reply(200, None)


_COMMON = {"/health": [_Handler.health], "/tokenize": [_Handler.tokenize]}
_VLLM: dict[str, list[Any]] = {
    **_COMMON,
    "/v1/models": [_Handler.models],
    "/v1/completions": [_Handler.completions],
    "/weight_info": [_Handler.weight_info],
    "/update_weight_version": [_Handler.update_weight_version],
    "/metrics": [_Handler.metrics],
    "/pause": [_Handler.pause],
    "/resume": [_Handler.resume],
    "/collective_rpc": [_Handler.collective_rpc],
    "/reset_prefix_cache": [_Handler.reset_prefix_cache],
    "/sleep": [_Handler.vllm_sleep],
    "/is_sleeping": [_Handler.is_sleeping],
    "/wake_up": [_Handler.vllm_wake],
}
_SGLANG: dict[str, list[Any]] = {
    **_COMMON,
    "/generate": [_Handler.generate],
    "/model_info": [_Handler.model_info],
    "/update_weights_from_disk": [_Handler.update_weights_from_disk],
    "/flush_cache": [_Handler.flush_cache],
    "/abort_request": [_Handler.abort_request],
    "/release_memory_occupation": [_Handler.release],
    "/resume_memory_occupation": [_Handler.resume_memory],
}


@contextlib.contextmanager
def stubs(folder: Path, count: int, **how: Any) -> Iterator[list[Stub]]:
    """`count` servers, gone with the block."""
    made = [Stub(folder, **{"dialect": "vllm", **how}) for _ in range(count)]
    try:
        yield made
    finally:
        for stub in made:
            stub.over.set()
            stub.die()
            # Who computes still is waited for: a process must not end in the middle of that.
            stub.lock.acquire(timeout=5)


def main() -> None:
    """As the process of a server: `--model-path F --host H --port P`, and whatever else is ignored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model-path", type=Path)
    parser.add_argument("--port", type=int)
    parser.add_argument("--stub-faults", default="")
    arguments, _ = parser.parse_known_args()
    stub = Stub(arguments.model_path, dialect="sglang", port=arguments.port)
    stub.name = str(arguments.model_path)
    for word in filter(None, arguments.stub_faults.split(",")):
        kind, _, after = word.partition("@")
        stub.arm(kind, after=int(after or 0), times=1)
    while True:
        time.sleep(3600)


if __name__ == "__main__":
    main()
