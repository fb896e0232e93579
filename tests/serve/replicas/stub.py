"""A replica without a model, which starts at once: it answers with what it was sent, slowly or in pieces if asked to.

python -m tests.serve.replicas.stub, with what `Fleet` puts into its environment
"""

from __future__ import annotations

import json
import os
import time
from http.server import BaseHTTPRequestHandler
from socketserver import ThreadingMixIn, UnixStreamServer
from threading import Event, Lock
from typing import Any

from kvfold.serve.replicas.lifeline import Lifeline

BODY_BYTES = 5000
_FACTS: dict[str, int] = {"left": 0, "begun": 0}
_LOCK, _GO = Lock(), Event()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    number = 0
    num_requests = 0  # on this connection

    def log_message(self, *args: Any) -> None:
        pass

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        known = {"/health": {"status": "ok"}, "/facts": {**_FACTS, "pid": os.getpid(), "number": self.number}}
        if path == "/go":
            _GO.set()
        if path == "/metrics":
            text = f"# HELP a_total A.\n# TYPE a_total counter\na_total {self.number + 1}\n"
            self._send(200, text.encode(), "text/plain")
            return
        self._send(200, json.dumps(known.get(path, {"path": self.path})).encode())

    def do_POST(self) -> None:
        length = int(self.headers.get("content-length") or 0)
        if length > BODY_BYTES:
            self._send(413, json.dumps({"error": {"message": "too long"}}).encode())
            return
        body = self.rfile.read(length)
        with _LOCK:
            _FACTS["begun"] += 1
        what = json.loads(body).get("do") if body.startswith(b"{") else None
        self.num_requests += 1
        if what == "hang_up" and self.num_requests > 1:
            self.close_connection = True
            return
        if what == "die":
            os._exit(9)
        if what == "die_once" and self.number == int(json.loads(body)["at"]):
            os._exit(9)
        if what == "wait":
            self._wait_for_client()
            return
        if what == "stall_once" and self.number == int(json.loads(body)["at"]):
            self._begin_stream()
            self._wait_for_client()
            return
        if what in ("stream", "break_off"):
            self._stream(what)
            return
        if what == "refuse":
            self._send(429, b'{"type": "error", "error": {"type": "rate_limit_error", "message": "slow"}}', retry=b"7")
            return
        found = {
            "number": self.number,
            "request": self.num_requests,
            "line": self.requestline,
            "headers": [[name.lower(), value] for name, value in self.headers.items()],
            "body": body.decode("latin-1"),
        }
        self._send(200, json.dumps(found).encode())

    def _wait_for_client(self) -> None:
        """Until it leaves."""
        while self.connection.recv(1):
            pass
        with _LOCK:
            _FACTS["left"] += 1
        self.close_connection = True

    def _begin_stream(self) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()

    def _stream(self, what: str) -> None:
        self._begin_stream()
        self._chunk(b"data: 1\n\n")
        if what == "break_off":
            time.sleep(0.2)
            os._exit(9)
        _GO.wait(30)
        self._chunk(b"data: 2\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
        self.wfile.flush()

    def _send(self, status: int, body: bytes, kind: str = "application/json", retry: bytes = b"") -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.send_header("x-own", "kept")
        if retry:
            self.send_header("retry-after", retry.decode())
        self.end_headers()
        self.wfile.write(body)


class Server(ThreadingMixIn, UnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def get_request(self) -> Any:
        connection, _ = super().get_request()
        return connection, ("local", 0)


def main() -> None:
    replica = Lifeline.of_environment()
    assert replica is not None
    replica.end_with_parent(1.0)
    Handler.number = replica.number
    with Server(replica.path, Handler) as server:
        replica.say_ready(BODY_BYTES)
        server.serve_forever()


if __name__ == "__main__":
    main()
