"""A pipeline of modules that hand over a KV cache instead of text: each goes on in a fork of the session before it.

    def read(session): session.extend(text); return session.ask("What matters?").text
    def write(session): session.extend("Write it down."); return session.generate().text

    with Pipeline([read, write]).run(Session(model, "kvzip + global + 8x + int4")) as result:
        print(result.output)

    cache   | read: text, compressed |                               fork: shared pages
                                     | check: its own tokens |       fork
                                                             | write |

What a module has read is never read again by those behind it, and nothing is cut. `hand_over="text"` is the usual way,
to compare with: the next module reads the last `max_tokens` tokens of the conversation as text.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, Self

from kvfold.errors import InputError
from kvfold.session import Session

Module = Callable[[Session], str]


@dataclass(frozen=True)
class ModuleRun:
    """What one module did.

    Attributes:
        name: The name of its function.
        output: What it returned.
        tokens_handed: Tokens that it got in the KV cache and did not read.
        tokens_new: Tokens that it added: read, text that was handed over included, and generated.
        resident_bytes: Of its KV cache at its end.
        full_bytes: What an ordinary bf16 cache of its tokens would hold.
        seconds: Wall-clock time.
    """

    name: str
    output: str
    tokens_handed: int
    tokens_new: int
    resident_bytes: int
    full_bytes: int
    seconds: float


@dataclass
class PipelineResult:
    """All runs, and the session of the last module, to go on with; close it, or use it in a `with` statement."""

    runs: list[ModuleRun]
    session: Session = field(repr=False)

    @property
    def output(self) -> str:
        """What the last module returned."""
        return self.runs[-1].output

    @property
    def tokens_new(self) -> int:
        """Tokens that all modules read and generated."""
        return sum(run.tokens_new for run in self.runs)

    def as_json(self) -> dict[str, Any]:
        return {"output": self.output, "tokens_new": self.tokens_new, "modules": [asdict(run) for run in self.runs]}

    def close(self) -> None:
        self.session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Pipeline:
    """Modules in their order; each is a function of a session, which it extends and asks, and returns its output."""

    def __init__(
        self,
        modules: Sequence[Module],
        *,
        hand_over: Literal["cache", "text"] = "cache",
        max_tokens: int = 8192,
    ) -> None:
        if not modules:
            raise InputError("a pipeline has at least one module; give functions of a session")
        if hand_over not in ("cache", "text"):
            raise InputError(f'hand_over is "{hand_over}"; give "cache" or "text"')
        if max_tokens < 1:
            raise InputError(f"max_tokens is {max_tokens}; it is at least 1")
        self.modules = list(modules)
        self._hands_text, self._max_tokens = hand_over == "text", max_tokens

    def run(self, session: Session) -> PipelineResult:
        """Run all modules. The session stays as it is; what modules hold is freed if one raises."""
        runs: list[ModuleRun] = []
        last = session
        try:
            for module in self.modules:
                current = self._handed(last) if runs else last.fork()
                if runs:
                    last.close()
                last = current
                runs.append(self._run(module, current, is_first=not runs))
        except BaseException:
            if last is not session:
                last.close()
            raise
        return PipelineResult(runs, last)

    def _handed(self, before: Session) -> Session:
        """The session that the next module gets."""
        if not self._hands_text:
            return before.fork()
        ids = before.token_ids[-self._max_tokens :]
        text = str(before.model.tokenizer.decode(ids, skip_special_tokens=True))
        template: Literal["auto"] | None = "auto" if before.template is not None else None
        session = Session(before.model, before.policy, template=template)
        try:
            return session.extend(text)
        except BaseException:
            session.close()
            raise

    def _run(self, module: Module, session: Session, *, is_first: bool) -> ModuleRun:
        began = time.perf_counter()
        reads_again = self._hands_text and not is_first
        handed = 0 if reads_again else len(session.token_ids)
        output = module(session)
        name = getattr(module, "__name__", type(module).__name__)
        if session.is_closed:
            raise InputError(f"module {name} closed its session; leave it open: the pipeline closes it")
        if not isinstance(output, str):
            raise InputError(f"module {name} returned {type(output).__name__}; return its output as a string")
        stats = session.stats()
        return ModuleRun(
            name=name,
            output=output,
            tokens_handed=handed,
            tokens_new=len(session.token_ids) - handed,
            resident_bytes=stats.resident_bytes,
            full_bytes=stats.full_bytes,
            seconds=time.perf_counter() - began,
        )
