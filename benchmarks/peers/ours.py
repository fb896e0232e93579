"""Answer the same prompts with kvfold, at the same number of slots per head."""

from __future__ import annotations

import math
import platform
import statistics
import sys
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from benchmarks.peers.exchange import (
    FORMAT,
    WHOLE,
    Answer,
    AnswerFile,
    Header,
    Method,
    Mode,
    Origin,
    Prompt,
    num_kept,
    read_jobs,
)
from kvfold import __version__
from kvfold.bench.environment import commit, now
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model, load
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.stats import Stats, measure

SIDE = "kvfold"


def policy_text(method: Method, ratio: int, num_tokens: int) -> str:
    """With a size that leaves as many slots as the peer keeps.

    A size of kvfold's pays for the open block, which is empty after a prefill. So the target is that much larger: the
    smallest ratio of four digits whose ceil(N / ratio) is the wanted number.
    """
    if ratio == WHOLE:
        return method.ours
    target = num_kept(num_tokens, ratio) + PageConfig().open_len
    return f"{method.ours} + {math.ceil(10_000 * num_tokens / target) / 10_000:.4f}x"


@dataclass
class _Lane:
    method: Method
    ratio: int
    sequence: SequenceCache
    token_ids: list[int] = field(default_factory=list)


class Answerer:
    """One prefill serves all methods of a prompt, one batch decodes them all."""

    def __init__(self, model: Model, header: Header) -> None:
        self.header = header
        self.runner = Runner(model.hf, model.spec, model.arena)

    def run(self, prompt: Prompt, mode: Mode) -> list[Answer]:
        compressed, after = prompt.parts(mode)
        with ExitStack() as held:
            lanes = [self._open(*lane, len(compressed), held) for lane in self.header.lanes()]
            began = time.perf_counter()
            self.runner.prefill_many([lane.sequence for lane in lanes], compressed)
            prefill_s = time.perf_counter() - began
            stats = [measure(lane.sequence) for lane in lanes]
            seconds = self._write(lanes, after, prompt.max_new_tokens)
            return [
                _answer(prompt, mode, lane, found, prefill_s, seconds) for lane, found in zip(lanes, stats, strict=True)
            ]

    def _open(self, method: Method, ratio: int, num_tokens: int, held: ExitStack) -> _Lane:
        sequence = self.runner.new_sequence(Policy.parse(policy_text(method, ratio, num_tokens)))
        held.callback(sequence.release)
        return _Lane(method, ratio, sequence)

    def _write(self, lanes: list[_Lane], after: tuple[int, ...], most: int) -> list[float]:
        """Read the rest of the prompt, then decode greedily until every lane has ended; seconds of each step."""
        began, seconds, live = time.perf_counter(), list[float](), lanes
        if len(after) > 1:
            self.runner.prefill([lane.sequence for lane in lanes], [after[:-1]] * len(lanes), compress=False)
        for _ in range(most):
            tokens = [(lane.token_ids or after)[-1] for lane in live]
            logits_BV = self.runner.decode([lane.sequence for lane in live], tokens)
            for lane, token in zip(live, logits_BV.argmax(-1).tolist(), strict=True):
                lane.token_ids.append(token)
            seconds.append(time.perf_counter() - began)
            began = time.perf_counter()
            live = [lane for lane in live if lane.token_ids[-1] not in self.header.eos_token_ids]
            if not live:
                break
        return seconds


def _answer(prompt: Prompt, mode: Mode, lane: _Lane, stats: Stats, prefill_s: float, seconds: list[float]) -> Answer:
    steps = [1e3 * each for each in seconds[1 : len(lane.token_ids)]]
    return Answer(
        prompt.workload, prompt.task, prompt.index, mode, lane.method.name, lane.ratio, tuple(lane.token_ids),
        stats.resident_bytes, stats.bytes_per_step, stats.mean_slots, prefill_s, seconds[0],
        statistics.median(steps) if steps else None,
    )  # fmt: skip


def origin(model: Model) -> Origin:
    is_cuda = model.device.type == "cuda"
    device = torch.cuda.get_device_name(model.device) if is_cuda else f"{platform.machine()} CPU"
    versions = {
        "kvfold": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
    return Origin(FORMAT, SIDE, commit(), now(), device, versions)


def answer_all(work: Path, limit_s: float) -> bool:
    """Whether every prompt is answered; goes on from what the file holds."""
    began = time.monotonic()
    header, prompts = read_jobs(work)
    model = load(header.folder, dtype=header.dtype, device=header.device)
    file = AnswerFile(work / f"{SIDE}.jsonl", origin(model))
    answerer = Answerer(model, header)
    lanes = [(method.name, ratio) for method, ratio in header.lanes()]
    for number, prompt in enumerate(prompts, 1):
        for mode in header.modes:
            place = (prompt.workload, prompt.task, prompt.index, mode)
            if all((*place, *lane) in file.done for lane in lanes):
                continue
            if time.monotonic() - began > limit_s:
                return False
            file.append(answerer.run(prompt, mode))
        print(f"prompt {number}/{len(prompts)}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return True
