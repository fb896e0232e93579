"""What is worth keeping? Importing this registers every scorer."""

from kvfold.score.base import Needs, QueryStats, Scorer, View
from kvfold.score.full import Full
from kvfold.score.keydiff import KeyDiff
from kvfold.score.knorm import KNorm
from kvfold.score.recent import Recent
from kvfold.score.snapkv import SnapKV
from kvfold.score.streaming import Streaming

__all__ = ["Full", "KNorm", "KeyDiff", "Needs", "QueryStats", "Recent", "Scorer", "SnapKV", "Streaming", "View"]
