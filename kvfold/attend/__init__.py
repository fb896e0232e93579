"""Attention over stored pages and new tokens: prefill passes and decode steps, in plain PyTorch.

Importing this registers every reader that chooses what a step reads.
"""

from kvfold.attend.quest import Quest
from kvfold.attend.rocket import Rocket

__all__ = ["Quest", "Rocket"]
