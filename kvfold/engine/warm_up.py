"""Warm-up of a runner on a CPU: compile the kernels that serving under a policy takes, before requests wait for them.

Numba compiles a kernel for the types of its first call, for some seconds, and keeps the result on disk. So two short
sequences run through what requests do: prefill, decode steps together and alone, and sealing.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from threading import Timer

import torch

from kvfold.compression.seal import seal_all
from kvfold.core import HAS_NUMBA
from kvfold.engine.runner import Runner
from kvfold.errors import KvfoldError, SizeError
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy

_PROMPT_LEN = 8
_NOTE, _NOTE_AFTER_S = "preparing CPU kernels; the first start compiles them, for up to a minute", 1.0
_log = logging.getLogger("kvfold.engine")


def warm_up(runner: Runner, policy: Policy) -> None:
    """Run the kernels, which takes a moment where they are on disk; the arena is as before. Raises nothing: kernels
    that were not reached, in an arena too small for two sequences, compile with the first request."""
    if not HAS_NUMBA or runner.arena.device.type != "cpu":
        return
    note = Timer(_NOTE_AFTER_S, _log.info, [_NOTE])
    note.daemon = True
    note.start()
    try:
        with warnings.catch_warnings(action="ignore"):
            _run(runner, policy)
    except KvfoldError as error:
        _log.debug("the warm-up ended early: %s", error)
    except Exception:
        _log.warning("the warm-up failed; kernels compile with the first requests", exc_info=True)
    finally:
        note.cancel()


@torch.inference_mode()
def _run(runner: Runner, policy: Policy) -> None:
    length = max(min(_PROMPT_LEN, runner.spec.max_positions // 4), 2)
    prompt = [i % runner.spec.vocab_size for i in range(length)]
    with ExitStack() as stack:
        both = []
        for _ in range(2):
            both.append(runner.new_sequence(policy))
            stack.callback(both[-1].release)
        _prefill(runner, both, prompt)
        for group in (both, both[:1]):
            runner.decode(group, prompt[: len(group)])
            seal_all(group)


def _prefill(runner: Runner, sequences: Sequence[SequenceCache], tokens: Sequence[int]) -> None:
    """Uncompressed where so few tokens are below the policy's size, as the scheduler does it."""
    try:
        runner.prefill(sequences, [tokens] * len(sequences))
    except SizeError:
        runner.prefill(sequences, [tokens] * len(sequences), compress=False)
