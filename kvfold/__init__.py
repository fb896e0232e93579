"""kvfold: compress, reuse and shorten the context of language models.

    import kvfold

    model = kvfold.load("smollm2-135m")
    session = kvfold.Session(model, policy="snapkv + ada + 8x + int4")
    session.extend(long_text)
    print(session.ask("…").text)
"""

from kvfold import budget, codec, evicted, score
from kvfold.errors import KvfoldError
from kvfold.models.attach import attach
from kvfold.models.cache import Cache
from kvfold.models.loader import Model, load, wrap
from kvfold.policy import Policy
from kvfold.session import Reply, Session
from kvfold.session import generate_batch as generate
from kvfold.stats import Stats

__version__ = "0.1.0"
__all__ = [
    "Cache",
    "KvfoldError",
    "Model",
    "Policy",
    "Reply",
    "Session",
    "Stats",
    "attach",
    "budget",
    "codec",
    "evicted",
    "generate",
    "load",
    "score",
    "wrap",
]
