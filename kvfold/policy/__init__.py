"""The policy language: one expression for Python, CLI, HTTP and YAML."""

from kvfold.policy.policy import Policy
from kvfold.policy.size import Floor, Size, SizeFacts, check_floor

__all__ = ["Floor", "Policy", "Size", "SizeFacts", "check_floor"]
