"""Terms with a file for an argument: its name has to fit an expression, its content may be stated there too."""

from __future__ import annotations

from kvfold.errors import PolicyError

_SHOWN_DIGITS = 16


def check_file_name(term: str, file: str) -> None:
    if '"' in file or "\n" in file:
        raise PolicyError(f"{term}: file cannot hold quotation marks or line breaks; rename the file")


def stated_content(term: str, file: str, stated: str, digest: str) -> str:
    """How an expression states the content of this digest; refused if it states another."""
    found = f"sha_{digest[:_SHOWN_DIGITS]}"
    if stated not in ("", found):
        raise PolicyError(f'{term}(file="{file}"): its content is {found}, not {stated}; measure it anew')
    return found
