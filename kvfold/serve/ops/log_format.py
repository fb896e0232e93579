"""Log lines on stderr: sentences for people, or JSON objects for tools."""

from __future__ import annotations

import json
import logging
from datetime import UTC, datetime
from typing import Any

_LOGGERS = ("kvfold.serve", "kvfold.engine")


class JsonLines(logging.Formatter):
    """One JSON object a line, in ASCII, so that it can be parsed whatever the encoding of the stream."""

    def format(self, record: logging.LogRecord) -> str:
        time = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line = {"time": time, "level": record.levelname.lower(), "event": record.getMessage()}
        error = {"error": self.formatException(record.exc_info)} if record.exc_info and record.exc_info[0] else {}
        return json.dumps({**line, **_facts(record), **error})


class TextLines(logging.Formatter):
    """For people: `18:04:05 200 POST /v1/messages, 812 ms, red, 1,204 in (1,024 reused), 40 out, …`."""

    def format(self, record: logging.LogRecord) -> str:
        facts = _facts(record)
        said = _sentence(facts) if "path" in facts else ", ".join([record.getMessage(), *facts.values()])
        error = f"\n{self.formatException(record.exc_info)}" if record.exc_info and record.exc_info[0] else ""
        level = "" if record.levelno <= logging.INFO else f"{record.levelname.lower()}: "
        return f"{self.formatTime(record, '%H:%M:%S')} {level}{said}{error}"


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    found: dict[str, Any] = getattr(record, "facts", {})
    return found


def _sentence(facts: dict[str, Any]) -> str:
    parts = [f"{facts['status']} {facts['method']} {facts['path']}", f"{facts['ms']:,.0f} ms", facts.get("tenant", "")]
    if "tokens_in" in facts:
        reused = f" ({facts['tokens_reused']:,} reused)" if facts["tokens_reused"] else ""
        parts += [f"{facts['tokens_in']:,} in{reused}", f"{facts['tokens_out']:,} out", facts["end"]]
        told = "no hit in usage" if facts["tokens_reused"] else "cache miss"
        parts += [f"{told}: {facts['miss']}" if "miss" in facts else ""]
    parts += [facts.get("why", "")]
    return ", ".join([*filter(None, parts), facts["request"]])


LOG_FORMATS: dict[str, type[logging.Formatter]] = {"text": TextLines, "json": JsonLines}


def log_to_stderr(form: str = "text") -> None:
    """Log requests and failures to stderr in one of `LOG_FORMATS`."""
    handler = logging.StreamHandler()
    handler.setFormatter(LOG_FORMATS[form]())
    for logger in map(logging.getLogger, _LOGGERS):
        logger.handlers, logger.propagate = [handler], False
        logger.setLevel(logging.INFO)
