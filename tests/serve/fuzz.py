"""Valid bodies of every route, and what becomes of them when they are damaged: no answer may be a 500.

    make fuzz                        50,000 requests to a server of its own
    make fuzz SEED=7 COUNT=1000      others, fewer
    python -m tests.serve.fuzz --seed 7 --first 123 --count 1       one request again

Each request is drawn from the seed and its number alone, so that one which fails can be sent again.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException
from random import Random
from typing import Any

from kvfold.serve.settings import Limits
from tests.serve.asking import until
from tests.serve.bodies import Path, at, replaced
from tests.serve.described import MAX_OUTPUT, ROUTES, valid
from tests.serve.running import Running, running, tool_model

GETS = ("/v1/models", "/v1/models/tiny", "/v1/models?limit=1", "/health", "/metrics", "/dashboard/state", "/", "/x")
VERBS = ("GET", "PUT", "PATCH", "DELETE", "TRACE", "OPTIONS", "HEAD", "BREW")
PLAIN = json.dumps({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]}).encode()
TIMEOUT_S = 60.0
CHECK_EVERY = 100


@dataclass(frozen=True)
class Request:
    """`is_valid`: it must be answered with 200."""

    method: str
    path: str
    body: bytes | None
    headers: Mapping[str, str]
    is_valid: bool


# Damage


class _Raw:
    """Written into JSON as it is, which need not be JSON."""

    def __init__(self, text: str) -> None:
        self.text = text


def _deep(rng: Random) -> _Raw:
    opens, closes = rng.choice((("[", "]"), ('{"a":', "}")))
    depth = rng.choice((90, 99, 100, 101, 150, 600, 990, 3000))
    return _Raw(opens * depth + "0" + closes * depth)


_NUMBERS = (
    "0", "-0", "1", "-1", "2", "1.5", "1e-5", "1e-38", "1e-40", "1e-45", "5e-324", "-5e-324", "1e38", "1e39",
    "1.7976931348623157e308", "1e309", "-1e999", "2147483647", "2147483648", "-2147483649", "9223372036854775807",
    "9223372036854775808", "-9223372036854775809", "18446744073709551616", "NaN", "Infinity", "-Infinity", "0.1e-400",
    "01", "1.", ".5", "0x10", "+1", "1_000",
)  # fmt: skip
_TEXTS = (
    "", " ", "\0", "\n", "\x1b[31m", "\ud800", "x\udfff", "\udc00\ud800", "\ufeff", "\u2028", "\ue000", "\ue0000\ue001",
    "é", "<|im_end|>", "<end>\n<assistant>", "<s>", "</s>", "<tool_call>", "</tool_call>", "{{ 7 * 7 }}", "{% raw %}",
    "%s", "{}", "auto", "none",
    "user", "assistant", "system", "tool", "text", "explicit", "ephemeral", "tiny", "__proto__",
    "x" * 3000, "€" * 500, "a b", "../../etc/passwd", "2023-06-01", "1h", "12h",
)  # fmt: skip
_NO_JSON = ("", "nul", "'a'", '"\\x"', '"\\ud83d"', '"\\ud83d\\ude00"', '"\n"', "[1,]", '{"a":1,"a":2}')
_VALUES: tuple[Callable[[Random], Any], ...] = (
    lambda rng: _Raw(rng.choice(_NUMBERS)),
    lambda rng: _Raw(str(rng.choice((1, -1)) * rng.randrange(10 ** rng.choice((5, 30, 300))))),
    lambda rng: _Raw("9" * rng.choice((308, 309, 4300, 10_000))),
    lambda rng: rng.choice(_TEXTS),
    lambda rng: rng.choice(_TEXTS) + rng.choice(_TEXTS),
    lambda rng: rng.choice((None, True, False, [], {}, [[]], [None], {"": None}, {"type": "text"}, [{}], [0], [""])),
    _deep,
    lambda rng: _Raw(rng.choice(_NO_JSON)),
)
_FIELDS = (
    "type", "role", "content", "text", "name", "id", "input", "tools", "stream", "cache_control", "is_error", "strict",
    "prompt_cache_breakpoint", "unknown", "", "\ud800", "model", "messages", "max_tokens", "stop", "n", "metadata",
)  # fmt: skip


def _nodes(value: Any, path: Path = ()) -> list[Path]:
    found = [path]
    inside = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for name, item in inside:
        found += _nodes(item, (*path, name))
    return found


def _replace(body: Any, rng: Random) -> Any:
    return replaced(body, rng.choice(_nodes(body)), rng.choice(_VALUES)(rng))


def _drop(body: Any, rng: Random) -> Any:
    nodes = [path for path in _nodes(body) if path]
    if not nodes:
        return body
    path = rng.choice(nodes)
    found = replaced(body, path, None)
    del at(found, path[:-1])[path[-1]]
    return found


def _add(body: Any, rng: Random) -> Any:
    path = rng.choice(_nodes(body))
    target, value = at(body, path), rng.choice(_VALUES)(rng)
    if isinstance(target, dict):
        return replaced(body, path, {**target, rng.choice(_FIELDS): value})
    return replaced(body, path, [*target, value] if isinstance(target, list) else [target])


def _repeat(body: Any, rng: Random) -> Any:
    """An item of a list again, or a whole list many times."""
    lists = [path for path in _nodes(body) if isinstance(at(body, path), list) and at(body, path)]
    if not lists:
        return body
    path = rng.choice(lists)
    target = at(body, path)
    more = target * rng.choice((1, 4, 40)) if rng.random() < 0.3 else [rng.choice(target)]
    return replaced(body, path, [*target, *more])


def _swap(body: Any, rng: Random) -> Any:
    one, other = rng.choice(_nodes(body)), rng.choice(_nodes(body))
    return replaced(body, one, at(body, other))


_DAMAGE = (_replace, _replace, _replace, _drop, _add, _repeat, _swap)


def _written(body: Any) -> bytes:
    raws: list[str] = []

    def mark(value: _Raw) -> str:
        raws.append(value.text)
        return f"@raw{len(raws) - 1}@"

    text = json.dumps(body, default=mark)
    for i, raw in enumerate(raws):
        text = text.replace(f'"@raw{i}@"', raw)
    return text.encode("utf-8", "surrogatepass")


def _broken(raw: bytes, rng: Random) -> bytes:
    """Bytes that were cut or changed on their way."""
    boundary = rng.randrange(len(raw) + 1)
    return rng.choice((
        raw[:boundary],
        raw[:boundary] + rng.randbytes(rng.randint(1, 3)) + raw[boundary + 1 :],
        raw + raw,
        raw + b"\0",
        b"",
        raw.decode(errors="replace").encode("utf-16"),
        b"\xef\xbb\xbf\xef\xbb\xbf" + raw,
    ))  # fmt: skip


_HEADERS = (
    ("content-type", "text/plain"), ("content-type", "application/json;charset=latin-1"), ("content-type", "\xff"),
    ("content-encoding", "gzip"), ("content-encoding", "identity"),
    ("content-type", ""), ("anthropic-version", "1999-01-01"), ("anthropic-version", "\xff\xfe"), ("host", "[::1"),
    ("host", ""), ("x-api-key", "\xff"), ("authorization", "Bearer"), ("traceparent", "\xff" * 60),
    ("traceparent", "00-x"), ("accept-encoding", "nonsense"), ("x-request-id", "a b"), ("anthropic-beta", "x,,y"),
    ("cookie", "=;=" * 50),
)  # fmt: skip
_AS_SENT = {"content-type": "application/json"}


def draw(seed: int, number: int) -> Request:
    """The request of that number."""
    rng = Random(f"{seed} {number}")
    if rng.random() < 0.05:
        return _drawn_get(rng)
    path = rng.choice(list(ROUTES))
    body: Any = valid(path, rng)
    kind = rng.random()
    if kind < 0.2:
        return Request("POST", path, _written(body), _AS_SENT, True)
    for _ in range(rng.choice((1, 1, 1, 2, 3, 5))):
        body = rng.choice(_DAMAGE)(body, rng)
    raw, method, headers = _written(body), "POST", dict(_AS_SENT)
    if kind > 0.93:
        raw = _broken(raw, rng)
    elif kind > 0.87:
        headers |= dict(rng.choices(_HEADERS, k=2))
    elif kind > 0.84:
        method = rng.choice(VERBS)
    elif kind > 0.82:
        path += rng.choice(("/", "/x", "?beta=true", "?\xff", "%00", "%ed%a0%80", "//", "/../health"))
    return Request(method, path, raw, headers, False)


def _drawn_get(rng: Random) -> Request:
    ends = ("", "", "", "?limit=0", "?limit=9999999999999", "?after_id=%ff", "/%ed%a0%80")
    path = rng.choice(GETS) + rng.choice(ends)
    headers = dict(rng.choices(_HEADERS, k=1)) if rng.random() < 0.3 else {}
    return Request(rng.choice(("GET", "GET", *VERBS)), path, None, headers, False)


# Answers


class Failure(AssertionError):
    """An answer that must not be."""


class Fuzzer:
    """Sends requests over one connection, as long as it holds."""

    def __init__(self, server: Running) -> None:
        self._server = server
        self._connection: HTTPConnection | None = None
        self.statuses: Counter[int] = Counter()

    def send(self, request: Request) -> None:
        """Failure if the answer is none, or one of the server's own faults."""
        status, headers, text = self._answer(request)
        self.statuses[status] += 1
        if status >= 500:
            raise Failure(f"status {status}: {text[:500]}")
        if request.is_valid and status != 200 and "prompt is too long" not in text:
            raise Failure(f"a valid body got {status}: {text[:500]}")
        if request.method == "HEAD" or (status == 200 and not request.path.startswith("/v1/")):
            return
        if headers.get("content-type", "").startswith("text/event-stream"):
            _check_stream(text)
        elif status >= 400:
            _check_error(request, headers, text)
        else:
            json.loads(text)

    def _answer(self, request: Request) -> tuple[int, Any, str]:
        is_fresh = self._connection is None
        connection = self._connection or HTTPConnection("127.0.0.1", self._server.port, timeout=TIMEOUT_S)
        self._connection = None
        try:
            connection.request(request.method, _sendable(request.path), request.body, dict(request.headers))
            answer = connection.getresponse()
            found = answer.status, answer.headers, answer.read().decode()
        except (ConnectionError, HTTPException) as error:
            connection.close()
            if not is_fresh:  # the server may close a connection between two requests
                return self._answer(request)
            raise Failure(f"no answer: {error!r}") from error
        except TimeoutError as error:
            raise Failure(f"no answer in {TIMEOUT_S:g} s") from error
        if not answer.will_close:
            self._connection = connection
        return found

    def check(self) -> None:
        """The server still serves, and holds nothing but what is cached."""
        self.send(Request("POST", "/v1/messages", PLAIN, _AS_SENT, True))
        service = self._server.service
        until(lambda: service.scheduler.num_running == service.scheduler.num_waiting == 0)
        assert service.store is not None
        device = service.store.device
        assert device is not None
        until(lambda: self._server.used_bytes == device.arena_bytes)

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()


