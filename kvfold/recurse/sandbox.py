"""Code of a model, run by the interpreter of `pydantic-monty`: a worker process without files, network or CPython.

    with Sandbox({"context": text}, {"llm_query": ask}) as sandbox:
        ran = sandbox.run("print(len(context))")
        sandbox.value("answer")

Variables stay from run to run. Time, memory, recursion and output have limits; what the code calls on the host are the
functions given, nothing else. A run that was stopped by a limit leaves the interpreter in an unknown state, so the next
one starts in a new one: variables are lost, the inputs are there again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Self

from kvfold.errors import InputError, KvfoldError, MissingExtra

try:
    import pydantic_monty
except ImportError:
    pydantic_monty = None  # type: ignore[assignment]

_MAX_SUSPENSIONS = 100_000  # calls and look-ups of host names; the host counts calls itself
_PRINT_STOP = 50  # times the output limit: a run that prints more is stopped
_NOT_INSTALLED = 'running code needs pydantic-monty; run: pip install "kvfold[code]"'
_LOST = "\nThe interpreter was restarted: your variables are gone, context is as before."


def require_monty() -> None:
    """MissingExtra if the interpreter is not installed."""
    if pydantic_monty is None:
        raise MissingExtra(_NOT_INSTALLED)


@dataclass(frozen=True)
class SandboxLimits:
    """Limits of one run. `memory_bytes` is of the interpreter's heap, beside four times the inputs."""

    seconds: float = 10.0
    memory_bytes: int = 256_000_000
    recursion: int = 200
    output_chars: int = 20_000

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if not value > 0:
                raise InputError(f"the sandbox's limit {name} is {value}; it is above 0")


@dataclass(frozen=True)
class Ran:
    """What a run printed, up to the limit, and the traceback of its error; empty if there was none."""

    output: str
    error: str = ""


@dataclass
class _Output:
    """Collects what is printed; the rest is counted."""

    limit: int
    text: str = ""
    num_chars: int = 0

    def add(self, _stream: str, text: str) -> None:
        self.text += text[: max(0, self.limit - self.num_chars)]
        self.num_chars += len(text)
        if self.num_chars > _PRINT_STOP * self.limit:
            raise RuntimeError(f"more than {_PRINT_STOP * self.limit:,} characters were printed")

    def __str__(self) -> str:
        cut = f"\n… cut: {self.num_chars:,} characters were printed" if self.num_chars > self.limit else ""
        return self.text + cut


@dataclass
class Sandbox:
    """An interpreter with `inputs` as variables and `functions` to call; close it, or use it in a `with` statement.

    A KvfoldError of a function is an error of the code, which may go on; any other exception ends the run and is raised
    by `run`, Ctrl-C too.
    """

    inputs: Mapping[str, Any]
    functions: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    limits: SandboxLimits = field(default_factory=SandboxLimits)
    first: str = "pass"  # code that runs in every new interpreter
    _pool: ExitStack = field(init=False, default_factory=ExitStack)
    _opened: ExitStack = field(init=False, default_factory=ExitStack)
    _raised: BaseException | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        require_monty()
        self._monty = self._pool.enter_context(pydantic_monty.Monty(min_processes=1, max_processes=1))
        try:
            self._restart()
        except BaseException:
            self.close()
            raise

    def _restart(self) -> None:
        self._opened.close()
        num_input_bytes = sum(len(value.encode()) for value in self.inputs.values() if isinstance(value, str))
        session = self._monty.checkout(
            limits={
                "max_feed_duration_secs": self.limits.seconds,
                "max_memory": self.limits.memory_bytes + 4 * num_input_bytes,
                "max_recursion_depth": self.limits.recursion,
                "max_suspensions": _MAX_SUSPENSIONS,
            },
            os_policy={"sleep": "zero"},
        )
        self._session = self._opened.enter_context(session)
        self._session.feed_run(self.first, inputs=dict(self.inputs))

    def run(self, code: str) -> Ran:
        """Run a piece of code; its errors are told, not raised."""
        output, error = _Output(self.limits.output_chars), ""
        functions = {name: self._guarded(function) for name, function in self.functions.items()}
        try:
            self._session.feed_run(code, external_lookup=functions, print_callback=output.add)
        except pydantic_monty.MontyError as raised:
            error = self._told(raised)
        if self._raised is not None:
            raise self._raised
        return Ran(str(output), error)

    def _told(self, raised: Any) -> str:
        """The traceback; an interpreter that a limit stopped is replaced."""
        crashed = isinstance(raised, pydantic_monty.MontyCrashedError)
        shown = str(raised) if crashed or not hasattr(raised, "display") else raised.display()
        shown = _cut(shown, self.limits.output_chars)
        if crashed or isinstance(raised.exception(), TimeoutError | MemoryError):
            self._restart()
            shown += _LOST
        return shown

    def _guarded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._raised is not None:
                raise RuntimeError("the run is over")
            try:
                return function(*args, **kwargs)
            except KvfoldError as error:
                raise RuntimeError(str(error)) from None
            except BaseException as error:
                self._raised = error
                raise

        return call

    def value(self, expression: str) -> Any:
        """The value of a variable, or of another small expression, as plain Python data; None if it raises."""
        try:
            return self._session.feed_run(expression)
        except pydantic_monty.MontyError:
            return None

    def close(self) -> None:
        """End the worker. Closing twice is fine."""
        self._opened.close()
        self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[:limit]}\n… cut: {len(text):,} characters"
