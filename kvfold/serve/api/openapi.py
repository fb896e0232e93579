"""The API described: an OpenAPI 3.1 document, and the same as a page that loads nothing.

Routes of the vendors' APIs are described in short and by their own documents, those under /v1/kvfold in full.
"""

from __future__ import annotations

from html import escape
from typing import Any

from kvfold import __version__
from kvfold.errors import DOCS_URL
from kvfold.serve.api.native import TERM_FACTS
from kvfold.serve.api.strict_json import Json

_TEXT: Json = {"type": "string"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_NUMBER: Json = {"type": "number"}
_FLAG: Json = {"type": "boolean"}
_TIMES: Json = {
    "type": ["object", "null"],
    "properties": {"num_samples": _COUNT, "p50": _NUMBER, "p95": _NUMBER, "p99": _NUMBER},
}
_COUNTS: Json = {"type": "object", "additionalProperties": _COUNT}
_ANTHROPIC, _OPENAI = "Anthropic's Messages API", "OpenAI's API"
_VENDORS = {
    "/v1/messages": (_ANTHROPIC, "A reply, whole or streamed.", ["model", "max_tokens", "messages"]),
    "/v1/messages/count_tokens": (_ANTHROPIC, "Tokens of a prompt.", ["model", "messages"]),
    "/v1/chat/completions": (_OPENAI, "A reply, whole or streamed.", ["model", "messages"]),
    "/v1/completions": (_OPENAI, "A text continued, whole or streamed.", ["model", "prompt"]),
    "/v1/responses": (_OPENAI, "A reply, whole or streamed; nothing is stored.", ["model", "input"]),
    "/v1/responses/input_tokens": (_OPENAI, "Tokens of a prompt.", ["model", "input"]),
}
_SHOWN = {
    "/v1/models": "Names of the model, in both vendors' formats.",
    "/v1/models/{name}": "One of them.",
    "/health": "State of the server; load and model with an API key.",
    "/ready": "Whether to send requests.",
    "/metrics": "Counters and histograms for Prometheus.",
    "/": "The dashboard, a page.",
    "/openapi.json": "This description.",
    "/api": "This description as a page.",
}


def _described(schema: Json, text: str, **more: Any) -> Json:
    return {**schema, "description": text, **more}


_MODEL = _described(_TEXT, "A name that /v1/models lists.")
_POLICY = _described(_TEXT, "A policy, as in keydiff + 4x. It names no files.", maxLength=1000)
# path -> about, required fields, other fields, fields of the answer
NATIVE: dict[str, tuple[str, Json, Json, Json]] = {
    "/v1/kvfold/compress": (
        "Sizes of a text's KV cache under a policy, measured: it is prefilled as a user's message and dropped.",
        {"model": _MODEL, "text": _TEXT},
        {"policy": _described(_POLICY, "The server's own by default.")},
        {
            "object": _TEXT, "model": _TEXT, "policy": _TEXT,
            "num_tokens": _described(_COUNT, "Of the prompt, with the chat template around the text."),
            "full_bytes": _described(_COUNT, "Of the uncompressed bf16 cache."),
            "resident_bytes": _described(_COUNT, "All that the compressed cache holds."),
            "compression_ratio": _described(_NUMBER, "full_bytes / resident_bytes."),
            "bytes_per_step": _described(_COUNT, "Stored bytes that one decode step reads."),
            "mean_slots": _described(_NUMBER, "Kept KV slots per head."),
            "note": _described({"type": ["string", "null"]}, "Why nothing was evicted: the text is too short."),
        },
    ),
    "/v1/kvfold/shorten": (
        "A text cut to the parts that matter, in their order.",
        {"model": _described(_MODEL, "Whose tokens are counted."), "text": _TEXT},
        {
            "to": _described(_TEXT, "25%, 4x or 2000tok.", default="4x"),
            "question": _described(_TEXT, "What is kept answers it."),
            "by": _described(_TEXT, "The selector: graph, or rank with a question, by default."),
            "keep": _described(_TEXT, "What always stays, as in numbers, code; all; none."),
            "units": _described(_TEXT, "How the text is parted, as in sentences or fixed(200)."),
        },
        {
            "object": _TEXT, "model": _TEXT, "text": _TEXT, "num_tokens": _COUNT, "num_original_tokens": _COUNT,
            "spans": _described({"type": "array"}, "Begin and end of each kept part, in characters of the text."),
        },
    ),
    "/v1/kvfold/policies": (
        "All terms of the policy language (data), or what one policy does and whether this model can run it.",
        {},
        {"policy": _POLICY},
        {
            "object": _TEXT,
            "data": {"type": "array", "items": {"type": "object", "properties": dict.fromkeys(TERM_FACTS, _TEXT)}},
            "policy": _TEXT, "canonical": _TEXT, "fingerprint": _TEXT, "is_served": _FLAG, "fits_model": _FLAG,
            "misfit": _described({"type": ["string", "null"]}, "Why the model cannot run it."),
            "phases": {"type": "object", "additionalProperties": _TEXT},
        },
    ),
    "/v1/kvfold/stats": (
        "Requests, tokens, cache lookups and times of the tenant whose key is sent, since the server started.",
        {},
        {},
        {
            "object": _TEXT, "tenant": _TEXT, "done": _COUNT, "refused": _COUNT, "tokens": _COUNTS, "lookups": _COUNTS,
            "usd": {"type": ["object", "null"], "additionalProperties": _NUMBER},
            "first_token_ms": _described(_TIMES, "TTFT."), "token_ms": _described(_TIMES, "Inter-token latency."),
        },
    ),
}  # fmt: skip
_ERROR: Json = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": _TEXT, "type": _TEXT,
                "param": {"type": ["string", "null"]}, "code": {"type": ["string", "null"]},
            },
        }
    },
}  # fmt: skip
_ERRORS = {
    "400": "A field is missing, unknown or of another type; the message begins with its name.",
    "401": "The API key is missing or unknown.",
    "404": "The model is not served here.",
    "413": "The body is too long.",
    "429": "Too many requests of this tenant; retry-after says when to come back.",
    "503": "Too many requests of all tenants; retry-after says when to come back.",
    "504": "The request took longer than --timeout.",
}


