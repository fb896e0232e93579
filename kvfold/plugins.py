"""Terms and workloads of other packages: entry points, and modules that the user names.

    [project.entry-points."kvfold.terms"]          in the pyproject.toml of another package; kvfold.workloads likewise
    mine = "my_package.scorer"

    kvfold --import my_scorer.py run …             a module, or a file, for one command
    KVFOLD_IMPORT=my_package.scorer kvfold serve   several with commas between them; child processes inherit it

Importing a module registers what it defines. An installed package that cannot be imported is told once and left out; a
module that the user named is refused.
"""

from __future__ import annotations

import hashlib
import os
import sys
import warnings
from functools import cache
from importlib import import_module, util
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal

from kvfold.errors import InputError, KvfoldError, KvfoldWarning

VARIABLE = "KVFOLD_IMPORT"
Group = Literal["kvfold.terms", "kvfold.workloads"]


@cache
def load_plugins(group: Group) -> None:
    """Import what is installed for the group, then what the user named."""
    for point in entry_points(group=group):
        try:
            point.load()
        except (Exception, SystemExit) as error:
            package = "" if point.dist is None else f" of {point.dist.name}"
            text = f'entry point "{point.name}"{package} in {group} is left out: {_reason(error)}'
            warnings.warn(text, KvfoldWarning, stacklevel=2)
    for name in filter(None, (part.strip() for part in os.environ.get(VARIABLE, "").split(","))):
        import_named(name)


def import_named(name: str) -> None:
    """Import a module by its dotted name, also from the current folder, or a Python file by its path."""
    try:
        if name.endswith(".py"):
            _import_file(Path(name))
        else:
            if (here := os.getcwd()) not in sys.path:
                sys.path.append(here)
            import_module(name)
    except (Exception, SystemExit) as error:
        raise InputError(f'"{name}" cannot be imported: {_reason(error)}') from error


def _import_file(path: Path) -> None:
    path = path.resolve()
    name = path.stem
    if _is_of_another(name, path):  # a file beside it, or a module such as `random` that others import
        name = f"{name}_{hashlib.sha256(bytes(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return
    spec = util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise InputError(f"{path} is no Python file")
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise


def _is_of_another(name: str, path: Path) -> bool:
    """Whether the name is that of a module from another file, or of one of Python's."""
    known = sys.modules.get(name)
    if known is not None:
        return getattr(known, "__file__", None) != str(path)
    return name in sys.stdlib_module_names


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return text if isinstance(error, KvfoldError) else f"{type(error).__name__}: {text}"
