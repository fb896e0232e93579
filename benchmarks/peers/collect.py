"""Answers of both sides as runs of the benchmark: RUNS/kvfold and RUNS/peer, which `kvfold report` reads.

The memory of a row is the share of slots that stay. Its bytes are what the side's cache really holds, beside those of
the ordinary bf16 cache, also where both sides hold their caches in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from benchmarks.peers.exchange import WHOLE, Answer, Header, Method, Origin, Prompt, read_answers, read_jobs
from benchmarks.peers.ours import SIDE, policy_text
from benchmarks.peers.prompts import Samples
from kvfold.bench.haystack import OWN_PROSE
from kvfold.bench.prompts import prompt_row
from kvfold.bench.record import PROMPTS, ROWS, Row, Run, write_compressed, write_run
from kvfold.bench.workloads import Sample, Workload
from kvfold.errors import InputError
from kvfold.models.loader import Model, load

PEER = "peer"
SIDES = (SIDE, PEER)
Place = tuple[str, str, int]  # workload, task, index
Asked = Mapping[Place, tuple[Workload, Sample, Prompt]]


def memory_text(ratio: int) -> str:
    """4 -> "25%"."""
    return f"{100 / ratio:g}%"


def collect(work: Path, out: Path) -> int:
    """Write a run for each side that has answered."""
    header, prompts = read_jobs(work)
    model = load(header.folder, dtype=header.dtype, device="cpu")
    samples = Samples(header)
    asked = {
        (prompt.workload, prompt.task, prompt.index): (*sample, prompt)
        for sample, prompt in zip(samples, prompts, strict=True)
    }
    sides = {side: sorted([*work.glob(f"{side}.jsonl"), *work.glob(f"{side}.*of*.jsonl")]) for side in SIDES}
    if any(method.ours for method in header.methods) and not sides[SIDE]:
        raise InputError(f"{work / SIDE}.jsonl does not exist; let that side answer first")
    if not sides[PEER]:
        raise InputError(f"{work / PEER}.jsonl does not exist; let that side answer first")
    for side, paths in sides.items():
        if not paths:
            continue
        found = [read_answers(path) for path in paths]
        origin, answers = found[0][0], [answer for _, each in found for answer in each]
        _write(out / side, describe(header, origin, model), header, samples, asked, model, answers)
        print(f"{len(answers)} rows in {out / side}")
    return 0


def describe(header: Header, origin: Origin, model: Model) -> Run:
    ours = origin.side == SIDE
    command = "python -m benchmarks.peers answer" if ours else "ENV/bin/python benchmarks/peers/answer.py"
    return Run(
        command=f"{header.command}; {command} WORK",
        commit=origin.commit,
        versions=origin.versions,
        device=origin.device,
        started=origin.started,
        model=header.model,
        weights=model.weights_digest,
        dtype=f"{header.dtype}/{header.dtype}",
        suite="peers",
        seed=header.seed,
        samples=header.samples,
        lengths=(header.length,),
        workloads=header.tasks,
        modes=header.modes,
        policies=tuple(method.ours if ours else method.name for method in header.methods),
        memories=tuple(memory_text(ratio) for ratio in dict.fromkeys((WHOLE, *header.ratios))),
        haystack=OWN_PROSE,
    )


def _write(
    folder: Path, run: Run, header: Header, samples: Samples, asked: Asked, model: Model, answers: list[Answer]
) -> None:
    if folder.exists():
        raise InputError(f"{folder} exists; rows are never written over: name another folder with --out")
    write_run(folder, run)
    write_compressed(
        folder / PROMPTS, (prompt_row(found.name, header.length, sample) for found, sample, _ in asked.values())
    )
    write_compressed(folder / ROWS, _rows(folder.name, header, samples, asked, model, answers))


def _rows(
    side: str, header: Header, samples: Samples, asked: Asked, model: Model, answers: list[Answer]
) -> Iterator[Row]:
    methods = {method.name: method for method in header.methods}
    for answer in answers:
        workload, sample, prompt = asked[answer.workload, answer.task, answer.index]
        num_tokens = len(prompt.parts(answer.mode)[0])
        text = samples.text(answer.token_ids)
        yield Row(
            answer.workload,
            answer.task,
            header.length,
            answer.index,
            answer.mode,
            *_names(side, methods[answer.method], answer.ratio, num_tokens),
            prompt_tokens=len(prompt.context_ids) + len(prompt.question_ids),
            new_tokens=len(answer.token_ids),
            resident_bytes=answer.resident_bytes,
            full_bytes=model.spec.full_bytes(num_tokens),
            bytes_per_step=answer.bytes_per_step,
            prefill_s=answer.prefill_s,
            first_token_s=answer.first_token_s,
            decode_ms=answer.decode_ms,
            score=workload.score(sample, text),
            answer=text,
            facts={**sample.facts, "slots": answer.slots},
        )


def _names(side: str, method: Method, ratio: int, num_tokens: int) -> tuple[str, str, str]:
    """(policy, memory, resolved)"""
    if side == SIDE:
        return method.ours, memory_text(ratio), policy_text(method, ratio, num_tokens)
    size = "" if ratio == WHOLE else f", 1/{ratio} of the slots"
    return method.name, memory_text(ratio), f"{method.target or method.name}{dict(method.arguments or {}) or ''}{size}"
