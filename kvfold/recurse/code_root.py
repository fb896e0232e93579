"""A root that writes code: the text is a variable of an interpreter, and the model writes Python that slices and asks.

    root     ```python … ```  ->  sandbox: context[…], llm_query_batched([…])  ->  Calls.ask_batch
             <- what was printed, or the traceback                              <- answers, as strings

The text is never part of a prompt unless the code puts a slice of it there. The answer is what the variable `answer`
holds once `answer["ready"]` is True; no mark in any text ends a run. The root's history is append-only (RLM,
arXiv:2512.24601). Budgets are counted here, outside of what the code can reach.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from kvfold.errors import InputError
from kvfold.recurse.code_prompt import NO_CODE, code_blocks, shown, task
from kvfold.recurse.sandbox import Sandbox, SandboxLimits
from kvfold.recurse.usage import Usage

_FIRST = 'answer = {"content": "", "ready": False}'
_EMPTY = 'answer["ready"] is True, but answer["content"] is empty; write the answer into it.'
_NO_TEXT = 'answer["ready"] is True, but answer["content"] is no text; write the answer into it as a string.'
_LARGEST = 1e100  # number that is an answer


class RootModel(Protocol):
    """The model that writes code."""

    def reply(self, text: str) -> str:
        """The reply to the next message. RootStopped if there is no room, or no budget, for it."""


class RootStopped(Exception):
    """The root cannot go on; its text names the bound: window, calls, tokens or seconds."""


AskBatch = Callable[[Sequence[str]], list[str]]


@dataclass(frozen=True)
class CodeTurn:
    """One reply of the root, what its code printed, and its error."""

    reply: str
    output: str
    error: str


@dataclass(frozen=True)
class CodeAnswer:
    """The result of a root that writes code.

    Attributes:
        text: What `answer["content"]` held at the end.
        turns: Every reply with what came of it.
        usage: Calls, tokens and seconds, the root's included.
        stopped_by: None if the code said that it is ready; else the bound that ended it: "turns", "errors", "window",
            "calls", "tokens", "seconds".
        seconds: Wall-clock time.
    """

    text: str
    turns: tuple[CodeTurn, ...]
    usage: Usage = field(default_factory=Usage)
    stopped_by: str | None = None
    seconds: float = 0.0

    @property
    def is_complete(self) -> bool:
        return self.stopped_by is None

    def as_json(self) -> dict[str, Any]:
        return {
            "answer": self.text,
            "is_complete": self.is_complete,
            "stopped_by": self.stopped_by,
            "seconds": self.seconds,
            "turns": [asdict(turn) for turn in self.turns],
            "usage": self.usage.as_json(),
        }


@dataclass
class CodeRoot:
    """The loop of a root and its sandbox. `ask` answers sub-prompts; its KvfoldErrors are errors of the code."""

    root: RootModel
    ask: AskBatch
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    max_turns: int = 20
    max_errors: int = 5  # in a row
    prompt_chars: int = 100_000
    max_calls: int | None = None  # told to the root; `ask` enforces it

    def __post_init__(self) -> None:
        if self.max_turns < 1 or self.max_errors < 1:
            raise InputError(f"max_turns is {self.max_turns} and max_errors {self.max_errors}; both are at least 1")

    def read(self, context: str, question: str, header: str = "") -> CodeAnswer:
        """Run turns until the answer is ready or a bound is reached."""
        functions = {"llm_query": self._query, "llm_query_batched": self._query_batched}
        turns: list[CodeTurn] = []
        stopped_by: str | None = None
        with Sandbox({"context": context}, functions, self.limits, _FIRST) as sandbox:
            message = task(
                question,
                header=header,
                num_chars=len(context),
                output_chars=self.limits.output_chars,
                prompt_chars=self.prompt_chars,
                max_calls=self.max_calls,
            )
            while True:
                stopped_by = self._stopped(turns)
                if stopped_by is not None:
                    break
                try:
                    reply = self.root.reply(message)
                except RootStopped as stop:
                    stopped_by = str(stop)
                    break
                turns.append(self._turn(sandbox, reply))
                text, is_ready = self._answer(sandbox)
                if is_ready and text:
                    break
                ending = _NO_TEXT if text is None else _EMPTY
                message = ending if is_ready else shown(turns[-1].output, turns[-1].error)
            return CodeAnswer(self._answer(sandbox)[0] or "", tuple(turns), stopped_by=stopped_by)

    def _stopped(self, turns: Sequence[CodeTurn]) -> str | None:
        last = turns[-self.max_errors :]
        if len(last) == self.max_errors and all(turn.error for turn in last):
            return "errors"
        return "turns" if len(turns) >= self.max_turns else None

    def _turn(self, sandbox: Sandbox, reply: str) -> CodeTurn:
        """Run the code of a reply, block by block, up to the first error."""
        blocks = code_blocks(reply)
        if not blocks:
            return CodeTurn(reply, "", NO_CODE)
        output = ""
        for block in blocks:
            ran = sandbox.run(block)
            output = (output + ran.output)[: self.limits.output_chars]
            if ran.error:
                return CodeTurn(reply, output, ran.error)
        return CodeTurn(reply, output, "")

    def _answer(self, sandbox: Sandbox) -> tuple[str | None, bool]:
        """The content so far, None if it is neither text nor a number, and whether the code says that it is ready."""
        found = sandbox.value("answer")
        if not isinstance(found, dict):
            return "", False
        content = found.get("content", "")
        is_ready = found.get("ready") is True
        if isinstance(content, int | float) and not isinstance(content, bool):
            return (str(content) if abs(content) <= _LARGEST else None), is_ready
        if not isinstance(content, str) or sandbox.value('answer["content"][:0] + ""') is None:
            return None, is_ready  # functions of the sandbox come as strings
        return content[: self.limits.output_chars].strip(), is_ready

    def _query(self, *args: Any, **kwargs: Any) -> str:
        if len(args) != 1 or kwargs or not isinstance(args[0], str):
            raise InputError("llm_query takes one string")
        return self._query_batched([args[0]])[0]

    def _query_batched(self, *args: Any, **kwargs: Any) -> list[str]:
        prompts = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(prompts, list | tuple) or not all(isinstance(prompt, str) for prompt in prompts):
            raise InputError("llm_query_batched takes one list of strings")
        for prompt in prompts:
            if not prompt.strip() or len(prompt) > self.prompt_chars:
                most = f"give 1 to {self.prompt_chars:,}, such as a slice of context"
                raise InputError(f"a prompt has {len(prompt):,} characters; {most}")
        return self.ask(list(prompts)) if prompts else []
