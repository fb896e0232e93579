"""Scorers: which KV slots to keep. Importing this package registers every scorer."""

from kvfold.score.base import Needs, QueryStats, Replay, Scorer, View
from kvfold.score.baselines import Full, Random, Recent, Streaming
from kvfold.score.chunk import Chunk, Sentence
from kvfold.score.compactor import Compactor
from kvfold.score.critical import Critical, Defensive
from kvfold.score.expected import Expected
from kvfold.score.fastgen import FastGen
from kvfold.score.h2o import A2SF, H2O, Scissorhands
from kvfold.score.keys import KeyDiff, KNorm, LagKV
from kvfold.score.kvzip import KVzip, KVzipPlus
from kvfold.score.learned import Learned
from kvfold.score.nacl import NACL
from kvfold.score.rkv import RKV
from kvfold.score.snapkv import TOVA, EpiCache, KVCompress, LavaScore, SnapKV
from kvfold.score.tree import Tree

__all__ = [
    "A2SF", "H2O", "NACL", "RKV", "TOVA", "Chunk", "Compactor", "Critical", "Defensive", "EpiCache", "Expected",
    "FastGen", "Full", "KNorm", "KVCompress", "KVzip", "KVzipPlus", "KeyDiff", "LagKV", "LavaScore", "Learned",
    "Needs", "QueryStats", "Random", "Recent", "Replay", "Scissorhands", "Scorer", "Sentence", "SnapKV", "Streaming",
    "Tree", "View",
]  # fmt: skip
