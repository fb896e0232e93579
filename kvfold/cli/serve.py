"""`kvfold serve`: one model over HTTP, for Anthropic and OpenAI clients, with a prefix cache.

kvfold serve --model smollm2-135m --policy "keydiff + 4x" --disk prefixes --disk-size 20GB
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.cli.options import (
    Subparsers,
    add_model_options,
    add_option,
    add_secret_option,
    checked,
    count,
    load_model,
    nonempty,
    parse_policy,
    positive,
)
from kvfold.cli.serve_engine import add_engine_options, check_engine, check_packing, run_engine
from kvfold.cli.serve_replicas import add_replica_options, check_replicas, replica_of, run_replicas, serve_replica
from kvfold.errors import InputError, KvfoldWarning, MissingExtra
from kvfold.plurals import counted
from kvfold.policy import Policy
from kvfold.policy.size import parse_bytes

if TYPE_CHECKING:
    from kvfold.serve.kv_events import KvEventsConfig
    from kvfold.serve.settings import Settings

_EPILOG = """examples:
  kvfold serve --policy "keydiff + 4x"
  kvfold serve --model qwen2.5-coder-1.5b --disk prefixes --disk-size 20GB --alias gpt-4o
  kvfold serve --host 0.0.0.0 --keys keys.txt --log json
  kvfold serve --engine http://127.0.0.1:8000 --policy "keydiff + uniform + 4x" --engine-store /var/kvfold
  kvfold serve --replicas 2 --redis redis://localhost:6379/0 --store-secret secret.txt

