"""The server against the engine's own loop: figures of streams, and a short run with a tiny model."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from benchmarks.server.engine_share import prompts, shares, stream_figures
from benchmarks.server.stream_clients import Client
from kvfold.models.loader import Model
from tests.tiny import ready

pytest.importorskip("uvicorn")


def test_figures_of_streams() -> None:
    """Two streams of 4 tokens: the second begins at 2 s, the first ends at 4 s, with 3 of 6 characters in between."""
    first = [(1.0, 2), (2.0, 1), (3.0, 1), (4.0, 2)]
    second = [(2.0, 1), (4.0, 1), (6.0, 2)]
    found = stream_figures([first, second], 4)
    assert found["decode_tokens_per_s"] == pytest.approx((4 * 3 / 6 + 4 * 1 / 4) / 2)
    assert (found["gap_ms_p50"], found["gap_ms_p99"]) == (1000, 2000)
    assert found["texts_per_token"] == 7 / 8
    apart = [[(1.0, 2), (1.5, 2)], [(2.0, 2), (3.0, 2)]]
    assert stream_figures(apart, 4)["decode_tokens_per_s"] is None


def test_streams_with_one_event_or_none_have_no_gaps() -> None:
    assert stream_figures([[(1.0, 2)], []], 4) == {"texts_per_token": 1 / 8}
    assert stream_figures([first := [(1.0, 2), (2.0, 1)], []], 2)["first_s_p50"] == first[0][0]


def test_events_are_timed_by_their_last_byte() -> None:
    event = b'data: {"choices": [{"text": "%s"}]}\n\n'
    body = event % b"ab" + event % b"" + event % b"c" + b"data: [DONE]\n\n"
    chunks = [body[:37], body[37:]]
    parts = [b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"]
    parts += [b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks] + [b"0\r\n\r\n"]

    async def made() -> Client:
        return Client()

    client = asyncio.run(made())
    client.reads = [(float(at), part) for at, part in enumerate(parts)]
    assert client.reply() == (200, body)
    assert client.frames() == [(1.0, "ab"), (2.0, "c")]


def test_prompts_differ_from_the_first_word_on(model: Model) -> None:
    texts = prompts(model, 3, 20) + prompts(model, 1, 20)
    assert len({text.split()[0] for text in texts}) == 4
    assert {len(model.tokenizer(text)["input_ids"]) for text in texts} == {20}


def test_a_short_run_has_every_way() -> None:
    args = argparse.Namespace(policy="full", clients=[2], prompt=12, reply=6, rounds=2)
    rows = list(shares(args, ready("llama")))
    assert [row["way"] for row in rows] == ["engine", "stream", "whole"]
    assert all(row["tokens_per_s"] > 0 for row in rows)
    assert rows[1]["share"] == rows[1]["tokens_per_s"] / rows[0]["tokens_per_s"]
