"""`kvfold env`: versions and devices, for bug reports."""

from __future__ import annotations

import argparse
import os
import platform
import sys

from kvfold import __version__
from kvfold.cli import show
from kvfold.cli.options import Subparsers, add_json_option
from kvfold.models.pull.pull import HOME_HELP, home_folder
from kvfold.plugins import VARIABLE

_PACKAGES = (
    "torch",
    "transformers",
    "tokenizers",
    "safetensors",
    "triton",
    "numba",
    "numpy",
    "starlette",
    "redis",
    "vllm",
)


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "env",
        help="print versions and devices, for bug reports",
        description="Print the versions of kvfold and of the packages it uses, the commit, devices and folders.",
        epilog=f"examples:\n  kvfold env\n  kvfold env --json\n\n{HOME_HELP}",
    )
    add_json_option(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print what a bug report needs; nothing of it is secret but the name of the home folder."""
    from kvfold.bench.environment import commit, versions  # here: other commands come without torch

    found = {"kvfold": __version__, "commit": commit()}
    found |= {"python": platform.python_version(), "platform": platform.platform()}
    found |= dict.fromkeys(_PACKAGES, "not installed") | versions(_PACKAGES) | _devices()
    found |= {"KVFOLD_HOME": str(home_folder()), VARIABLE: os.environ.get(VARIABLE) or "not set"}
    if args.json:
        show.print_json(found)
    else:
        for name, value in found.items():
            sys.stdout.write(f"{name:<14}{value}\n")
    return 0


def _cpu_kernels() -> str:
    import torch

    from kvfold.core import HAS_AVX512_KERNELS, HAS_NUMBA, has_amx_kernels
    from kvfold.models.cpu_linear import is_wanted

    blas = "MKL" if torch.backends.mkl.is_available() else "OpenBLAS or another"
    if not HAS_NUMBA:
        return f"none, numba is not installed; matrix products by {blas}"
    what = "decode attention, quantising"
    what += ", matrix products of few rows, decoder layers" if is_wanted() else ""
    what += ", decode steps, prefill attention, cascade attention" if HAS_AVX512_KERNELS else ""
    what += ", the same of bf16 models (AMX)" if has_amx_kernels() else ""
    return f"{what}; other matrix products by {blas} ({torch.backends.cpu.get_cpu_capability()})"


def _devices() -> dict[str, str]:
    import torch  # here: other commands come without it

    from kvfold.bench.environment import cpu_name

    name, machine = cpu_name(), platform.machine()
    named = name if name == machine else f"{name} ({machine})"
    cpu = f"{named}, {os.cpu_count()} cores, {torch.get_num_threads()} threads in torch"
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "cpu": cpu,
        "cpu kernels": _cpu_kernels(),
        "cuda": f"{torch.version.cuda}: {', '.join(gpus)}" if gpus else "no GPU that torch can use",
    }
