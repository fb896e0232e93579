"""Research over local files in three modules: read, check, write. Each goes on in the KV cache of the one before it.

    python examples/research.py report.txt minutes.txt --ask "What did the bridge cost?"

`read` reads the files into one compressed KV cache and drafts an answer. `check` lets the model quote a sentence that
supports the draft; a quote that is in no file is cropped from the cache and sampled again. `write` writes the answer.
No module reads again what one before it has read: they hand over a fork of the cache, not text.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import kvfold
from kvfold.recurse.checks import QuoteCheck
from kvfold.recurse.handover import Pipeline, PipelineResult
from kvfold.recurse.verify import Chain

POLICY = "kvzip + global + 2x + int4"


class Research:
    """One question about some files; its three modules share nothing but the session they are handed."""

    def __init__(self, files: dict[str, str], question: str) -> None:
        self.files, self.question = files, question

    def read(self, session: kvfold.Session) -> str:
        session.extend("".join(f"File {name}:\n{text}\n\n" for name, text in self.files.items()))
        session.extend(f"{self.question} Answer in one sentence.", compress=False)
        return session.generate(max_new_tokens=64, stop=["\n\n"]).text.strip()

    def check(self, session: kvfold.Session) -> str:
        session.extend("Quote the sentence of the files that says so.", compress=False)
        session.write('It says: "')
        chain = Chain(session, [self.refusal], separator='"', keep_failed=True)
        step = chain.step(max_new_tokens=64)
        reasons = "; ".join(reason for _, reason in step.attempts[-1].refusals)
        return f'"{step.text.strip()}" [{reasons or "in the files"}; {step.num_retries} retries]'

    def refusal(self, quote: str) -> str | None:
        """Why a quote is refused; None if it is in the files."""
        return QuoteCheck("\n".join(self.files.values()), min_words=1, required=True).refusal(f'"{quote}"')

    def write(self, session: kvfold.Session) -> str:
        session.extend(f"{self.question} Write the answer for a reader who does not know the files.", compress=False)
        return session.generate(max_new_tokens=128).text.strip()

    def run(self, model: kvfold.Model, policy: str) -> PipelineResult:
        with kvfold.Session(model, policy) as session:
            return Pipeline([self.read, self.check, self.write]).run(session)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="UTF-8 text")
    parser.add_argument("--ask", required=True, metavar="QUESTION")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--policy", default=POLICY, help="of the KV cache (default: %(default)s)")
    args = parser.parse_args(arguments)
    files = {path.name: path.read_text(encoding="utf-8") for path in args.files}
    with Research(files, args.ask).run(kvfold.load(args.model), args.policy) as result:
        for run in result.runs:
            held, full = run.resident_bytes / 1e6, run.full_bytes / 1e6
            print(f"{run.name}: {run.output}")
            print(f"  {run.tokens_handed:,} tokens handed over, {run.tokens_new:,} new; {held:.1f} of {full:.1f} MB\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
