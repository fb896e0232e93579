"""kvfold: compress, reuse and shorten the context of language models.

    import kvfold

    model = kvfold.load("smollm2-135m")
    session = kvfold.Session(model, policy="snapkv + ada + 8x + int4")
    session.extend(long_text)
    print(session.ask("…").text)

Importing it is quick: torch and transformers are imported with the first name that needs them (PEP 562).
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvfold.errors import KvfoldError, KvfoldWarning

if TYPE_CHECKING:
    from kvfold import budget, codec, evicted, score
    from kvfold.answering import Answers, answer
    from kvfold.batch import generate_batch as generate
    from kvfold.drop_in import compress
    from kvfold.episodes import Episodes
    from kvfold.models.attach import attach
    from kvfold.models.cache import Cache
    from kvfold.models.loader import Model, load, wrap
    from kvfold.pipeline import register_pipeline
    from kvfold.policy import Policy
    from kvfold.recurse.context import Context
    from kvfold.recurse.reader import read
    from kvfold.reply import Reply
    from kvfold.session import Session
    from kvfold.shortening.shorten import Shortened
    from kvfold.shortening.text import shorten
    from kvfold.stats import Stats

__version__ = "0.1.0"
__all__ = [
    "Answers",
    "Cache",
    "Context",
    "Episodes",
    "KvfoldError",
    "KvfoldWarning",
    "Model",
    "Policy",
    "Reply",
    "Session",
    "Shortened",
    "Stats",
    "answer",
    "attach",
    "budget",
    "codec",
    "compress",
    "evicted",
    "example_text",
    "generate",
    "load",
    "read",
    "register_pipeline",
    "score",
    "shorten",
    "wrap",
]

# Where a name comes from: a module and what it is called there; without the latter the module itself.
_SOURCES = {
    "Answers": ("kvfold.answering", "Answers"),
    "Cache": ("kvfold.models.cache", "Cache"),
    "Context": ("kvfold.recurse.context", "Context"),
    "Episodes": ("kvfold.episodes", "Episodes"),
    "Model": ("kvfold.models.loader", "Model"),
    "Policy": ("kvfold.policy", "Policy"),
    "Reply": ("kvfold.reply", "Reply"),
    "Session": ("kvfold.session", "Session"),
    "Shortened": ("kvfold.shortening.shorten", "Shortened"),
    "Stats": ("kvfold.stats", "Stats"),
    "answer": ("kvfold.answering", "answer"),
    "attach": ("kvfold.models.attach", "attach"),
    "budget": ("kvfold.budget", None),
    "codec": ("kvfold.codec", None),
    "compress": ("kvfold.drop_in", "compress"),
    "evicted": ("kvfold.evicted", None),
    "generate": ("kvfold.batch", "generate_batch"),
    "load": ("kvfold.models.loader", "load"),
    "read": ("kvfold.recurse.reader", "read"),
    "register_pipeline": ("kvfold.pipeline", "register_pipeline"),
    "score": ("kvfold.score", None),
    "shorten": ("kvfold.shortening.text", "shorten"),
    "wrap": ("kvfold.models.loader", "wrap"),
}


def example_text() -> str:
    """The handbook that `kvfold demo` asks about: 4 kB of English, 970 tokens of SmolLM2's, for examples."""
    from importlib.resources import files

    return (files("kvfold") / "data" / "handbook.txt").read_text(encoding="utf-8").strip()


def __getattr__(name: str) -> Any:
    if name not in _SOURCES:
        raise AttributeError(f"module 'kvfold' has no attribute {name!r}; it has {', '.join(__all__)}")
    module, attribute = _SOURCES[name]
    found = import_module(module)
    value = found if attribute is None else getattr(found, attribute)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
