"""Forms in which byte tiers hold prefixes; `FORMS` names them all."""

from kvfold.store.form.base import Exact, Form, Like, Likes
from kvfold.store.form.cachegen import CacheGen
from kvfold.store.form.packed import Packed

__all__ = ["FORMS", "Form", "Like", "Likes"]

FORMS: dict[str, Form] = {form.name: form for form in (Exact(), Packed(), CacheGen())}
