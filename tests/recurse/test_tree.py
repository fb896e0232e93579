"""A tree shows what each call found, and the replies that were dropped, so that a reader can judge them."""

from __future__ import annotations

from kvfold.recurse.tree import Node, Quote
from kvfold.recurse.tree_html import _node

QUOTE = Quote("Bertil's number is 8239.", 52, 76)
TREE = Node(
    2, 0, 91, "answer", answer="8239",
    children=(
        Node(1, 0, 20, "nothing"),
        Node(1, 20, 40, "nothing"),
        Node(1, 40, 50, "dropped", reply="It is <b>17</b>,\n said Bo."),
        Node(1, 50, 91, "answer", reply="8239", answer="8239", quote=QUOTE),
    ),
)  # fmt: skip


def test_lines_show_quotes_and_dropped_replies_and_join_what_says_nothing() -> None:
    assert str(TREE).splitlines() == [
        "level 2, 0-91: 8239",
        "├─ 0-40: nothing here (2 parts)",
        '├─ 40-50: reply is not in the text: "It is <b>17</b>, said Bo."',
        '└─ 50-91: 8239  "Bertil\'s number is 8239." 52-76',
    ]


def test_a_page_and_json_have_dropped_replies_as_text() -> None:
    assert "<q>It is &lt;b&gt;17&lt;/b&gt;,\n said Bo.</q>" in _node(TREE)
    assert TREE.as_json()["children"][2]["reply"] == "It is <b>17</b>,\n said Bo."