Clients use http://HOST:PORT (Anthropic) or http://HOST:PORT/v1 (OpenAI) as their base URL; / is a dashboard, /metrics
is for Prometheus. Ctrl-C ends the server.
"""
_NO_SECRET = (
    "anyone who can write to this Redis server can forge KV caches: sign entries with --store-secret FILE, the "
    "same for all servers that share it"
)


_LEAST_TIER, _LEAST_BODY = "1MB", "1KB"


@checked
def _tier_size(text: str) -> int:
    """Bytes of a tier that can hold entries."""
    if parse_bytes(text) < parse_bytes(_LEAST_TIER):
        raise InputError(f"{text} is too little for cached prompts; give {_LEAST_TIER} or more")
    return parse_bytes(text)


@checked
def _body_size(text: str) -> int:
    """Bytes that a request fits into."""
    if parse_bytes(text) < parse_bytes(_LEAST_BODY):
        raise InputError(f"{text} is too little for a request; give {_LEAST_BODY} or more")
    return parse_bytes(text)


@checked
def _price(text: str) -> float:
    """Dollars per million tokens."""
    try:
        price = float(text)
    except ValueError:
        price = math.nan
    if not 0 <= price < math.inf:
        raise InputError(f'"{text:.40}" is no price; write dollars per million tokens, such as --price 3 15')
    return price


def add_parser(subparsers: Subparsers) -> None:
    """Add the command to the subcommands of `kvfold`."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model to Anthropic and OpenAI clients, with continuous batching and a prefix cache.",
        epilog=_EPILOG,
    )
    add_option(parser, "--policy", "POLICY", "of all requests; kvfold policies lists the terms", str, "full")
    add_option(parser, "--host", "ADDRESS", "address to bind", str, "127.0.0.1")
    add_option(parser, "--port", "N", "0 takes any free one", count, 8080)
    alias = "another name for the model, e.g. the one your app asks for; may be repeated"
    add_option(parser, "--alias", "NAME", alias, nonempty, [], action="append")
    add_option(parser, "--keys", "FILE", "API keys, a key and its tenant per line; default: none")
    text = "file of the secret by which a proxy before this server proves itself; it then names the tenants"
    add_option(parser, "--behind-proxy", "FILE", text)
    parser.add_argument("--log", choices=("text", "json"), default="text", help="format of output lines (%(default)s)")
    text = "SQLite file of facts that users state, recalled for requests that name their user; default: none is kept"
    add_option(parser, "--memory-file", "FILE", text, Path)
    add_option(parser, "--otel", "URL", "OpenTelemetry collector for traces, e.g. http://localhost:4318")
    add_replica_options(parser)
    add_engine_options(parser)
    _add_cache_options(parser)
    _add_event_options(parser)
    _add_limits(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def _add_cache_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("prefix cache")
    text = "size of the host-memory tier; default: 4GB, but none on a CPU that has neither --disk nor --redis"
    add_option(group, "--host-memory", "SIZE", text, _tier_size)
    add_option(group, "--disk", "DIR", "folder of the disk tier, which persists across restarts")
    add_option(group, "--disk-size", "SIZE", "size of the disk tier", _tier_size, "20GB")
    add_option(group, "--redis", "URL", "Redis tier shared by several servers, e.g. redis://host:6379/0")
    add_option(
        group, "--store-form", "FORM", "encoding of entries: exact, or packed (lossless, a third smaller)", str, "exact"
    )
    add_secret_option(group)
    add_option(group, "--cache-min-tokens", "N", "minimum cacheable prefix; default: by model name", positive)
    group.add_argument(
        "--price", type=_price, nargs=2, metavar=("IN", "OUT"), help="dollars per million input and output tokens"
    )


def _add_event_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("KV events for routers, in vLLM's format (pip install 'kvfold[events]')")
    add_option(group, "--kv-events", "ADDRESS", "where to publish them, e.g. tcp://127.0.0.1:5557; default: nowhere")
    add_option(group, "--kv-events-replay", "ADDRESS", "send missed events again to whoever asks here")
    add_option(group, "--kv-events-topic", "TEXT", "topic of events", str, "")
    text = "allow addresses that other machines can reach: events hold the token ids of prompts"
    group.add_argument("--kv-events-remote", action="store_true", help=text)


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    add_option(group, "--max-running", "N", "running requests", int, 64)
    add_option(group, "--max-waiting", "N", "queued requests", int, 256)
    add_option(
        group,
        "--max-per-tenant",
        "N",
        "running and queued requests of one tenant (default: half of --max-running with --keys, else all)",
        int,
    )
    add_option(group, "--max-output", "N", "maximum max_tokens of a request; more is refused", int, 32_768)
    add_option(group, "--max-body", "SIZE", "maximum request body (default: by the context window)", _body_size)
    add_option(group, "--timeout", "S", "seconds for a request", float, 600.0)
    add_option(
        group, "--max-connections", "N", "concurrent connections (default: 1024, or what file descriptors allow)", int
    )
    add_option(group, "--header-timeout", "S", "seconds to receive a request's headers", float, 10.0)
    add_option(group, "--body-timeout", "S", "seconds to receive its body", float, 60.0)
    add_option(group, "--write-timeout", "S", "seconds that a write to a client may block", float, 30.0)
    add_option(group, "--shutdown-timeout", "S", "seconds from Ctrl-C or SIGTERM to exit", float, 5.0)
    add_option(group, "--temperature", "T", "default temperature of requests, 0 to 2", float, 1.0)


def run(args: argparse.Namespace) -> int:
    """Load, and serve until Ctrl-C."""
    check_options(args)
    policy = parse_policy(args.policy)
    try:
        from kvfold.serve.server import check_address, end_process, open_store, serve, service_of
    except ModuleNotFoundError as error:
        raise MissingExtra(f"the server needs {error.name}; run: pip install 'kvfold[serve]'") from error
    from kvfold.serve.kv_events import publish_blocks, publisher_of
    from kvfold.serve.local_service import check_served_form
    from kvfold.serve.ops.log_format import log_to_stderr
    from kvfold.serve.ops.tracing import trace_exporter
    from kvfold.serve.remote.service import needs_model
    from kvfold.store.entry.format import read_secret

    check_served_form(args.store_form)
    if args.engine is not None:
        check_packing(args, packs=needs_model(policy))
    settings, secret, events = make_settings(args), read_secret(args.store_secret), make_kv_events(args)
    replica = replica_of(args)
    if replica is None:
        check_address(args.host, args.port)
    if args.redis is not None and not secret and (replica is None or replica.number == 0):
        warnings.warn(_NO_SECRET, KvfoldWarning, stacklevel=1)
    _say_what_starts(args)
    if replica is None and args.replicas is not None:
        log_to_stderr(args.log)
        return _stopped(run_replicas(args, settings, lambda port: _say(args, policy, port)))
    if args.engine is not None:
        with trace_exporter(args.otel) as on_done:
            code = run_engine(args, policy, settings, secret, lambda port: _say(args, policy, port), on_done)
        end_process(_stopped(code))
    number = 0 if replica is None else replica.number
    with trace_exporter(args.otel) as on_done, publisher_of(events, number) as publisher:
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
            if publisher is not None:
                publish_blocks(service, publisher)
            if service.no_reuse is not None and (replica is None or replica.number == 0):
                print(f"prompts are not cached, and those with cache markers are refused: {service.no_reuse}")
            if replica is not None:
                code = serve_replica(replica, service, on_done)
            else:
                code = serve(service, args.host, args.port, lambda port: _say(args, policy, port), on_done)
    end_process(_stopped(code) if replica is None else code)


def check_options(args: argparse.Namespace) -> None:
    """InputError for options that exclude or need each other; none of this takes torch, so it is told at once."""
    from kvfold.serve.auth import read_keys

    if not 0 <= args.port < 1 << 16:
        raise InputError(f"port {args.port} does not exist; give 0 (any free one) to 65535")
    if args.keys is not None and args.behind_proxy is not None:
        raise InputError("--keys and --behind-proxy exclude each other: either keys name the tenant, or the proxy does")
    check_engine(args)
    check_replicas(args)
    make_kv_events(args)
    if args.keys is not None:
        read_keys(args.keys)


def make_kv_events(args: argparse.Namespace) -> KvEventsConfig | None:
    """None: none are published."""
    from kvfold.serve.kv_events import KvEventsConfig

    if args.kv_events is None:
        if args.kv_events_replay is not None or args.kv_events_topic or args.kv_events_remote:
            raise InputError("--kv-events-replay, -topic and -remote need --kv-events ADDRESS; add it")
        return None
    found = KvEventsConfig(args.kv_events, args.kv_events_replay, args.kv_events_topic, args.kv_events_remote)
    found.check(args.replicas or 1)
    return found


def make_settings(args: argparse.Namespace) -> Settings:
    """What the options say of limits, keys and prices."""
    from kvfold.serve.auth import key_digest, read_keys
    from kvfold.serve.cache.usage import Price, read_factor_of
    from kvfold.serve.settings import Limits, Settings
    from kvfold.store.entry.format import read_secret

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
        proxy_digest=None
        if args.behind_proxy is None
        else key_digest(read_secret(args.behind_proxy).decode("latin-1")),
        price=None if args.price is None else Price(args.price[0], args.price[1], read_factor_of(names[-1])),
        cache_min_tokens=args.cache_min_tokens,
        temperature=args.temperature,
        memory_file=args.memory_file,
    )