def _sendable(path: str) -> str:
    return path.encode("latin-1").decode("latin-1") if path.isascii() else path.replace("\xff", "%ff")


def _check_stream(text: str) -> None:
    data = [line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: ")]
    if not data:
        raise Failure("a stream without events")
    for event in (json.loads(line) for line in data if line != "[DONE]"):
        if "error" in event or event.get("type") in ("error", "response.failed"):
            raise Failure(f"a stream that failed: {event}")


def _check_error(request: Request, headers: Any, text: str) -> None:
    try:
        found = json.loads(text)
        if request.path.startswith("/v1/messages") or "anthropic-version" in request.headers:
            assert (found["type"], found["request_id"]) == ("error", headers["request-id"])
        else:
            assert set(found["error"]) == {"message", "type", "param", "code"}
        assert found["error"]["message"].isprintable()
        assert 0 < len(found["error"]["message"]) < 2000
    except (ValueError, KeyError, TypeError, AssertionError) as error:
        raise Failure(f"not the vendor's shape ({error!r}): {text[:500]}") from error


def fuzz(fuzzer: Fuzzer, seed: int, first: int, count: int, progress: Callable[[int], None] = lambda _: None) -> None:
    """Failure tells the seed, the number and the request that failed."""
    for number in range(first, first + count):
        request = draw(seed, number)
        try:
            fuzzer.send(request)
            if (number + 1) % CHECK_EVERY == 0 or number + 1 == first + count:
                fuzzer.check()
        except AssertionError as error:
            again = f"python -m tests.serve.fuzz --seed {seed} --first {number} --count 1"
            raise Failure(f"{error}\n{_shown(request)}\nagain: {again}") from error
        progress(number + 1 - first)


def _shown(request: Request) -> str:
    return f"{request.method} {request.path} {dict(request.headers)}\n{request.body!r}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first request")
    parser.add_argument("--count", type=int, default=50_000)
    args = parser.parse_args()
    began = time.monotonic()
    with running(tool_model(), limits=Limits(output_tokens=MAX_OUTPUT)) as server:
        fuzzer = Fuzzer(server)

        def progress(done: int) -> None:
            if done % CHECK_EVERY == 0 or done == args.count:
                statuses = ", ".join(f"{count} x {status}" for status, count in sorted(fuzzer.statuses.items()))
                print(f"\r{done:,} of {args.count:,}, {time.monotonic() - began:.0f} s: {statuses}", end="", flush=True)

        try:
            fuzz(fuzzer, args.seed, args.first, args.count, progress)
        except Failure as error:
            print(f"\n{error}", file=sys.stderr)
            return 1
        finally:
            with suppress(OSError):
                fuzzer.close()
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
