"""`kvfold serve --replicas N`: options that replicas share, those they cannot, and one replica of them."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from kvfold.cli.options import add_option, positive
from kvfold.errors import InputError

if TYPE_CHECKING:
    from kvfold.serve.middleware import OnDone
    from kvfold.serve.replicas.lifeline import Lifeline
    from kvfold.serve.service import Service
    from kvfold.serve.settings import Settings

MAX_REPLICAS = 64
_APART = {
    "memory_file": "facts of users are held by one process; leave --memory-file out, or --replicas",
}


def add_replica_options(parser: argparse.ArgumentParser) -> None:
    text = f"server processes behind this address, 1 to {MAX_REPLICAS}; default: this one process"
    add_option(parser, "--replicas", "N", text, positive)


def run_replicas(args: argparse.Namespace, settings: Settings, started: Callable[[int], None]) -> int:
    """Start them and serve until interrupted; the exit code."""
    from kvfold.serve.replicas.fleet import replica_command
    from kvfold.serve.replicas.server import serve_replicas
    from kvfold.serve.server import listen

    with listen(args.host, args.port) as listening:
        port = listening.getsockname()[1]
        return serve_replicas(replica_command(args.words), args.replicas, settings, listening, lambda: started(port))


def check_replicas(args: argparse.Namespace) -> None:
    """InputError for options that replicas cannot share."""
    if args.replicas is None:
        return
    if args.replicas > MAX_REPLICAS:
        raise InputError(f"--replicas is {args.replicas}; give 1 to {MAX_REPLICAS}")
    for name, reason in _APART.items():
        if getattr(args, name) is not None:
            raise InputError(f"--replicas and --{name.replace('_', '-')} exclude each other: {reason}")


def replica_of(args: argparse.Namespace) -> Lifeline | None:
    """The replica that this process is; its folder, device and memory are then its own."""
    from kvfold.serve.replicas.lifeline import Lifeline

    found = Lifeline.of_environment()
    if found is None:
        return None
    import torch

    from kvfold.models.attach import default_capacity

    found.end_with_parent(args.shutdown_timeout)
    num_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    num_sharing = found.num_sharing(args.device, num_gpus)
    args.device = found.device(args.device, num_gpus)
    if args.memory is None and num_sharing > 1:
        if args.device.startswith("cuda"):
            raise InputError(f"{num_sharing} replicas share {args.device}; give --memory, the KV cache of each")
        args.memory = default_capacity(torch.device("cpu")) // num_sharing
    if args.disk is not None:
        args.disk = str(Path(args.disk) / f"replica-{found.number}")
    return found


def serve_replica(replica: Lifeline, service: Service, on_done: OnDone) -> int:
    """Serve at the replica's socket until the parent ends it; the exit code."""
    from kvfold.serve.connections import BACKLOG
    from kvfold.serve.server import serve_at

    try:
        with replica.listen(BACKLOG) as listening:
            return serve_at(service, listening, lambda: replica.say_ready(service.body_bytes), on_done)
    finally:
        replica.leave()
