"""A policy: what is kept, where, when and how it is stored, as one frozen value that an expression denotes.

Every published method of KV-cache compression is a point in the product of independent choices; `Policy.parse` reads
one, `str` writes it with all defaults, `short` without, and `fingerprint` names the results it gives.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from kvfold.errors import PolicyError
from kvfold.policy.check import check
from kvfold.policy.defaults import load_variants
from kvfold.policy.parse import parse
from kvfold.policy.parts import PolicyParts
from kvfold.policy.registry import term_of
from kvfold.policy.resolve import resolve
from kvfold.policy.text import canonical, short, term_text


@dataclass(frozen=True)
class Policy(PolicyParts):
    """Parts that work together: a combination that cannot is refused when it is made."""

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def parse(cls, source: str | Policy) -> Policy:
        """Read an expression such as `snapkv(window=32) + ada + 8x + int4`; a Policy is returned as it is."""
        if isinstance(source, Policy):
            return source
        if not isinstance(source, str):
            raise PolicyError(f'a policy is text such as "snapkv + ada + 8x + int4", not {type(source).__name__}')
        load_variants()
        try:
            return cls(**vars(resolve(parse(source))))
        except PolicyError as error:
            raise type(error)(f'policy "{_one_line(source)}": {error}') from None

    def __str__(self) -> str:
        """The canonical form: all defaults written out, in the order of the axes."""
        return canonical(self)

    @property
    def short(self) -> str:
        """What one would type: defaults are left out."""
        return short(self)

    @property
    def fingerprint(self) -> str:
        """SHA-256 over the canonical form and the revision of every term; the first 16 digits are enough to show."""
        revisions = sorted(f"{term.name}@{term.revision}" for term in map(term_of, self.variants))
        return hashlib.sha256("\n".join((self._identity, *revisions)).encode()).hexdigest()

    @property
    def _identity(self) -> str:
        """The canonical form, in which variants that read a file stand for what is in it, not for where it lies."""
        text = str(self)
        for variant in self.variants:
            if variant.identity is not None:
                written, said = term_text(variant, True), variant.identity
                text = text.replace(written.removesuffix(")"), said.removesuffix(")"))  # a codec's layers may follow
        return text


def _one_line(text: str, limit: int = 200) -> str:
    line = " ".join(text.split())
    return line if len(line) <= limit else f"{line[:limit]}..."
