"""Texts for tests of shortening: layouts, scripts and line ends that real files have, and a strategy of mixtures."""

from __future__ import annotations

from functools import cache
from random import Random

from hypothesis import strategies as st

from kvfold.bench.haystack import prose

PROSE = (
    "The harbour froze in January. Ships waited outside for nine days. Nobody had planned for ice.\n\n"
    "Mayor Ines Okafor asked the coast guard for an icebreaker. It came on 4 February, from Oslo. The first ship to "
    "leave was the Vega, with grain for Tunis.\n\n"
    "In spring the town bought its own icebreaker. It cost 3.2 million dollars. It has not been used since.\n"
)
MARKDOWN = (
    "# Install\n\nRun this first:\n\n```sh\npip install thing  # never as root\n\nthing --check\n```\n\n"
    "## Options\n\n- `--fast` skips checks\n- `--slow` does not\n  and says so\n\n"
    "| name | size |\n|---|---|\n| a | 1 |\n| b | 2 |\n\n"
    "Usage\n-----\nSee https://example.org/docs for more. Ask id X-42b7 if it fails.\n"
)
CHINESE = "港口在一月结冰。船只等了九天！没有人料到会结冰？市长请求破冰船。"
EMOJI = "Ship 🚢 left. Ice 🧊🧊 stayed! Zalgo e\u0301\u0327 too. \u202eright to left\u202c. שלום עולם. مرحبا بالعالم.\n"
LOG = "".join(f"2024-05-{day:02} 12:00:00 INFO worker {day} finished in {day * 7} ms\n" for day in range(1, 29))
LONG_WORD = "a" * 5000 + " " + "b c " * 1200
EMPTY = ("", " ", "\n", "\r\n\r\n", "\t \n")
TEXTS = (PROSE, PROSE.replace("\n", "\r\n"), MARKDOWN, CHINESE, EMOJI, LOG, LONG_WORD, "One.", "No end", *EMPTY)

_pieces = st.one_of(
    st.sampled_from(PROSE.split(" ")),
    st.sampled_from(["\n", "\n\n", "\r\n", "\r\n\r\n", " ", ". ", "! ", "\t", "\x00"]),
    st.sampled_from(["```\n", "# A\n", "- b\n", "| a | b |\n"]),
    st.sampled_from(["never", "not", "42 km", "X-42b7", "https://a.b/c", '"so it is"', "港口。", "🚢", "e\u0301"]),
    st.text(max_size=8),
)


def texts(max_pieces: int = 60) -> st.SearchStrategy[str]:
    """Texts of words, marks, layout and any characters."""
    mixed = st.lists(_pieces, max_size=max_pieces).map(" ".join)
    return st.one_of(mixed, st.lists(_pieces, max_size=max_pieces).map("".join), st.sampled_from(TEXTS))


@cache
def long_text(num_chars: int) -> str:
    """Generated prose, five sentences to a paragraph."""
    sentences, found, length = prose(Random(0)), list[str](), 0
    while length < num_chars:
        found.append(next(sentences) + (" " if len(found) % 5 else "\n\n"))
        length += len(found[-1])
    return "".join(found)