def openapi() -> Json:
    """The document; what is the same for all servers of this version."""
    paths: Json = {}
    for path, (about, required, others, answer) in NATIVE.items():
        schema = {
            "type": "object", "required": [*required], "additionalProperties": False,
            "properties": {**required, **others},
        }  # fmt: skip
        paths[path] = {"post": _operation(path, "kvfold", about, schema, {"type": "object", "properties": answer})}
    for path, (vendor, about, required_names) in _VENDORS.items():
        schema = {"type": "object", "required": required_names}
        paths[path] = {"post": _operation(path, vendor, about, schema, {"type": "object"})}
    for path, about in _SHOWN.items():
        found: Json = {"operationId": _id("get", path), "summary": about, "responses": {"200": {"description": about}}}
        if "{name}" in path:
            found["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": _TEXT}]
        paths[path] = {"get": {"tags": ["server"], **found}}
    schemes = {
        "bearer": {"type": "http", "scheme": "bearer"},
        "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "kvfold", "version": __version__, "description": f"Fields and limits: {DOCS_URL}/serving.md"},
        "security": [{"bearer": []}, {"key": []}, {}],
        "components": {"securitySchemes": schemes, "schemas": {"Error": _ERROR}},
        "paths": paths,
    }


def _operation(path: str, tag: str, about: str, body: Json, answer: Json) -> Json:
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {
        "tags": [tag],
        "operationId": _id("post", path),
        "summary": about,
        "requestBody": {"required": True, "content": {"application/json": {"schema": body}}},
        "responses": {
            "200": {"description": about, "content": {"application/json": {"schema": answer}}},
            **{status: {"description": text, "content": error} for status, text in _ERRORS.items()},
        },
    }


def _id(method: str, path: str) -> str:
    words = [word for word in path.replace("{", "").replace("}", "").replace(".", "/").split("/") if word]
    return "_".join([method, *words]) if words else f"{method}_dashboard"


def page(document: Json) -> str:
    """One section for each path; the styles are the dashboard's."""
    sections = [
        _section(method, path, operation)
        for path, methods in document["paths"].items()
        for method, operation in methods.items()
    ]
    info = document["info"]
    head = f'<meta charset="utf-8"><title>{escape(info["title"])} API</title>'
    head += '<meta name="viewport" content="width=device-width"><link rel="icon" href="data:,">'
    head += '<link rel="stylesheet" href="dashboard/style.css">'
    about = f"<header><h1>kvfold API <small>{escape(info['version'])}</small></h1><p>{escape(info['description'])}, "
    about += '<a href="openapi.json">openapi.json</a></p></header>'
    body = f"{about}<main>{''.join(sections)}</main>"
    return f'<!doctype html>\n<html lang="en"><head>{head}</head><body>{body}</body></html>\n'


def _section(method: str, path: str, operation: Json) -> str:
    parts = [f"<h2>{method.upper()} {escape(path)}</h2><p>{escape(operation['summary'])}</p>"]
    tag = operation["tags"][0]
    if tag not in ("kvfold", "server"):
        parts.append(f'<p class="note">{escape(tag)}; its official clients work unchanged.</p>')
    if "requestBody" in operation:
        schema = operation["requestBody"]["content"]["application/json"]["schema"]
        parts.append(_table("Field", schema.get("properties", {}), schema.get("required", [])))
        parts.append(_table("Answer", _content(operation).get("properties", {}), []))
    return f"<section>{''.join(parts)}</section>"


def _content(operation: Json) -> Json:
    found: Json = operation["responses"]["200"]["content"]["application/json"]["schema"]
    return found


def _table(heading: str, properties: Json, required: list[str]) -> str:
    if not properties:
        return ""
    rows = []
    for name, schema in properties.items():
        kind = schema["type"] if isinstance(schema["type"], str) else " or ".join(schema["type"])
        kind += ", required" if name in required else ""
        rows.append(f"<tr><th>{escape(name)}</th><td>{kind}</td><td>{escape(schema.get('description', ''))}</td></tr>")
    return f"<table><thead><tr><th>{heading}</th><th></th><th></th></tr></thead><tbody>{''.join(rows)}</tbody></table>"
