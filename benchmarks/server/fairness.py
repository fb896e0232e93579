"""How long does one client wait for another's long prompts? Streams beside them, and first tokens of other tenants.

    python -m benchmarks.server fairness [--model smollm2-135m] [--tokens 6000] [--policy POLICY …] [--only beside]
                                        [--save] [-- OPTIONS]

For each policy a server runs with keys of two tenants. (1) Tenant B streams a reply; once it flows, A sends a prompt of
`--tokens` tokens. Reported: seconds until A's first token, and the largest gap between two texts of B meanwhile. (2) A
sends four such prompts at once, B then "hi". Reported: seconds until B's first token and until the last of A's.
Targets: gaps under `full` at most 0.5 s on two idle cores, under other policies at most twice those under `full`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.commands import argument_parser
from benchmarks.rows import append_row, facts, markdown_table
from benchmarks.server.client import Served, Timed, served, text_of, user

_POLICIES = ("full", "keydiff + 4x", "kvzip + global + 4x + int4")
_KEYS = {"a": "key-of-a", "b": "key-of-b"}
_NUM_LONG = 4


def measure(args: argparse.Namespace, policy: str, folder: Path) -> dict[str, Any]:
    keys = folder / "keys"
    keys.write_text("".join(f"{key} {tenant}\n" for tenant, key in _KEYS.items()), encoding="utf-8")
    options = ("--policy", policy, "--keys", str(keys), "--memory", args.memory, "--timeout", "3600", *args.options)
    with served(args.model, *options, log=folder / "log") as server, ThreadPoolExecutor(_NUM_LONG + 1) as pool:
        a, b = (server.as_tenant(key) for key in _KEYS.values())
        _said(b.ask(b.body([user("warm up")], 8)))
        parts = {"beside": beside, "before": before}
        chosen = [part for name, part in parts.items() if args.only in (None, name)]
        return {"policy": policy} | {name: value for part in chosen for name, value in part(args, a, b, pool).items()}


def beside(args: argparse.Namespace, a: Served, b: Served, pool: ThreadPoolExecutor) -> dict[str, float]:
    """The largest gap of a stream, without a long prompt and beside one."""
    prompt = text_of(args.tokens, "Alone", a)
    alone = _said(b.ask(b.body([user("Tell me a long story.")], 64), hang_up_after=64))
    stream = pool.submit(b.ask, b.body([user("Tell me a long story.")], args.reply))
    time.sleep(args.settle_s)
    long = _said(a.ask(a.body([user(prompt)], 1)))
    return {
        "alone_gap_s": max(alone.gaps_s, default=0.0),
        "gap_s": max(_said(stream.result()).gaps_s, default=0.0),
        "prompt_tokens": long.num_prompt,
        "prompt_s": long.total_s,
    }


def before(args: argparse.Namespace, a: Served, b: Served, pool: ThreadPoolExecutor) -> dict[str, float]:
    """The first token of one tenant while four long prompts of another are read."""
    prompts = [text_of(args.tokens, f"Number {i}", a) for i in range(_NUM_LONG)]
    hi = b.body([user("hi")], 1)
    alone = _said(b.ask(hi))
    long = [pool.submit(a.ask, a.body([user(prompt)], 1)) for prompt in prompts]
    time.sleep(args.settle_s)
    found = _said(b.ask(hi))
    return {
        "alone_first_s": alone.total_s,
        "first_s": found.total_s,
        "four_s": max(_said(one.result()).total_s for one in long),
    }


def _said(found: Timed) -> Timed:
    if found.status != 200 or found.error is not None:
        raise SystemExit(f"the server answered with status {found.status}, {found.error}")
    return found


def table(rows: list[dict[str, Any]]) -> str:
    head = (
        "policy",
        "largest gap of a stream (s): alone, beside the prompt",
        "the prompt (s)",
        'first token of "hi" (s): alone, beside four prompts',
        "the four (s)",
    )
    names = (("alone_gap_s", "gap_s"), ("prompt_s",), ("alone_first_s", "first_s"), ("four_s",))
    lines = []
    for row in rows:
        cells = (", ".join(f"{row[name]:.3f}" for name in cell if name in row) for cell in names)
        lines.append([f"`{row['policy']}`", *cells])
    return markdown_table(head, lines)


def main(arguments: Sequence[str]) -> None:
    parser = argument_parser("server fairness", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--tokens", type=int, default=6000, help="of a long prompt, about (%(default)s)")
    parser.add_argument("--reply", type=int, default=1500, help="tokens of the stream, at most (%(default)s)")
    parser.add_argument("--policy", action="append", help=f"may be repeated; default: {', '.join(_POLICIES)}")
    parser.add_argument("--memory", default="2GB", metavar="SIZE", help="of the arena (%(default)s)")
    parser.add_argument("--settle-s", type=float, default=1.0, metavar="S", help="before the second request comes")
    parser.add_argument("--only", choices=("beside", "before"), help="(1) or (2) alone")
    parser.add_argument("--save", action="store_true", help="append a row to benchmarks/results/serve_fairness.jsonl")
    parser.add_argument("options", nargs="*", metavar="OPTIONS", help="of `kvfold serve`, behind --")
    args = parser.parse_args(arguments)
    about, rows = facts(model=args.model, tokens=args.tokens, options=args.options), []
    for policy in args.policy or _POLICIES:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(args, policy, Path(folder)))
        print(rows[-1], file=sys.stderr)
        if args.save:
            append_row("serve_fairness", about | rows[-1])
    print(table(rows))
    print(json.dumps(about | {"rows": rows}))
