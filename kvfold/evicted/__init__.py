"""What becomes of evicted slots. Importing this package registers every way."""

from kvfold.evicted.base import Evicted, Split
from kvfold.evicted.drop import Drop
from kvfold.evicted.merge import Merge

__all__ = ["Drop", "Evicted", "Merge", "Split"]
