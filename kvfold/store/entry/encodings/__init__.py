"""Forms in which byte tiers hold prefixes; `FORMS` names them all."""

from kvfold.errors import InputError
from kvfold.store.entry.encodings.base import Exact, Form, Like, Likes
from kvfold.store.entry.encodings.cachegen import CacheGen
from kvfold.store.entry.encodings.packed import Packed

__all__ = ["FORMS", "Form", "Like", "Likes", "check_form"]

FORMS: dict[str, Form] = {form.name: form for form in (Exact(), Packed(), CacheGen())}


def check_form(name: str) -> None:
    """InputError if there is no such form."""
    if name not in FORMS:
        raise InputError(f'no form "{name}"; forms: {", ".join(FORMS)}')
