"""What happens to evicted slots: drop, merge, fit, offload. Importing this package registers every term."""

from kvfold.evicted.base import CalibrationTargets, Drop, Evicted, KeptSlots, Refit, Split
from kvfold.evicted.fit import Fit
from kvfold.evicted.merge import D2o, Merge
from kvfold.evicted.recall import Recall

__all__ = ["CalibrationTargets", "D2o", "Drop", "Evicted", "Fit", "KeptSlots", "Merge", "Recall", "Refit", "Split"]
