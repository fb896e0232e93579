"""What is worth keeping? Importing this registers every scorer."""

from kvfold.score.base import Needs, QueryStats, Replay, Scorer, View
from kvfold.score.chunk import Chunk
from kvfold.score.expected import Expected
from kvfold.score.full import Full
from kvfold.score.h2o import H2O
from kvfold.score.keydiff import KeyDiff
from kvfold.score.knorm import KNorm
from kvfold.score.kvzip import KVzip
from kvfold.score.kvzip_plus import KVzipPlus
from kvfold.score.random import Random
from kvfold.score.recent import Recent
from kvfold.score.snapkv import SnapKV
from kvfold.score.streaming import Streaming
from kvfold.score.tova import TOVA

__all__ = [
    "H2O",
    "TOVA",
    "Chunk",
    "Expected",
    "Full",
    "KNorm",
    "KVzip",
    "KVzipPlus",
    "KeyDiff",
    "Needs",
    "QueryStats",
    "Random",
    "Recent",
    "Replay",
    "Scorer",
    "SnapKV",
    "Streaming",
    "View",
]
