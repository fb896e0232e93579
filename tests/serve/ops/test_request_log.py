"""One line for each request, for people or for tools; nothing of what was said is in it."""

from __future__ import annotations

import json
import logging
import sys
from datetime import datetime, timedelta

import pytest

from kvfold.serve.ops.log_format import LOG_FORMATS, log_to_stderr
from kvfold.serve.ops.request_trace import RequestTrace, log_request


@pytest.fixture(autouse=True)
def _restored() -> object:
    loggers = [logging.getLogger(name) for name in ("kvfold.serve", "kvfold.engine")]
    before = [(list(logger.handlers), logger.propagate, logger.level) for logger in loggers]
    yield
    for logger, state in zip(loggers, before, strict=True):
        logger.handlers, logger.propagate, logger.level = state


def _answered() -> RequestTrace:
    trace = RequestTrace(
        "req_1", "POST", "/v1/messages", tenant="red", model="tiny", status=200, end="eos", miss="absent"
    )
    trace.num_prompt, trace.num_reused, trace.num_output = 1204, 1024, 40
    trace.arrived, trace.queued, trace.first_token, trace.ended, trace.done = 1.0, 1.1, 1.5, 1.7, 1.8124
    return trace


def test_a_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr("json")
    log_request(_answered())
    line = json.loads(capsys.readouterr().err)
    assert datetime.fromisoformat(line.pop("time")).utcoffset() == timedelta(0)
    assert line == {
        "level": "info", "event": "answered", "request": "req_1", "tenant": "red", "method": "POST",
        "path": "/v1/messages", "status": 200, "ms": 812.4, "model": "tiny", "end": "eos", "tokens_in": 1204,
        "tokens_reused": 1024, "tokens_out": 40, "miss": "absent", "first_token_ms": 500.0, "token_ms": 5.13,
    }  # fmt: skip


def test_a_line_to_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr()
    log_request(_answered())
    said = "200 POST /v1/messages, 812 ms, red, 1,204 in (1,024 reused), 40 out, eos, no hit in usage: absent, req_1\n"
    assert capsys.readouterr().err.split(" ", 1)[1] == said
    log_request(RequestTrace("req_2", "GET", "/health", status=200, arrived=1.0, done=1.002))
    assert capsys.readouterr().err.split(" ", 1)[1] == "200 GET /health, 2 ms, req_2\n"


@pytest.mark.parametrize("form", sorted(LOG_FORMATS))
def test_failures_say_which_request_and_where(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    log_to_stderr(form)
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("kvfold.serve").error(
            "request failed", exc_info=sys.exc_info(), extra={"facts": {"request": "req_3"}}
        )
    said = capsys.readouterr().err
    assert "request failed" in said
    assert "req_3" in said
    assert "RuntimeError: broken" in said
    assert "error" in said
    assert said.count("\n") == 1 or form == "text"
