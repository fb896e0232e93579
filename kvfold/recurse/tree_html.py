"""The tree of a reading as one page: folded levels, answers with their quotes, and the budget it ended by."""

from __future__ import annotations

from html import escape

from kvfold.plurals import counted
from kvfold.recurse.result import ReadResult
from kvfold.recurse.tree import CUT, Node, Quote

_STYLE = """
body { max-width: 60em; margin: 2em auto; padding: 0 1em; font: 16px/1.5 system-ui, sans-serif }
details { margin-left: 1.2em } summary, .leaf { margin: .2em 0 } .leaf { margin-left: 1.2em }
.nothing, .unread { color: #888 } .dropped { color: #a50 } q { font-style: italic } small { color: #888 }
@media (prefers-color-scheme: dark) { body { background: #111; color: #eee } .dropped { color: #fa5 } }
"""
_SAID = {"nothing": "nothing here", "unread": "not read", "dropped": "the reply is not in the text"}


def tree_page(result: ReadResult, question: str) -> str:
    """A whole HTML page without anything from elsewhere."""
    answer = escape(result.text) or "nothing found"
    stopped = f"<p>Not complete: stopped by {escape(str(result.stopped_by))}.</p>" if not result.is_complete else ""
    quotes = "".join(
        f"<li><q>{escape(quote.text)}</q> <small>{escape(quote.place)}</small></li>" for quote in result.quotes
    )
    usage = result.usage
    read = f"{counted(usage.calls, 'call')}, {counted(usage.tokens_read, 'token')} read"
    cost = f"{read}, {usage.tokens_generated:,} written"
    head = f'<meta charset="utf-8"><title>{escape(question)}</title><style>{_STYLE}</style>'
    body = (
        f"<h1>{escape(question)}</h1><p><b>{answer}</b></p>{stopped}<ul>{quotes}</ul><p>{cost}</p>{_node(result.tree)}"
    )
    return f'<!doctype html><html lang="en">{head}<body>{body}</body></html>\n'


def _node(node: Node) -> str:
    said = escape(node.answer if node.state == "answer" else _SAID[node.state]) + (CUT if node.is_cut else "")
    quote = f"<q>{escape(node.reply)}</q>" if node.state == "dropped" else ""
    if node.quote is not None:
        quote = _quoted(node.quote)
    line = f'<span class="{node.state}">{said}</span> {quote} <small>{node.start}-{node.end}</small>'
    if not node.children:
        return f'<div class="leaf">{line}</div>'
    below = "".join(map(_node, node.children))
    return f"<details open><summary>level {node.level}: {line}</summary>{below}</details>"


def _quoted(quote: Quote) -> str:
    return f"<q>{escape(quote.text)}</q> <small>{escape(quote.place)}</small>"
