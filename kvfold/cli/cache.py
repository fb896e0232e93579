"""`kvfold cache`: inspect, verify, warm and clear a prefix cache, also beside a running server."""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli import cache_explain, cache_warm
from kvfold.cli.options import Parser, Subparsers, add_json_option, add_option, add_secret_option, count
from kvfold.cli.show import Table, bar, print_json
from kvfold.errors import InputError
from kvfold.plurals import counted
from kvfold.policy.size import bytes_text

if TYPE_CHECKING:
    from kvfold.store.inspect import EntryInfo, StoreInspector

_EPILOG = """examples:
  kvfold cache stats --disk prefixes
  kvfold cache verify --disk prefixes --quarantine
  kvfold cache clear --disk prefixes --expired
  kvfold cache warm requests.jsonl --url http://localhost:8080
  kvfold cache explain first.json second.json --model smollm2-135m

ls, stats and verify are read-only and work while a server owns the folder; clear and verify --quarantine need exclusive
access. Entries are grouped by scope: one for each combination of weights, policy and tenant.
"""


def add_parser(subparsers: Subparsers) -> None:
    """Add `cache` and its verbs."""
    parser = subparsers.add_parser(
        "cache",
        help="inspect, verify, warm and clear the prefix cache",
        description="Inspect, verify, warm and clear the prefix cache of a server.",
        epilog=_EPILOG,
    )
    verbs = parser.add_subparsers(metavar="VERB", required=True)
    listed = _add_verb(verbs, "ls", "list entries: token range, size, time to live", _list)
    listed.add_argument(
        "--limit", type=count, default=50, metavar="N", help="at most N lines (default: %(default)s; 0: all)"
    )
    stats = _add_verb(verbs, "stats", "entries, tokens and bytes by scope", _stats)
    add_secret_option(stats)
    verify = _add_verb(verbs, "verify", "check the digests of every entry; exit code 1 if any is bad", _verify)
    add_secret_option(verify)
    verify.add_argument("--quarantine", action="store_true", help="move bad entries to DIR/quarantine, with the reason")
    clear = _add_verb(verbs, "clear", "delete entries, after a confirmation", _clear)
    clear.add_argument("--yes", action="store_true", help="delete without asking; needed where there is no terminal")
    clear.add_argument("--expired", action="store_true", help="only expired entries")
    add_option(clear, "--scope", "PREFIX", "only entries whose scope (see ls) starts with PREFIX")
    cache_warm.add_parser(verbs)
    cache_explain.add_parser(verbs)


def _add_verb(verbs: Subparsers, name: str, text: str, run: Any) -> Parser:
    parser = verbs.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
    add_option(parser, "--disk", "DIR", "the server's --disk folder")
    add_option(parser, "--redis", "URL", "the shared Redis server, e.g. redis://host:6379/0")
    add_json_option(parser)
    parser.set_defaults(run=run)
    return parser


@contextmanager
def _inspectors(args: argparse.Namespace, *, signed: bool = False) -> Iterator[list[StoreInspector]]:
    """Inspectors of --disk and --redis; `signed`: entries are read, not only listed."""
    from kvfold.store.entry.format import read_secret
    from kvfold.store.inspect import FolderInspector, RedisInspector

    if args.disk is None and args.redis is None:
        raise InputError("no store is named; give --disk DIR, --redis URL, or both")
    secret = read_secret(args.store_secret) if signed else b""
    with ExitStack() as stack:
        inspectors: list[StoreInspector] = [] if args.disk is None else [FolderInspector(args.disk, secret)]
        inspectors += [] if args.redis is None else [RedisInspector(args.redis, secret)]
        for inspector in inspectors:
            stack.callback(inspector.close)
        yield inspectors


def _found(inspectors: Sequence[StoreInspector]) -> list[EntryInfo]:
    """By scope, then along prompts as far as names tell."""
    found = [one for inspector in inspectors for one in inspector.find()]
    return sorted(found, key=lambda one: (one.tier, one.key.scope, one.key.start, one.key.digest))


# ls


def _list(args: argparse.Namespace) -> int:
    with _inspectors(args) as inspectors:
        found = _found(inspectors)
    rows = [_row(one) for one in found]
    shown = rows[: args.limit or None]
    if args.json:
        print_json(shown)
        return 0
    table = Table("tier", "scope", "digest", numbers=("tokens", "size", "lives", "ttl"))
    for row in shown:
        span, size = f"{row['start']}-{row['end']}", bytes_text(row["bytes"])
        life = seconds_text(row["lives_s"])
        table.add(row["place"], row["scope"][:8], row["digest"][:12], span, size, life, seconds_text(row["ttl_s"]))
    table.print()
    more = f", {len(shown)} shown; --limit 0 shows all" if len(shown) < len(rows) else ""
    print(f"{counted(len(rows), 'entry')}, {bytes_text(sum(row['bytes'] for row in rows))}{more}")
    return 0


def _row(one: EntryInfo) -> dict[str, Any]:
    key = one.key
    facts = {"scope": key.scope, "digest": key.digest, "start": key.start, "end": key.end}
    life = {"lives_s": round(one.expires_at - time.time(), 1), "ttl_s": one.ttl_s, "saved_s": one.saved_s}
    return {"place": one.tier, **facts, "bytes": one.num_bytes, **life}


