"""What becomes of evicted slots. Importing this package registers every way."""

from kvfold.evicted.base import Asked, Evicted, Refit, Split, Survivors
from kvfold.evicted.drop import Drop
from kvfold.evicted.fit import Fit
from kvfold.evicted.merge import Merge

__all__ = ["Asked", "Drop", "Evicted", "Fit", "Merge", "Refit", "Split", "Survivors"]
