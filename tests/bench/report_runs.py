"""Runs for tests of the report: the example of the repository, and folders made of chosen rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

from kvfold.bench.record import PROMPTS, ROWS, Mode, Row, append_lines, read_run, write_run

EXAMPLE = Path(__file__).parent / "data" / "example_run"


def row(policy: str, memory: str, score: float | None, index: int = 0, **changes: object) -> Row:
    """A row of passkey in which a policy holds its share of a million bytes."""
    share = float(memory.removesuffix("%")) / 100
    made = Row("passkey", "passkey", 1000, index, "known", policy, memory, f"{policy} at {memory}", score=score)
    made = replace(made, resident_bytes=round(share * 1_000_000), full_bytes=1_000_000)
    return replace(made, **changes)  # type: ignore[arg-type]


def rows(
    policy: str, memory: str, scores: Sequence[float | None], workload: str = "passkey", mode: Mode = "known"
) -> list[Row]:
    return [row(policy, memory, score, i, workload=workload, mode=mode) for i, score in enumerate(scores)]


def write(folder: Path, listed: Iterable[Row], **changes: object) -> Path:
    """A run folder as the benchmark writes it, with the prompts of the example."""
    example = read_run(EXAMPLE)
    write_run(folder, replace(example.run, **changes))  # type: ignore[arg-type]
    append_lines(folder / ROWS, listed)
    append_lines(folder / PROMPTS, example.prompts)
    return folder


class Elements(HTMLParser):
    """What a browser would see: opened elements with attributes, and text outside of scripts. Refuses bad nesting."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, Mapping[str, str | None]]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(page)
        self.close()
        assert not self._open, f"{self._open} is not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self._open[-1:] not in (["script"], ["style"]):
            self.text += data

    def values(self, tag: str, attribute: str) -> list[str]:
        return [value for name, found in self.tags if name == tag and (value := found.get(attribute))]
