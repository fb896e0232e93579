"""The one tree of exceptions.

KvfoldError
├── PolicyError      a policy expression that cannot work (also ValueError)
│   └── SizeError    a size below what must be kept
├── ModelError       a model that cannot be loaded, or that kvfold does not support
├── InputError       bad text, token ids, positions or options of a call (also ValueError)
├── FileError        a saved session that is truncated, altered or foreign
├── PrefixLost       a cached prefix failed its check while it was loaded; it is quarantined: look up again
├── OutOfPages       the arena (KV block pool) is full; nothing was changed (also MemoryError)
│   └── TooLarge     a request that does not fit into an arena that holds nothing else
├── LogitsError      the model computed logits that are not finite (also ArithmeticError)
├── Overloaded       too many requests wait; try again later
└── MissingExtra     an optional dependency is not installed (also ImportError)

KvfoldWarning        something that works, but hardly as meant (a UserWarning)

Every message is one sentence that tells what came, what is allowed, and what to do.
"""

from __future__ import annotations

DOCS_URL = "https://github.com/kvfold/kvfold/blob/main/docs"  # an installed package has no docs folder


class KvfoldError(Exception):
    """Base of everything kvfold raises on purpose."""


class PolicyError(KvfoldError, ValueError):
    """A policy expression that cannot work."""


class SizeError(PolicyError):
    """A size target below what must be kept."""


class ModelError(KvfoldError):
    """A model that cannot be loaded or is not supported."""


class InputError(KvfoldError, ValueError):
    """Bad text, token ids, positions or options."""


class FileError(KvfoldError):
    """A saved file that is truncated, altered or foreign."""


class PrefixLost(KvfoldError):
    """A layer of a cached prefix failed its check while it was loaded, and was quarantined; look the prefix up
    again."""


class OutOfPages(KvfoldError, MemoryError):
    """The arena (KV block pool) has too few free pages for a step; raised before the step changes anything."""

    ADVICE = "free a session, choose a smaller policy size, or load the model with more memory"


class TooLarge(OutOfPages):
    """A request does not fit into an arena that holds nothing else: it never will."""


class LogitsError(KvfoldError, ArithmeticError):
    """The model computed logits that are NaN or infinite; no token can be chosen."""


class Overloaded(KvfoldError):
    """The request queue is full; nothing was queued."""


class MissingExtra(KvfoldError, ImportError):
    """An optional dependency is not installed."""


class KvfoldWarning(UserWarning):
    """Something that works, but hardly as meant."""
