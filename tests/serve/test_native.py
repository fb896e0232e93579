"""Routes under /v1/kvfold: what a client without Python asks for, within the limits of every other route."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from kvfold.serve.api.openapi import NATIVE
from kvfold.session import Session
from tests.serve.asking import TENANTS, send
from tests.serve.bodies import Answer, call, check_refused
from tests.serve.running import Running, running, tool_model

TEXT = "The cat sat on the mat. It ate 3 fish in 1998. Nobody saw it leave the house. The dog slept. " * 4
KEY = {"x-api-key": "key-a"}


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with running(tool_model(), tenants=TENANTS, key="key-a") as found:
        yield found


def ask(server: Running, route: str, body: Any, **headers: str) -> Answer:
    return call(server, f"/v1/kvfold/{route}", body, **{**KEY, **headers})


@pytest.mark.parametrize(
    "policy", [None, "full", "int4", "keydiff + 4x", "kvzip + global + 4x + int4", "snapkv + 80tok"]
)
def test_sizes_are_those_of_a_session(server: Running, policy: str | None) -> None:
    body = {"model": "tiny", "text": TEXT} | ({} if policy is None else {"policy": policy})
    found = ask(server, "compress", body)
    assert found.status == 200, found.text
    with Session(tool_model(), policy or "full") as session:
        session.extend(TEXT)
        expected = session.stats()
    assert found.json["policy"] == (policy or "full")
    assert abs(found.json["num_tokens"] - expected.logical_len) < 20, "templates differ in how a message ends"
    assert found.json["compression_ratio"] == pytest.approx(expected.ratio, rel=0.15)
    assert found.json["full_bytes"] / found.json["resident_bytes"] == found.json["compression_ratio"]


def test_a_text_too_short_for_the_size_is_told(server: Running) -> None:
    bodies = [
        ("The cat.", "keydiff + 4x"),
        ("The cat.", "keydiff + 900tok"),
        ("The cat.", "full"),
        (TEXT, "keydiff + 4x"),
    ]
    notes = [ask(server, "compress", {"model": "tiny", "text": t, "policy": p}).json["note"] for t, p in bodies]
    assert [note is None for note in notes] == [False, False, True, True]
    assert "too short for the size of this policy" in notes[0]


def test_a_text_is_shortened_to_its_parts(server: Running) -> None:
    found = ask(server, "shorten", {"model": "tiny", "text": TEXT, "to": "50%", "keep": "numbers"}).json
    assert found["text"] == "".join(TEXT[start:end] for start, end in found["spans"])
    assert 0 < found["num_tokens"] < found["num_original_tokens"]
    assert "1998" in found["text"]
    asked = ask(server, "shorten", {"model": "tiny", "text": TEXT, "to": "25%", "question": "Who slept?"}).json
    assert "dog slept" in asked["text"]


def test_policies_are_listed_and_checked(server: Running) -> None:
    names = {term["name"] for term in ask(server, "policies", {}).json["data"]}
    assert {"snapkv", "keydiff", "int4"} <= names
    found = ask(server, "policies", {"policy": "4x + keydiff"}).json
    assert (found["policy"], found["is_served"], found["fits_model"]) == ("keydiff + 4x", False, True)
    assert ask(server, "policies", {"policy": "full"}).json["is_served"] is True


def test_statistics_are_the_tenants_own(server: Running) -> None:
    before = ask(server, "stats", {}).json
    send(server, "key-a")
    send(server, "key-b")
    after = ask(server, "stats", {}).json
    assert after["done"] == before["done"] + 1
    assert (after["tenant"], after["first_token_ms"]["num_samples"]) == ("red", after["done"])
    assert ask(server, "stats", {}, **{"x-api-key": "key-b"}).json["tenant"] == "blue"


@pytest.mark.parametrize(
    ("route", "body", "message"),
    [
        ("compress", {"text": "a"}, "model: a string is required, not absent"),
        ("compress", {"model": "tiny", "text": ""}, "text: a text that is not empty is required"),
        ("compress", {"model": "tiny", "text": "a", "policy": "snapkv + int3"}, "policy: "),
        ("compress", {"model": "tiny", "text": "a", "policy": "shorten(graph, 4x)"}, "/v1/kvfold/shorten"),
        ("compress", {"model": "tiny", "text": "a" * 2000}, "prompt is too long"),
        ("policies", {"policy": 'palu("/etc/passwd")'}, "requests name no files"),
        ("policies", {"policy": "palu(bases)"}, "requests name no files"),
        ("policies", {"policy": "learned(file=x) + 4x"}, "requests name no files"),
        ("policies", {"policy": "shorten(graph, 4x, embedder=x)"}, "requests name no files"),
        ("policies", {"policy": "x" * 1001}, "at most 1000 characters"),
        ("shorten", {"model": "tiny", "text": TEXT, "by": 'graph, 4x, embedder="/x"'}, "by: names as kvfold shorten"),
        ("shorten", {"model": "tiny", "text": TEXT, "by": "words"}, "by: this selector asks the model"),
        ("shorten", {"model": "tiny", "text": TEXT, "by": "rank"}, "question: this selector keeps what answers"),
        ("shorten", {"model": "tiny", "text": TEXT, "by": "nothing"}, "by: "),
        ("shorten", {"model": "tiny", "text": TEXT, "to": "half"}, "to: 4x, 25% or 2000tok is required"),
        ("shorten", {"model": "tiny", "text": TEXT, "to": "0.5x", "by": "graph"}, "to: size 0.5x"),
        ("shorten", {"model": "tiny", "text": TEXT, "to": "200%"}, "to: shorten: to is above 0%"),
        ("shorten", {"model": "tiny", "text": TEXT, "units": "pages"}, 'units: no units of a text "pages"'),
        ("shorten", {"model": "tiny", "text": TEXT, "keep": "names"}, 'keep: shorten: "names" is nothing'),
        ("shorten", {"model": "tiny", "text": ""}, "text: a text that is not empty is required"),
        ("shorten", {"model": "tiny", "text": TEXT, "keep": 'x"'}, "keep: names as kvfold shorten"),
        ("stats", {"tenant": "blue"}, "tenant: the field is not supported here"),
        ("stats", [], "the body: an object is required"),
    ],
)
def test_bad_requests_are_refused_by_name(server: Running, route: str, body: Any, message: str) -> None:
    assert message in check_refused(ask(server, route, body), f"/v1/kvfold/{route}")


def test_a_model_without_a_chat_template_measures_nothing_and_says_so() -> None:
    model = tool_model()
    model.tokenizer.chat_template = None
    with running(model) as server:
        found = check_refused(
            call(server, "/v1/kvfold/compress", {"model": "tiny", "text": "a"}), "/v1/kvfold/compress"
        )
    assert found == "this model has no chat template, in which texts are measured; serve an instruct model"


def test_keys_limits_and_unknown_models_are_those_of_every_route(server: Running) -> None:
    for path in NATIVE:
        check_refused(call(server, path, {}), path, 401)
        check_refused(call(server, path, method="GET", **KEY), path, 405)
        check_refused(call(server, path, "x" * (server.service.body_bytes + 1), **KEY), path, 413)
    for route in ("compress", "shorten"):
        check_refused(ask(server, route, {"model": "other", "text": "a"}), f"/v1/kvfold/{route}", 404)


def test_the_description_is_of_every_route_and_of_what_it_takes(server: Running) -> None:
    document = json.loads(call(server, "/openapi.json", method="GET").text)
    served = {path.replace("{name:path}", "{name}") for path in routes(server)}
    assert set(document["paths"]) == served - {"/dashboard/state"}
    for path in NATIVE:
        schema = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        needed = {"model": "tiny", "text": TEXT}
        body = {name: value for name, value in needed.items() if name in schema["properties"]}
        message = check_refused(call(server, path, {**body, "nonsense": 1}, **KEY), path)
        assert set(message.partition("supported: ")[2].split(", ")) - {""} == set(schema["properties"])
        answer = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        assert set(call(server, path, body, **KEY).json) <= set(answer["properties"])
    found = ask(server, "policies", {"policy": "int4"}).json
    assert set(found) | {"data"} == set(NATIVE["/v1/kvfold/policies"][3])


def routes(server: Running) -> list[str]:
    from kvfold.serve.app import App

    found = [getattr(route, "path", "") for route in App(server.service).asgi().routes]
    return [path for path in found if path != "/{path:path}" and not path.startswith("/dashboard/")]


def test_the_page_loads_nothing_from_elsewhere(server: Running) -> None:
    found = call(server, "/api", method="GET")
    assert found.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in found.headers["content-security-policy"]
    assert "<script" not in found.text
    assert "<h2>POST /v1/kvfold/compress</h2>" in found.text
    assert 'src="http' not in found.text
    assert 'href="http' not in found.text
