"""Attention over KV pages: PyTorch and SDPA on any device, Triton kernels for captured decode steps (kernels/).

Importing this package registers every reader (sparse attention: Quest, RocketKV).
"""

from kvfold.attend.quest import Quest
from kvfold.attend.rocket import Rocket

__all__ = ["Quest", "Rocket"]
