"""The benchmark loop: batch after batch, rows written as they are measured, so that a run can be resumed.

All jobs of a batch run whenever one of its rows is missing, and only missing rows are written: results may depend on
the batch in the last bits, so a resumed run has the rows of an uninterrupted one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean

from kvfold.bench.answers import Outcome, answer
from kvfold.bench.batched_eval import EvalJob
from kvfold.bench.countdown import Countdown
from kvfold.bench.haystack import Haystack, prose
from kvfold.bench.plan import Batch, Shard, Task, batches
from kvfold.bench.prompts import PromptBuilder, prompt_row
from kvfold.bench.record import Diagnostic, Mode, Row, Run, RunWriter
from kvfold.bench.shortened import PromptShortener, SentPrompt, cache_policy
from kvfold.bench.size_cache import FULL, Cell, Place, SearchedTokens, SizeCache, SizedPolicy, cells
from kvfold.bench.workloads import Sample, Setting, Workload
from kvfold.engine.runner import Runner
from kvfold.models.loader import Model

SIZES = "sizes.json"
_DECIMALS = 4
_KL_DECIMALS = 6  # a good codec's KL is below a thousandth
_GPU_BATCH = 64  # sequences, which keep the overhead of a decode step small


@dataclass(frozen=True)
class RowJob:
    """One cell of one sample: an unfilled row, and its job; None if the row's note says why it cannot run."""

    sample: Sample
    row: Row
    job: EvalJob | None


