"""`kvfold serve --engine URL`: options of a server whose replies a vLLM server computes, and those that it refuses."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.cli.options import add_option, load_model, nonempty
from kvfold.errors import InputError

if TYPE_CHECKING:
    from kvfold.policy import Policy
    from kvfold.serve.middleware import OnDone
    from kvfold.serve.settings import Settings

_LOCAL = ("--replicas", "--host-memory", "--disk", "--disk-size", "--redis", "--store-form", "--kv-events")
_PACKING = ("--engine-store", "--store-secret", "--device", "--dtype", "--memory", "--rope", "--compile")
_ENGINE = ("--engine-store", "--engine-key")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engine")
    text = "vLLM server that computes the replies, e.g. http://127.0.0.1:8000; default: a model in this process"
    add_option(group, "--engine", "URL", text, nonempty)
    text = "folder or Redis URL that the engine's connector kvfold.vllm reads; policies other than full need it"
    add_option(group, "--engine-store", "PLACE", text, nonempty)
    add_option(group, "--engine-key", "FILE", "file of the engine's API key; default: none is sent", Path)


def check_engine(args: argparse.Namespace) -> None:
    """InputError for options that have no effect with an engine, or none without one."""
    names = {word.partition("=")[0] for word in args.words}
    if args.engine is None:
        for name in _ENGINE:
            if name in names:
                raise InputError(f"{name} is for --engine URL; give that too, or leave {name} out")
        return
    for name in _LOCAL:
        if name in names:
            raise InputError(f"--engine and {name} exclude each other: prefixes and batches are the engine's")


def check_packing(args: argparse.Namespace, *, packs: bool) -> None:
    """InputError for options that the policy needs with an engine, or that have no effect under it."""
    if packs and args.engine_store is None:
        raise InputError("--policy packs prefixes for the engine; give --engine-store, where its connector reads them")
    if not packs:
        names = {word.partition("=")[0] for word in args.words}
        for name in _PACKING:
            if name in names:
                raise InputError(f"--policy full packs nothing and loads no model here; leave {name} out")


def run_engine(
    args: argparse.Namespace,
    policy: Policy,
    settings: Settings,
    secret: bytes,
    started: Callable[[int], None],
    on_done: OnDone,
) -> int:
    """Serve until interrupted; the exit code."""
    import asyncio

    from kvfold.models.loader import load_tokenizer
    from kvfold.serve.api.errors import ApiError
    from kvfold.serve.ops.log_format import log_to_stderr
    from kvfold.serve.remote.http import EngineHttp
    from kvfold.serve.remote.packer import Packer
    from kvfold.serve.remote.service import EngineFacts, RemoteService, needs_model
    from kvfold.serve.server import serve
    from kvfold.store.tiers.places import open_place
    from kvfold.text_io import read_text_file

    http = EngineHttp(args.engine, None if args.engine_key is None else read_text_file(args.engine_key).strip())
    try:
        facts = asyncio.run(EngineFacts.ask(http))
    except ApiError as error:
        raise InputError(f"--engine {args.engine}: {error.logged}; start vLLM first, and look at its log") from error
    packer = None
    if needs_model(policy):
        model = load_model(args)
        tokenizer, packer = model.tokenizer, Packer(model, policy, open_place(args.engine_store), secret)
    else:
        tokenizer = load_tokenizer(args.model)
    log_to_stderr(args.log)
    with closing(RemoteService(tokenizer, facts, http, policy, settings, packer)) as service:
        return serve(service, args.host, args.port, started, on_done)