def seconds_text(seconds: float) -> str:
    """-3 -> expired, 75 -> 75 s, 5000 -> 83 min, 30000 -> 8.3 h."""
    if seconds <= 0:
        return "expired"
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# stats


def _stats(args: argparse.Namespace) -> int:
    with _inspectors(args, signed=True) as inspectors:
        scopes = [_scope(inspector, of) for inspector in inspectors for of in _by_scope(inspector)]
        in_use = [inspector.name for inspector in inspectors if inspector.is_in_use]
    num_quarantined = len(list(Path(args.disk, "quarantine").glob("*.txt"))) if args.disk else 0
    content = {"scopes": scopes, "in_use": in_use, "quarantined": num_quarantined}
    if args.json:
        print_json(content)
        return 0
    numbers = ("entries", "tokens", "size", "expired")
    table = Table("tier", "scope", "kind", "policy", "weights", "cache", numbers=numbers)
    for one in scopes:
        facts = [str(one["bound_to"].get(name, "?"))[:10] for name in ("kind", "policy", "weights", "kv_dtype")]
        counts = [f"{one['entries']:,}", f"{one['tokens']:,}", bytes_text(one["bytes"]), f"{one['expired']:,}"]
        table.add(one["place"], one["scope"][:8], *facts, *counts)
    table.print()
    owner = "; a server owns the folder now" if in_use else ""
    print(f"{counted(sum(one['entries'] for one in scopes), 'entry')}, {content['quarantined']} in quarantine{owner}")
    return 0


def _by_scope(inspector: StoreInspector) -> list[list[EntryInfo]]:
    found: dict[str, list[EntryInfo]] = defaultdict(list)
    for one in _found([inspector]):
        found[one.key.scope].append(one)
    return list(found.values())


def _scope(inspector: StoreInspector, entries: list[EntryInfo]) -> dict[str, Any]:
    facts = next(filter(None, (inspector.facts(one.key) for one in entries)), {})
    bound = {name: str(value).removeprefix("torch.") for name, value in facts.items()}
    now = time.time()
    return {
        "place": inspector.name,
        "scope": entries[0].key.scope,
        "entries": len(entries),
        "tokens": sum(one.key.num_tokens for one in entries),
        "bytes": sum(one.num_bytes for one in entries),
        "expired": sum(one.expires_at <= now for one in entries),
        "saved_s": sum(one.saved_s for one in entries),
        "bound_to": bound,
    }


# verify, clear


def _verify(args: argparse.Namespace) -> int:
    from kvfold.store.tiers.tiered_cache import Quarantine

    if args.quarantine and args.disk is None:
        raise InputError("--quarantine moves bad entries into the folder of --disk; name one")
    bad: list[dict[str, str]] = []
    with _inspectors(args, signed=True) as inspectors:
        if args.quarantine:
            inspectors[0].lock()
        found = [(inspector, one) for inspector in inspectors for one in _found([inspector])]
        with bar("verify", len(found)) as advance:
            for inspector, one in found:
                error = inspector.check(one.key)
                if error is not None:
                    bad.append(
                        {"place": inspector.name, "key": one.key.text, "reason": error.reason, "detail": str(error)}
                    )
                    if args.quarantine and error.reason != "unsigned":  # it may be good
                        inspector.quarantine(one.key, Quarantine(Path(args.disk) / "quarantine"), error)
                advance(1)
    if args.json:
        print_json({"checked": len(found), "bad": bad, "moved": bool(bad) and args.quarantine})
    else:
        _say_bad(bad, len(found), args.quarantine)
    return 1 if bad else 0


def _say_bad(bad: Sequence[dict[str, str]], num_found: int, is_moved: bool) -> None:
    for one in bad:
        print(f"{one['reason']:<9}  {one['place']}  {one['key']}")
    num_unsigned = sum(one["reason"] == "unsigned" for one in bad)
    num_bad = len(bad) - num_unsigned
    moved = " and moved to quarantine" if num_bad and is_moved else ""
    others = f", {num_unsigned} of another secret, not checked (--store-secret)" if num_unsigned else ""
    print(f"{counted(num_found - num_unsigned, 'entry')} checked, {num_bad} bad{moved}{others}")


def _clear(args: argparse.Namespace) -> int:
    if not args.yes and not sys.stdin.isatty():
        raise InputError("cache clear deletes entries and there is no terminal to ask on; add --yes")
    now = time.time()
    with _inspectors(args) as inspectors:
        for inspector in inspectors:
            inspector.lock()
        found = [
            (inspector, one)
            for inspector in inspectors
            for one in _found([inspector])
            if (not args.expired or one.expires_at <= now) and one.key.scope.startswith(args.scope or "")
        ]
        num_bytes = sum(one.num_bytes for _, one in found)
        if found and not args.yes and not _confirms(f"delete {counted(len(found), 'entry')}, {bytes_text(num_bytes)}?"):
            raise InputError("nothing was deleted")
        for inspector, one in found:
            inspector.delete(one.key)
    if args.json:
        print_json({"deleted": len(found), "bytes": num_bytes})
    else:
        print(f"{counted(len(found), 'entry')} deleted, {bytes_text(num_bytes)}")
    return 0


def _confirms(question: str) -> bool:
    print(f"{question} [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")
