"""Contract checks for terms of your own: what the rest of kvfold relies on, run over one instance.

    from kvfold.testing import check_scorer

    def test_the_contract() -> None:
        check_scorer(MyScorer(power=2.0))

A broken rule is an AssertionError whose text is the rule. kvfold's own terms are checked by the same functions.
`make_view` draws a view to score, with the parts that a scorer's `needs` ask for.
"""

from kvfold.testing.allocator import check_allocator
from kvfold.testing.codec import check_codec
from kvfold.testing.scorer import check_scorer
from kvfold.testing.views import make_view

__all__ = ["check_allocator", "check_codec", "check_scorer", "make_view"]
