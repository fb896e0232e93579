"""`kvfold new`: a package with a scorer, codec or allocator of your own, its contract test and its entry point."""

from __future__ import annotations

import argparse
import os
import shutil
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import NamedTuple

from kvfold.cli.options import Subparsers
from kvfold.errors import FileError, InputError
from kvfold.policy.registry import check_name, find, load_variants


class Kind(NamedTuple):
    """Policies that use a term of this kind: one to try it with, and one for the benchmark, which sets the size."""

    policy: str
    bench: str


KINDS = {
    "scorer": Kind("{name} + 4x", "{name}"),
    "codec": Kind("keydiff + 4x + {name}", "keydiff + {name}"),
    "allocator": Kind("keydiff + {name} + 4x", "keydiff + {name}"),
}


def add_parser(subparsers: Subparsers) -> None:
    parser = subparsers.add_parser(
        "new",
        help="write a package with a scorer, codec or allocator of your own",
        description="Write the folder NAME with a working example, its test, and a pyproject.toml that installs it.",
    )
    parser.add_argument("kind", choices=KINDS, help="what it adds to the policy language")
    parser.add_argument("name", metavar="NAME", help="the term's name: lower-case letters, digits and underscores")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Write the package into the current folder and say how to go on."""
    check_name(args.name)
    load_variants()
    if (known := find(args.name)) is not None:
        raise InputError(f'"{args.name}" is a term already, of {known.place}; choose another name')
    written = write_package(args.kind, args.name, Path.cwd() / args.name)
    policy = KINDS[args.kind].policy.format(name=args.name)
    print(f"wrote {args.name}/: {', '.join(written)}; next:")
    print(f'  pip install -e {args.name} pytest\n  pytest {args.name}\n  kvfold policies "{policy}"')
    return 0


def write_package(kind: str, name: str, folder: Path) -> list[str]:
    """Fill a folder that does not exist yet; returns the names of its files."""
    cls = "".join(word.capitalize() for word in name.split("_"))
    policies = {field: text.format(name=name) for field, text in KINDS[kind]._asdict().items()}
    names = {"kind": kind, "name": name, "cls": cls, "dashed": name.replace("_", "-"), **policies}
    templates = {
        "pyproject.toml": "pyproject.toml",
        "README.md": "README.md",
        f"kvfold_{name}.py": f"{kind}.py",
        f"test_{name}.py": f"test_{kind}.py",
    }
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another name, or another folder to write it into")
    temporary = folder.with_name(f".{folder.name}.{os.getpid()}.tmp")
    try:
        temporary.mkdir()
        for file, template in templates.items():
            text = (files("kvfold") / "data" / "new" / f"{template}.txt").read_text(encoding="utf-8")
            (temporary / file).write_text(Template(text).substitute(names), encoding="utf-8")
        temporary.rename(folder)
    except OSError as error:
        raise FileError(f"{folder} cannot be written ({error.strerror}); choose another place") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return list(templates)