class Bench:
    """One run, or one shard of it, in its folder."""

    def __init__(
        self,
        model: Model,
        run: Run,
        tasks: Sequence[Task],
        folder: Path,
        haystack: Haystack = prose,
        known_sizes: Path | None = None,
    ) -> None:
        self.model = model
        self.about = run
        self.tasks = tasks
        self.cells = cells(run.policies, run.memories)
        for cell in self.cells:  # PolicyError before anything is written
            cell.check(model.spec)
        self.runner = Runner(model.hf, model.spec, model.arena, compile=model.compile)
        self.prompter = PromptBuilder(model.tokenizer)
        self.shortener = PromptShortener(model, self.prompter)
        self.haystack = haystack
        self.batches = batches(tasks, run.lengths, run.samples, self._at_once, Shard.parse(run.shard))
        self.writer = RunWriter(folder, run)
        self.tell: Callable[[str], None] = lambda doing: None
        self.sizes = SizeCache(folder / SIZES, self.runner, self.cells, known_sizes)

    @property
    def _at_once(self) -> int:
        """Samples of a batch."""
        if self.model.device.type != "cuda":
            return 1
        return max(1, _GPU_BATCH // (len(self.cells) * len(self.about.modes)))

    def run(self) -> None:
        """Run all batches with missing rows."""
        left = [batch for batch in self.batches if self._lacks(batch)]
        with Countdown(f"{self.about.model} {self.about.suite}", len(left)) as countdown:
            self.tell = countdown.tell
            for batch in left:
                countdown.step(_scores_text(self._run(batch)))

    def find_sizes(self, shard: Shard) -> None:
        """Search the sizes of a shard's policies for all tasks, lengths and modes, and run nothing."""
        self.sizes.take(shard)
        for task in self.tasks:
            for length in self.about.lengths:
                for mode in self.about.modes:
                    self._sizes(Batch(task, length, (0,)), mode)

    def _lacks(self, batch: Batch) -> bool:
        """Whether a row of it is missing."""
        task = (batch.task.workload.name, batch.task.name, batch.length)
        places = [(*task, index, mode) for index in batch.indices for mode in self.about.modes]
        return any((*place, *cell) not in self.writer.done for place in places for cell in self.cells)

    def _run(self, batch: Batch) -> list[Row]:
        workload = batch.task.workload
        samples = [self._sample(batch, index) for index in batch.indices]
        self.writer.add_prompts(prompt_row(workload.name, batch.length, sample) for sample in samples)
        asked = [each for sample in samples for each in self._asked(batch, sample)]
        self.tell(f"{workload.name}:{batch.task.name}, {batch.length} tokens")
        outcomes = answer(self.runner, list(dict.fromkeys(each.job for each in asked if each.job is not None)))
        rows, diagnostics = [], []
        for each in asked:
            row = each.row
            if each.job is not None:
                outcome = outcomes[each.job]
                answered = str(self.model.tokenizer.decode(list(outcome.token_ids), skip_special_tokens=True))
                row = _filled(row, outcome, workload, each.sample, answered)
                original = each.job.prompt.original.compressed(each.job.mode)
                row = replace(row, full_bytes=self.model.spec.full_bytes(len(original)) if row.full_bytes else 0)
                diagnostics += _diagnostics(row, outcome)
            rows.append(row)
        self.writer.add(rows, diagnostics)
        return rows

    def _sample(self, batch: Batch, index: int) -> Sample:
        setting = Setting(batch.length, self.about.seed, self.prompter.count_tokens, self.haystack)
        return batch.task.workload.sample(setting, batch.task.name, index)

    def _asked(self, batch: Batch, sample: Sample) -> Iterator[RowJob]:
        """Every cell in every mode; cells of the same policy and size have the same job."""
        prompt = self.prompter.prompt(sample)
        prompts = {policy: self.shortener.sent(sample, prompt, policy) for policy in self.about.policies}
        for mode in self.about.modes:
            place = _place(batch, mode)
            for cell, sized in self._sizes(batch, mode).items():
                sent = prompts[cell.policy]
                note = sized.note or sent.note_in(mode, cell.policy, self.model.spec.max_positions)
                row = Row(
                    place.workload,
                    place.task,
                    place.length,
                    sample.index,
                    mode,
                    *cell,
                    sized.resolved,
                    prompt_tokens=prompt.num_tokens,
                    sent_tokens=sent.prompt.num_tokens,
                    shorten_s=round(sent.shorten_s, 4),
                    note=note,
                    facts=_plain(sample),
                )
                yield RowJob(sample, row, None if note else self._job(sample, sent, mode, sized))

    def _sizes(self, batch: Batch, mode: Mode) -> dict[Cell, SizedPolicy]:
        """Sizes of a length are first searched on the run's first task (the anchor), whatever this shard runs."""
        anchor, first_mode = Batch(self.tasks[0], batch.length, (0,)), self.about.modes[0]
        self.sizes.at(_place(anchor, first_mode), partial(self._first, anchor, first_mode))
        return self.sizes.at(_place(batch, mode), partial(self._first, batch, mode), _place(anchor, first_mode))

    def _first(self, batch: Batch, mode: Mode, policy: str) -> SearchedTokens:
        """The tokens that sizes are searched on."""
        self.tell(f"searching sizes, {batch.task.workload.name}:{batch.task.name}, {batch.length} tokens")
        sample = self._sample(batch, 0)
        prompt = self.prompter.prompt(sample)
        sent = self.shortener.sent(sample, prompt, policy)
        note = sent.note_in(mode, policy, self.model.spec.max_positions)
        return SearchedTokens(sent.prompt.compressed(mode), len(prompt.compressed(mode)), note)

    def _job(self, sample: Sample, sent: SentPrompt, mode: Mode, sized: SizedPolicy) -> EvalJob:
        full_bytes = self.model.spec.full_bytes
        num_bytes = min(sized.share * full_bytes(sent.prompt.original.num_tokens), full_bytes(sent.prompt.num_tokens))
        return EvalJob(
            sent.prompt,
            mode,
            cache_policy(sized.resolved),
            sample.max_new_tokens,
            compares=sample.index < self.about.fidelity,
            diagnoses=sample.index < self.about.diagnostics,
            num_bytes=round(num_bytes),
        )


def _scores_text(rows: Sequence[Row]) -> str:
    """Mean scores of a batch in percent: `kv:kv, 700 tokens, question known: full 100, keydiff at 50% 62`."""
    lines: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        cells = lines.setdefault(f"{row.workload}:{row.task}, {row.length} tokens, question {row.mode}", {})
        if row.score is not None:
            cell = row.policy if row.policy == FULL else f"{row.policy} at {row.memory}"
            cells.setdefault(cell, []).append(row.score)
    texts = {
        place: (f"{cell} {100 * mean(scores):.0f}" for cell, scores in cells.items()) for place, cells in lines.items()
    }
    return "\n".join(f"{place}: {', '.join(text)}" for place, text in texts.items())


def _place(batch: Batch, mode: Mode) -> Place:
    return Place(batch.task.workload.name, batch.task.name, batch.length, mode)


def _plain(sample: Sample) -> dict[str, object]:
    """Facts that a table can group by: no lists, such as the ends of all turns."""
    return {name: value for name, value in sample.facts.items() if isinstance(value, (str, int, float))}


def _filled(row: Row, outcome: Outcome, workload: Workload, sample: Sample, answer: str) -> Row:
    """The row with the sizes, times and score of its job, rounded; with a note where the job could not run."""
    stats, fidelity = outcome.stats, outcome.fidelity
    if stats is None:
        return replace(row, note=outcome.note)
    return replace(
        row,
        new_tokens=len(outcome.token_ids),
        resident_bytes=stats.resident_bytes,
        full_bytes=stats.full_bytes,
        bytes_per_step=stats.bytes_per_step,
        prefill_s=round(outcome.prefill_s, 3),
        first_token_s=round(outcome.first_token_s, 4),
        decode_ms=None if outcome.decode_ms is None else round(outcome.decode_ms, 2),
        score=round(workload.score(sample, answer), _DECIMALS),
        answer=answer,
        kl=None if fidelity is None else round(fidelity.kl_nats, _KL_DECIMALS),
        agreement=None if fidelity is None else round(fidelity.agreement, _DECIMALS),
        bits_lost=None if fidelity is None else round(fidelity.bits_lost, _DECIMALS),
    )


def _diagnostics(row: Row, outcome: Outcome) -> list[Diagnostic]:
    """Which slots were kept, where that was measured."""
    if outcome.kept is None:
        return []
    place = row.workload, row.task, row.length, row.index, row.mode, row.policy, row.memory, row.resolved
    return [Diagnostic(*place, **asdict(outcome.kept))]
