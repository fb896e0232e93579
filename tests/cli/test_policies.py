"""`kvfold policies`: what it prints for people and for machines."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvfold.cli.options import Parser
from kvfold.cli.policies import add_parser
from kvfold.errors import PolicyError
from kvfold.policy import Policy
from kvfold.policy.describe import explain
from kvfold.policy.registry import terms


def _run(*words: str) -> int:
    parser = Parser()
    add_parser(parser.add_subparsers())
    args = parser.parse_args(["policies", *words])
    code: int = args.run(args)
    return code


def _json(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert _run(*words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_lists_every_term_under_its_axis(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run() == 0
    heading, *lines = capsys.readouterr().out.splitlines()
    assert heading.split("\t") == ["axis", "term", "arguments", "cost", "paper", "what it does"]
    listed = [tuple(line.split("\t")[:2]) for line in lines]
    assert [(axis, name.rstrip("*")) for axis, name in listed[:-1]] == [(term.axis, term.name) for term in terms()]
    assert ("score", "full*") in listed
    assert listed[-1][0] == "size" and "12.5%mem" in listed[-1][1]


def test_lists_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    listed = _json(capsys)
    assert [(row["axis"], row["name"]) for row in listed] == [(term.axis, term.name) for term in terms()]
    (every,) = (row for row in listed if row["name"] == "every")
    assert (every["arguments"], every["is_default"], every["revision"]) == ("tokens=128", False, 1)


def test_explains_an_expression(capsys: pytest.CaptureFixture[str]) -> None:
    assert _run("knorm+8x + uniform") == 0
    out = capsys.readouterr().out
    policy = Policy.parse("knorm + 8x")
    facts = dict(line.split(None, 1) for line in out.splitlines() if not line.startswith(" "))
    assert facts["policy"].strip() == "knorm + 8x"
    assert facts["fingerprint"].strip() == policy.fingerprint[:16]
    assert str(policy).split(" + ")[0] in facts["canonical"]
    assert facts["decode"].startswith("nothing is evicted")


def test_a_term_that_is_no_policy_is_explained_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """`h2o` has no size, so it is no policy; what it does, and its arguments, are told all the same."""
    assert _run(" h2o ") == 0
    out = capsys.readouterr().out
    assert "score" in out and "arXiv:2306.14048" in out and "attention" in out
    told = _json(capsys, "snapkv")
    assert told["term"] == "snapkv" and "window=" in told["arguments"] and "over_group" in told["about"]
    assert _json(capsys, "int4")["policy"] == "int4"
    with pytest.raises(PolicyError):
        _run("h20")


def test_explains_for_machines(capsys: pytest.CaptureFixture[str]) -> None:
    policy = Policy.parse("knorm + 8x")
    said = _json(capsys, "knorm + 8x")
    assert said["canonical"] == str(policy)
    assert said["fingerprint"] == policy.fingerprint
    assert set(said) == {"policy", "canonical", "fingerprint", *explain(policy)}


def test_a_bad_expression_is_the_policy_error() -> None:
    with pytest.raises(PolicyError, match=r'^policy "int3": no codec "int3"'):
        _run("int3")
