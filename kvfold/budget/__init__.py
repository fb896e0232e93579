"""Budgets: how many slots each head of each layer keeps. Importing this package registers every allocator."""

from kvfold.budget.ada import Ada, Global, Pages
from kvfold.budget.adaptive import Adaptive
from kvfold.budget.base import Allocator, Budget
from kvfold.budget.lava import Lava
from kvfold.budget.layer_budgets import DynamicKV, Xkv
from kvfold.budget.profile import Profile
from kvfold.budget.select import select_top
from kvfold.budget.uniform import Pyramid, Uniform

__all__ = [
    "Ada", "Adaptive", "Allocator", "Budget", "DynamicKV", "Global", "Lava", "Pages", "Profile", "Pyramid", "Uniform",
    "Xkv", "select_top",
]  # fmt: skip
