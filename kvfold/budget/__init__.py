"""Budgets: how many slots each head of each layer keeps. Importing this package registers every allocator."""

from kvfold.budget.ada import Ada
from kvfold.budget.adaptive import Adaptive
from kvfold.budget.base import Allocator
from kvfold.budget.bounds import Budget
from kvfold.budget.dynamickv import DynamicKV
from kvfold.budget.global_ import Global
from kvfold.budget.lava import Lava
from kvfold.budget.pages import Pages
from kvfold.budget.profile import Profile
from kvfold.budget.pyramid import Pyramid
from kvfold.budget.select import select_top
from kvfold.budget.uniform import Uniform
from kvfold.budget.xkv import Xkv

__all__ = [
    "Ada",
    "Adaptive",
    "Allocator",
    "Budget",
    "DynamicKV",
    "Global",
    "Lava",
    "Pages",
    "Profile",
    "Pyramid",
    "Uniform",
    "Xkv",
    "select_top",
]