def served_name(model: str) -> str:
    """The model name clients use: of a folder its own name, without the path."""
    folder = Path(model).expanduser()
    return folder.resolve().name if folder.is_dir() else model


def _say_what_starts(args: argparse.Namespace) -> None:
    """On stderr, before anything that takes long; replicas leave it to the process that started them."""
    from kvfold.serve.replicas.lifeline import VARIABLE

    name = served_name(args.model)
    if args.engine is not None:
        text = f"starting {name} in front of the engine at {args.engine}"
    elif args.replicas is not None:
        text = f"starting {counted(args.replicas, 'replica')} of {name}"
    else:
        text = f"loading {name}"
    if VARIABLE not in os.environ:
        print(f"{text}, policy {args.policy}", file=sys.stderr, flush=True)


def _stopped(code: int) -> int:
    """The exit code, told on stderr if it is 0."""
    if code == 0:
        print("stopped", file=sys.stderr, flush=True)
    return code


def _say(args: argparse.Namespace, policy: Policy, port: int) -> None:
    name, url = served_name(args.model), f"http://{args.host}:{port}"
    if args.log == "json":
        from kvfold.serve.ops.json_output import json_line

        print(json_line("serving", model=name, policy=policy.short, url=url), flush=True)
    else:
        print(f"{name}, {policy.short}: {url} (Ctrl-C ends it)", flush=True)
