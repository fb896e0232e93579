"""`kvfold cache warm`: prefill prompts on a running server, so that later requests hit the prefix cache."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import Request, urlopen

from kvfold.cli.options import Subparsers, add_json_option, add_option
from kvfold.cli.show import bar, print_json
from kvfold.errors import FileError, InputError
from kvfold.plurals import counted

_TIMEOUT_S = 3600.0
_MAX_ANSWER_BYTES = 1 << 20
_EPILOG = """examples:
  kvfold cache warm requests.jsonl
  kvfold cache warm requests.jsonl --url http://localhost:8080 --key "$KEY"

Exit code 1 if the server refuses a request; the others are still sent.
"""


def add_parser(verbs: Subparsers) -> None:
    parser = verbs.add_parser(
        "warm",
        help="warm the prefix cache of a running server",
        description="Warm the prefix cache of a running server: requests are sent with max_tokens 0 and only prefill.",
        epilog=_EPILOG,
    )
    parser.add_argument("file", metavar="FILE", help="JSON lines: bodies of requests to /v1/messages")
    parser.add_argument("--url", default="http://127.0.0.1:8080", help="server URL (default: %(default)s)")
    add_option(parser, "--key", "KEY", "API key, if the server needs one")
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    bodies = _read(args.file)
    tokens: Counter[str] = Counter()
    refused: list[dict[str, Any]] = []
    with bar("warm", len(bodies)) as advance:
        for line, body in bodies:
            usage, error = _post(args.url, args.key, body)
            tokens.update(usage)
            if error is not None:
                refused.append({"line": line, "error": error})
            advance(1)
    found = {"requests": len(bodies), "hits": tokens["hits"], "read_tokens": tokens["read"]}
    found |= {"written_tokens": tokens["written"], "plain_tokens": tokens["plain"]}
    if args.json:
        print_json({**found, "refused": refused})
        return 1 if refused else 0
    for one in refused:
        print(f"line {one['line']}: {one['error']}")
    requests, hits = counted(found["requests"], "request"), counted(found["hits"], "hit")
    print(
        f"{requests}, {hits}: {counted(found['read_tokens'], 'token')} read, "
        f"{found['written_tokens']} written, {found['plain_tokens']} neither; {len(refused)} refused"
    )
    return 1 if refused else 0


def _read(path: str) -> list[tuple[int, dict[str, Any]]]:
    """Numbers of lines, and what they hold, ready to be sent."""
    found = []
    try:
        with open(path, encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    found.append((number, _ready(json.loads(line), path, number)))
    except (OSError, UnicodeDecodeError, ValueError, RecursionError) as error:
        raise FileError(f"{path} cannot be read ({error}); it holds a request's JSON body on each line") from error
    if not found:
        raise FileError(f"{path} holds no requests; write the body of one on each line")
    return found


def _ready(body: object, path: str, number: int) -> dict[str, Any]:
    if not isinstance(body, dict):
        raise FileError(f"line {number} of {path} is no JSON object; write the body of a request to /v1/messages")
    return {**{name: value for name, value in body.items() if name != "stream"}, "max_tokens": 0}


def _post(url: str, key: str | None, body: dict[str, Any]) -> tuple[dict[str, int], str | None]:
    """What the request was billed, or why it was refused."""
    headers = {"content-type": "application/json", "anthropic-version": "2023-06-01"}
    headers |= {} if key is None else {"x-api-key": key}
    try:
        request = Request(f"{url.rstrip('/')}/v1/messages", json.dumps(body).encode(), headers)
        with urlopen(request, timeout=_TIMEOUT_S) as answer:
            return _usage(json.loads(answer.read(_MAX_ANSWER_BYTES))), None
    except HTTPError as error:
        return {}, _told(error)
    except (URLError, OSError, ValueError, KeyError, TypeError) as error:
        reason = getattr(error, "reason", error)
        raise InputError(f"no kvfold server answers at {url} ({reason}); start it, or correct --url") from error


def _usage(answer: Any) -> dict[str, int]:
    usage = answer["usage"]
    read, written = int(usage["cache_read_input_tokens"]), int(usage["cache_creation_input_tokens"])
    return {"hits": int(read > 0), "read": read, "written": written, "plain": int(usage["input_tokens"])}


def _told(error: HTTPError) -> str:
    """The server's own sentence, where it has one."""
    try:
        return f"{error.code}: {json.loads(error.read(_MAX_ANSWER_BYTES))['error']['message']}"
    except (OSError, ValueError, KeyError, TypeError):
        return f"{error.code}: {error.reason}"
