"""Scorers: which KV slots to keep. Importing this package registers every scorer."""

from kvfold.score.a2sf import A2SF
from kvfold.score.base import Needs, QueryStats, Replay, Scorer, View
from kvfold.score.chunk import Chunk
from kvfold.score.compactor import Compactor
from kvfold.score.critical import Critical
from kvfold.score.defensive import Defensive
from kvfold.score.epicache import EpiCache
from kvfold.score.expected import Expected
from kvfold.score.fastgen import FastGen
from kvfold.score.full import Full
from kvfold.score.h2o import H2O
from kvfold.score.keydiff import KeyDiff
from kvfold.score.knorm import KNorm
from kvfold.score.kvcompress import KVCompress
from kvfold.score.kvzip import KVzip
from kvfold.score.kvzip_plus import KVzipPlus
from kvfold.score.lagkv import LagKV
from kvfold.score.lava_score import LavaScore
from kvfold.score.learned import Learned
from kvfold.score.nacl import NACL
from kvfold.score.random import Random
from kvfold.score.recent import Recent
from kvfold.score.rkv import RKV
from kvfold.score.scissorhands import Scissorhands
from kvfold.score.sentence import Sentence
from kvfold.score.snapkv import SnapKV
from kvfold.score.streaming import Streaming
from kvfold.score.tova import TOVA
from kvfold.score.tree import Tree

__all__ = [
    "A2SF",
    "H2O",
    "NACL",
    "RKV",
    "TOVA",
    "Chunk",
    "Compactor",
    "Critical",
    "Defensive",
    "EpiCache",
    "Expected",
    "FastGen",
    "Full",
    "KNorm",
    "KVCompress",
    "KVzip",
    "KVzipPlus",
    "KeyDiff",
    "LagKV",
    "LavaScore",
    "Learned",
    "Needs",
    "QueryStats",
    "Random",
    "Recent",
    "Replay",
    "Scissorhands",
    "Scorer",
    "Sentence",
    "SnapKV",
    "Streaming",
    "Tree",
    "View",
]
