"""`kvfold cache explain`: which prefixes a request caches, why the next one hits or misses, and the price."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from kvfold.cli.options import Subparsers, add_json_option, add_option, positive
from kvfold.cli.show import Table, print_json
from kvfold.errors import FileError, InputError
from kvfold.models.pull.pull import DEFAULT_MODEL
from kvfold.plurals import counted

if TYPE_CHECKING:
    from kvfold.serve.cache.explain import CacheComparison, CacheExplanation
    from kvfold.serve.cache.usage import Usage

_SHOWN_COUNTS = (1, 2, 3, 5, 10, 100)
_EPILOG = """examples:
  kvfold cache explain first.json
  kvfold cache explain first.json second.json --model smollm2-135m

A file holds the JSON body of a request to /v1/messages. Its "model" decides the least length of a cached
prefix and the price of reading, as it does with `kvfold serve --alias`; the tokens are those of --model. Prices are
multiples of uncached input: writing for five minutes 1.25, for an hour 2, reading 0.1. A lossy policy compresses at the
boundaries that say so, marked or not, and recomputes the tokens between such a boundary and a marker after it."""
_STATUS = {
    "written": "entry",
    "below_minimum": "marker, below the least length",
    "looked_at": "looked at",
    "not_looked_at": "",
}


def add_parser(verbs: Subparsers) -> None:
    parser = verbs.add_parser(
        "explain",
        help="explain cache hits and misses of requests, offline",
        description="Show which prefixes requests write and read, why one misses another's, and when caching pays.",
        epilog=_EPILOG,
    )
    parser.add_argument("first", metavar="FIRST", help="file with the body of a request")
    parser.add_argument("second", metavar="SECOND", nargs="?", help="file with the body of the next request")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="whose tokenizer to use (default: %(default)s)")
    add_option(parser, "--cache-min-tokens", "N", "minimum cacheable prefix; default: by model name", positive)
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    bodies = [_read(path) for path in (args.first, args.second) if path is not None]
    from kvfold.models.loader import load_tokenizer
    from kvfold.serve.cache.explain import compare
    from kvfold.serve.prompt import PromptRenderer
    from kvfold.serve.settings import Settings

    renderer = PromptRenderer(load_tokenizer(args.model))
    settings = Settings((args.model,), cache_min_tokens=args.cache_min_tokens)
    found = [_explain(body, path, renderer, settings) for body, path in bodies]
    after = compare(*found) if len(found) == 2 else None
    if args.json:
        requests = [_facts(one) for one in found]
        print_json({"requests": requests, "second_after_first": None if after is None else asdict(after)})
        return 0
    for (_, path), one in zip(bodies, found, strict=True):
        _show(path, one)
    if after is not None:
        _show_after(after)
    return 0


def _read(path: str) -> tuple[object, str]:
    from kvfold.serve.api.strict_json import parse_json

    try:
        with open(path, encoding="utf-8") as file:
            return parse_json(file.read()), path
    except (OSError, ValueError) as error:
        raise FileError(f"{path} cannot be read as JSON ({error}); it holds the body of one request") from error


def _explain(body: object, path: str, renderer: Any, settings: Any) -> CacheExplanation:
    from kvfold.serve.api.errors import ApiError
    from kvfold.serve.cache.explain import explain

    try:
        return explain(body, renderer, settings)
    except ApiError as error:
        raise InputError(f"{path} would be refused: {error}") from error


def _facts(one: CacheExplanation) -> dict[str, Any]:
    return {
        "model": one.request.model,
        "tokens": one.num_tokens,
        "min_tokens": one.min_tokens,
        "places": [asdict(step) for step in one.steps],
        "first_time": asdict(one.cold),
        "again": asdict(one.warm),
        "price": {str(count): round(one.factor(count), 4) for count in _SHOWN_COUNTS},
        "break_even": one.break_even,
    }


def _show(path: str, one: CacheExplanation) -> None:
    from kvfold.serve.cache.explain import nothing_cached

    print(f"{path}: {counted(one.num_tokens, 'token')} for {one.request.model}, cached from {one.min_tokens} on")
    table = Table("boundary", "section", "begins", "marker", "cache", "lossy policies", numbers=("tokens",))
    for step in one.steps:
        ttl = "" if step.ttl_s is None else "1h" if step.ttl_s > 300 else "5m"
        point = "compress" if step.is_point else ""
        table.add(str(step.number), step.section, step.begins, ttl, _STATUS[step.status], point, f"{step.end:,}")
    table.print()
    if not one.plan.writes:
        print(f"nothing is cached: {nothing_cached(one)}\n")
        return
    prices = ", ".join(f"{one.factor(count):.2f}x for {count}" for count in _SHOWN_COUNTS) + " requests"
    print(f"first time {_usage_text(one.cold)}; again {_usage_text(one.warm)}")
    pays = "never" if one.break_even is None else f"from request {one.break_even} on"
    print(f"caching pays {pays}; the prompt's price beside no caching: {prices}\n")


def _show_after(after: CacheComparison) -> None:
    reason = f" ({after.reason['type']})" if after.is_miss and after.reason is not None else ""
    print(f"the second after the first: {_usage_text(after.paid)}\n{after.why}{reason}")


def _usage_text(usage: Usage) -> str:
    hour = f" ({usage.num_long} for an hour)" if usage.num_long else ""
    return f"{usage.num_read} read, {usage.num_written} written{hour}, {usage.num_plain} plain"
