"""How much, and where? Allocators, and the one place that chooses slots. Importing this registers every budget."""

from kvfold.budget.ada import Ada
from kvfold.budget.base import Allocator, Budget
from kvfold.budget.choose import choose
from kvfold.budget.global_ import Global
from kvfold.budget.pages import Pages
from kvfold.budget.pyramid import Pyramid
from kvfold.budget.uniform import Uniform

__all__ = ["Ada", "Allocator", "Budget", "Global", "Pages", "Pyramid", "Uniform", "choose"]
