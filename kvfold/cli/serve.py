"""`kvfold serve`: one model over HTTP, for Anthropic and OpenAI clients, with a prefix cache.

kvfold serve --model smollm2-135m --policy "keydiff + 4x" --disk prefixes --disk-size 20GB
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvfold.cli.options import (
    Subparsers,
    add_model_options,
    add_secret_option,
    count,
    load_model,
    nonempty,
    parse_policy,
    size_bytes,
)
from kvfold.errors import InputError, KvfoldWarning, MissingExtra
from kvfold.policy import Policy

if TYPE_CHECKING:
    from kvfold.serve.settings import Settings

_EPILOG = """examples:
  kvfold serve --policy "keydiff + 4x"
  kvfold serve --model qwen2.5-coder-1.5b --disk prefixes --disk-size 20GB --alias gpt-4o
  kvfold serve --host 0.0.0.0 --keys keys.txt --log json

Clients use http://HOST:PORT (Anthropic) or http://HOST:PORT/v1 (OpenAI) as their base URL; / is a dashboard, /metrics
is for Prometheus. Ctrl-C ends the server.
"""
_NO_SECRET = (
    "anyone who can write to this Redis server can forge KV caches: sign entries with --store-secret FILE, the "
    "same for all servers that share it"
)


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the subcommands of `kvfold`."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model to Anthropic and OpenAI clients, with continuous batching and a prefix cache.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--policy", default="full", help="of all requests (default: %(default)s); kvfold policies lists the terms"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to bind (default: %(default)s)")
    parser.add_argument("--port", type=count, default=8080, help="0 takes any free one (default: %(default)s)")
    parser.add_argument(
        "--alias",
        action="append",
        type=nonempty,
        default=[],
        metavar="NAME",
        help="another name for the model, e.g. the one your app asks for; may be repeated",
    )
    parser.add_argument("--keys", metavar="FILE", help="API keys, a key and its tenant per line; default: none")
    parser.add_argument("--log", choices=("text", "json"), default="text", help="log format on stderr (%(default)s)")
    parser.add_argument("--otel", metavar="URL", help="OpenTelemetry collector for traces, e.g. http://localhost:4318")
    _add_cache_options(parser)
    _add_limits(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prefix cache")
    group.add_argument(
        "--host-memory",
        default="4GB",
        type=size_bytes,
        metavar="SIZE",
        help="size of the host-memory tier; default: %(default)s",
    )
    group.add_argument("--disk", metavar="DIR", help="folder of the disk tier, which persists across restarts")
    group.add_argument(
        "--disk-size",
        default="20GB",
        type=size_bytes,
        metavar="SIZE",
        help="size of the disk tier; default: %(default)s",
    )
    group.add_argument("--redis", metavar="URL", help="Redis tier shared by several servers, e.g. redis://host:6379/0")
    group.add_argument(
        "--store-form",
        default="exact",
        metavar="FORM",
        help="encoding of entries in host memory, on disk and in Redis: exact, or packed (lossless, a third smaller); "
        "default: %(default)s",
    )
    add_secret_option(group)
    group.add_argument(
        "--cache-min-tokens", type=count, metavar="N", help="minimum cacheable prefix; default: by model name"
    )
    group.add_argument(
        "--price", type=float, nargs=2, metavar=("IN", "OUT"), help="dollars per million input and output tokens"
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    group.add_argument("--max-running", type=int, default=64, metavar="N", help="running requests (%(default)s)")
    group.add_argument("--max-waiting", type=int, default=256, metavar="N", help="queued requests (%(default)s)")
    group.add_argument(
        "--max-per-tenant",
        type=int,
        metavar="N",
        help="concurrent requests of one tenant; default: half of --max-running with --keys, else all of it",
    )
    group.add_argument(
        "--max-output", type=int, default=32_768, metavar="N", help="maximum max_tokens of a request (%(default)s)"
    )
    group.add_argument(
        "--max-body",
        type=size_bytes,
        metavar="SIZE",
        help="maximum request body; default: 32 bytes per token of the context window, plus 64 KiB",
    )
    group.add_argument("--timeout", type=float, default=600.0, metavar="S", help="seconds for a request (%(default)s)")
    group.add_argument(
        "--max-connections",
        type=int,
        metavar="N",
        help="concurrent connections (1024, or as many as file descriptors allow)",
    )
    seconds: dict[str, Any] = {"type": float, "metavar": "S"}
    group.add_argument(
        "--header-timeout", default=10.0, help="seconds to receive a request's headers (%(default)s)", **seconds
    )
    group.add_argument("--body-timeout", default=60.0, help="seconds to receive its body (%(default)s)", **seconds)
    group.add_argument(
        "--write-timeout", default=30.0, help="seconds that a write to a client may block (%(default)s)", **seconds
    )
    group.add_argument(
        "--shutdown-timeout", default=5.0, help="seconds from Ctrl-C or SIGTERM to exit (%(default)s)", **seconds
    )
    group.add_argument(
        "--temperature", type=float, default=1.0, metavar="T", help="default temperature of requests (%(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Load, and serve until Ctrl-C."""
    policy = parse_policy(args.policy)
    if not 0 <= args.port < 1 << 16:
        raise InputError(f"port {args.port} does not exist; give 0 (any free one) to 65535")
    try:
        from kvfold.serve.server import check_address, end_process, open_store, serve, service_of
    except ModuleNotFoundError as error:
        raise MissingExtra(f"the server needs {error.name}; run: pip install 'kvfold[serve]'") from error
    from kvfold.serve.ops.request_trace import log_to_stderr
    from kvfold.serve.ops.tracing import trace_exporter
    from kvfold.serve.service import check_served_form
    from kvfold.store.entry.signing import read_secret

    check_served_form(args.store_form)
    settings, secret = make_settings(args), read_secret(args.store_secret)
    check_address(args.host, args.port)
    if args.redis is not None and not secret:
        warnings.warn(_NO_SECRET, KvfoldWarning, stacklevel=1)
    with trace_exporter(args.otel) as on_done:
        model = load_model(args)
        store = open_store(
            model,
            host_bytes=args.host_memory,
            disk=args.disk,
            disk_bytes=args.disk_size,
            redis=args.redis,
            form=args.store_form,
            secret=secret,
        )
        log_to_stderr(args.log)
        with service_of(model, policy, settings, store) as service:
            if service.no_reuse is not None:
                print(f"prompts are not cached: {service.no_reuse}")
            code = serve(service, args.host, args.port, lambda port: _say(args, policy, port), on_done)
    end_process(code)


