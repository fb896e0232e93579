"""The server's own API under /v1/kvfold: parse and validate requests, write answers.

A policy in a request names no files: terms that read one are refused before they are parsed, since parsing reads it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from typing import Any

from kvfold.errors import KvfoldError, PolicyError
from kvfold.plurals import counted
from kvfold.policy.describe import explain, rows
from kvfold.policy.policy import Policy
from kvfold.policy.registry import AXES, load_variants, terms
from kvfold.serve.api.errors import bad_request
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.api.strict_json import Json
from kvfold.serve.api.validation import Fields
from kvfold.shortening.shorten import Shorten, Shortened
from kvfold.shortening.text import plan_of
from kvfold.stats import Stats

MAX_POLICY_CHARS = 1000
TERM_FACTS = ("axis", "name", "arguments", "cost", "paper", "summary")
_NAMES_FILES = re.compile(r"""["'/\\]|\b(file|embedder)\b""")
_WORD = re.compile(r"[a-z_]+(\([a-z0-9_=., ]*\))?")
_KEEP = re.compile(r"[a-z, ]+")


@dataclass(frozen=True)
class ShortenBody:
    model: str
    text: str
    plan: Shorten
    question: str | None


@dataclass(frozen=True)
class CompressBody:
    """`policy` None: the server's."""

    request: ChatRequest
    policy: Policy | None


def read_shorten(data: object) -> ShortenBody:
    """POST /v1/kvfold/shorten."""
    body = Fields(data)
    model, text, to = body.text("model"), _text(body), body.text("to", "4x")
    question, by = body.optional_text("question"), body.optional_text("by")
    keep, units = body.optional_text("keep"), body.optional_text("units")
    body.end()
    for name, value, pattern in (("by", by, _WORD), ("units", units, _WORD), ("keep", keep, _KEEP)):
        if value is not None and not pattern.fullmatch(value):
            body.refuse(name, "names as kvfold shorten takes them are required")
    if not re.fullmatch(r"[0-9.]+(x|%|tok)", to):
        body.refuse("to", "4x, 25% or 2000tok is required")
    plan = _plan(by or ("rank" if question else "graph"), to, keep, units)
    if plan.by.needs_model:
        body.refuse("by", "this selector asks the model, which serves requests here; use graph, keyphrases or rank")
    if plan.by.needs_question and not question:
        body.refuse("question", "this selector keeps what answers a question; send one, or use graph")
    return ShortenBody(model, text, plan, question)


def _text(body: Fields) -> str:
    found = body.text("text")
    if not found:
        body.refuse("text", "a text that is not empty is required")
    return found


def _plan(by: str, to: str, keep: str | None, units: str | None) -> Shorten:
    """400 names the field that no plan can have, or else the selector."""
    plans = {
        "to": partial(plan_of, "graph", to),
        "units": partial(plan_of, "graph", "4x", units=units),
        "keep": partial(plan_of, "graph", "4x", keep),
        "by": partial(plan_of, by, to, keep, units),
    }
    for name, make in plans.items():
        try:
            plan = make()
        except PolicyError as error:
            raise bad_request(f"{name}: {error}", logged=f"{name}: it is no part of a plan") from None
    return plan


def read_compress(data: object) -> CompressBody:
    """POST /v1/kvfold/compress."""
    body = Fields(data)
    model, text, policy = body.text("model"), _text(body), body.optional_text("policy")
    body.end()
    request = ChatRequest(model, [Block("text", "user", text, 0)], 0)
    return CompressBody(request, None if policy is None else client_policy(policy))


def read_policies(data: object) -> Policy | None:
    """POST /v1/kvfold/policies; None: all terms are asked for."""
    body = Fields(data)
    policy = body.optional_text("policy")
    body.end()
    return None if policy is None else client_policy(policy)


def read_stats(data: object) -> None:
    """POST /v1/kvfold/stats, whose body is an empty object."""
    Fields(data).end()


def client_policy(text: str, name: str = "policy") -> Policy:
    """A policy that a request names; 400 if it is none, or names files of this machine."""
    if len(text) > MAX_POLICY_CHARS:
        raise bad_request(f"{name}: at most {MAX_POLICY_CHARS} characters are taken; {len(text)} came")
    if _NAMES_FILES.search(text) or any(word in _file_terms() for word in re.findall(r"\w+", text)):
        raise bad_request(f"{name}: requests name no files, quoted texts, or terms that read files; leave them out")
    try:
        return Policy.parse(text)
    except KvfoldError as error:
        raise bad_request(f"{name}: {error}", logged=f"{name}: it is no policy") from None


@cache
def _file_terms() -> frozenset[str]:
    load_variants()
    return frozenset(term.name for axis in AXES for term in terms(axis) if _has_file(term.variant))


def _has_file(variant: Any) -> bool:
    return is_dataclass(variant) and any(one.name == "file" for one in fields(variant))


def shortened(model: str, found: Shortened) -> Json:
    return {
        "object": "kvfold.shortened",
        "model": model,
        "text": found.text,
        "num_tokens": found.num_tokens,
        "num_original_tokens": found.num_original_tokens,
        "spans": [list(span) for span in found.spans],
    }


def compressed(model: str, policy: Policy, stats: Stats) -> Json:
    return {
        "object": "kvfold.compressed",
        "model": model,
        "policy": policy.short,
        "num_tokens": stats.logical_len,
        "full_bytes": stats.full_bytes,
        "resident_bytes": stats.resident_bytes,
        "compression_ratio": stats.ratio,
        "bytes_per_step": stats.bytes_per_step,
        "mean_slots": stats.mean_slots,
        "note": _note(policy, stats),
    }


def _note(policy: Policy, stats: Stats) -> str | None:
    """Why a policy that evicts has kept everything."""
    if not policy.prefill.evicts or stats.mean_slots < stats.logical_len:
        return None
    tokens = counted(stats.logical_len, "token")
    return f"the prompt has {tokens}, too short for the size of this policy; every slot is kept, send a longer text"


def all_terms() -> Json:
    return {"object": "kvfold.terms", "data": [{name: getattr(row, name) for name in TERM_FACTS} for row in rows()]}


def explained(policy: Policy, *, is_served: bool, misfit: str | None) -> Json:
    """`misfit`: why the model cannot run it."""
    names = {"policy": policy.short, "canonical": str(policy), "fingerprint": policy.fingerprint}
    fits = {"is_served": is_served, "fits_model": misfit is None, "misfit": misfit}
    return {"object": "kvfold.policy", **names, **fits, "phases": explain(policy)}
