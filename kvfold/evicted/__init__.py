"""What becomes of evicted slots. Importing this package registers every way."""

from kvfold.evicted.base import Asked, Evicted, Pool, Refit, Split, Survivors
from kvfold.evicted.cam import Cam
from kvfold.evicted.d2o import D2o
from kvfold.evicted.drop import Drop
from kvfold.evicted.fit import Fit
from kvfold.evicted.merge import Merge
from kvfold.evicted.recall import Recall

__all__ = ["Asked", "Cam", "D2o", "Drop", "Evicted", "Fit", "Merge", "Pool", "Recall", "Refit", "Split", "Survivors"]