def make_settings(args: argparse.Namespace) -> Settings:
    """What the options say of limits, keys and prices."""
    from kvfold.serve.auth import read_keys
    from kvfold.serve.cache.usage import Price, read_factor_of
    from kvfold.serve.settings import Limits, Settings

    names = (served_name(args.model), *args.alias)
    return Settings(
        names=names,
        limits=Limits(
            body_bytes=args.max_body,
            output_tokens=args.max_output,
            per_tenant=args.max_per_tenant,
            running=args.max_running,
            waiting=args.max_waiting,
            request_s=args.timeout,
            connections=args.max_connections,
            header_s=args.header_timeout,
            body_s=args.body_timeout,
            write_s=args.write_timeout,
            shutdown_s=args.shutdown_timeout,
        ),
        tenants=None if args.keys is None else read_keys(args.keys),
        price=None if args.price is None else Price(args.price[0], args.price[1], read_factor_of(names[-1])),
        cache_min_tokens=args.cache_min_tokens,
        temperature=args.temperature,
    )


def served_name(model: str) -> str:
    """The model name clients use: of a folder its own name, without the path."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _say(args: argparse.Namespace, policy: Policy, port: int) -> None:
    print(f"{served_name(args.model)}, {policy.short}: http://{args.host}:{port} (Ctrl-C ends it)", flush=True)
