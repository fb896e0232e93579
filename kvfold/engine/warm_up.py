"""Warm-up of a runner: what is built by the first call of its kind is built before requests wait for it.

On a CPU numba compiles a kernel for the types of its first call, for some seconds, and keeps the result on disk; on a
GPU Triton does, and a decode step of a new number of batch slots is captured as a CUDA graph. So short sequences run
through what requests do: prefill, decode steps together and alone, sealing, and a prompt behind a stored one.
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
_LONG_LENS = {"cpu": 300, "cuda": _PROMPT_LEN}  # more rows than a CPU's kernels of few rows take (models/cpu_linear.py)
_SEALED = 2  # sequences whose open blocks are sealed together, and then alone
_NOTES = {
    "cpu": "preparing CPU kernels: seconds, or a minute or two where they are compiled, as at the first start",
    "cuda": "preparing kernels and capturing CUDA graphs of decode steps",
}
_NOTE_AFTER_S = 1.0
_log = logging.getLogger("kvfold.engine")


def warm_up(runner: Runner, policy: Policy, max_running: int) -> None:
    """Run the kernels, which takes a moment where they are on disk, and on a GPU a step of each number of batch slots
    that so many requests can take; the arena is as before. Raises nothing: what was not reached, in an arena too small
    for the sequences, is built with the first request."""
    if not _builds(runner):
        return
    note = Timer(_NOTE_AFTER_S, _log.info, [_NOTES[runner.arena.device.type]])
    note.daemon = True
    note.start()
    try:
        with warnings.catch_warnings(action="ignore"):
            _run(runner, policy, max_running)
    except KvfoldError as error:
        _log.debug("the warm-up ended early: %s", error)
    except Exception:
        _log.warning("the warm-up failed; kernels compile with the first requests", exc_info=True)
    finally:
        note.cancel()


def _builds(runner: Runner) -> bool:
    """Whether anything is built by first calls."""
    return HAS_NUMBA if runner.arena.device.type == "cpu" else runner.graphs is not None


def _batches(runner: Runner, max_running: int) -> list[int]:
    """Numbers of sequences of decode steps, the largest first: all that are captured apart, or some and one."""
    if runner.graphs is None:
        return [2, 1]
    most = (max_running - 1).bit_length()
    return [min(1 << power, max_running) for power in range(most, -1, -1)]


@torch.inference_mode()
def _run(runner: Runner, policy: Policy, max_running: int) -> None:
    device = runner.arena.device.type
    lens = [max(min(length, runner.spec.max_positions // 2), 2) for length in (_PROMPT_LEN, _LONG_LENS[device])]
    prompt, long = ([i % runner.spec.vocab_size for i in range(length)] for length in lens)
    batches = _batches(runner, max_running)
    with ExitStack() as stack:
        sequences = []
        for _ in range(batches[0]):
            sequences.append(runner.new_sequence(policy))
            stack.callback(sequences[-1].release)
        _prefill(runner, sequences, prompt)
        for count in batches:
            runner.decode(sequences[:count], [prompt[0]] * count)
            if count <= _SEALED:
                seal_all(sequences[:count])
        for tokens in (prompt, long):
            _prefill(runner, sequences[:1], tokens)  # behind stored slots


def _prefill(runner: Runner, sequences: Sequence[SequenceCache], tokens: Sequence[int]) -> None:
    """Uncompressed where so few tokens are below the policy's size, as the scheduler does it."""
    try:
        runner.prefill(sequences, [tokens] * len(sequences))
    except SizeError:
        runner.prefill(sequences, [tokens] * len(sequences), compress=False)
