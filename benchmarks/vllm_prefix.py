"""How long does vLLM take to the first token of a long prompt that it has seen before, by which connector?

    python -m benchmarks.vllm_prefix [--model smollm2-135m] [--dtype float32] [--tokens 3000] [--repeats 3] [--save]

Run it in the environment that has vLLM (docs/vllm.md). Every arm is a process of its own with an empty store: kvfold's
connector, and vLLM's ExampleConnector, which stores whole prompts. vLLM's own prefix cache is off, so that hits come
from the connector. A prompt is asked cold and again (hit), both in one run, and then with a longer question behind it,
whose own tokens are computed; the time is that of one token. Ratios are of medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.commands import argument_parser, run_main
from benchmarks.rows import Row, report
from kvfold.errors import MissingExtra, ModelError

ARMS = ("kvfold", "example")
_QUESTION = 200  # tokens of the longer question


def connector(arm: str, store: str) -> dict[str, Any]:
    if arm == "example":
        extra = {"shared_storage_path": store}
        return {"kv_connector": "ExampleConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {
        "kv_connector": "FoldConnector",
        "kv_connector_module_path": "kvfold.vllm",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"store": store},
    }


def prompts(tokenizer: Any, length: int, count: int) -> list[list[int]]:
    """Different from their first block on."""
    from kvfold import example_text

    text = example_text() * (1 + length // 900)
    return [tokenizer(f"Copy {number}. {text}")["input_ids"][:length] for number in range(count)]


def measure(args: argparse.Namespace) -> Row:
    """One arm, in this process."""
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="ERROR")
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "2")
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    from kvfold.models.pull.pull import resolve

    with tempfile.TemporaryDirectory() as store:
        llm = LLM(
            str(resolve(args.model)),
            dtype=args.dtype,
            max_model_len=args.tokens + 2 * _QUESTION,
            max_num_batched_tokens=args.tokens + 2 * _QUESTION,
            enforce_eager=True,
            enable_prefix_caching=False,
            kv_transfer_config=KVTransferConfig(**connector(args.arm, store)),
        )
        one = SamplingParams(max_tokens=1, temperature=0)

        def ask(ids: Sequence[int]) -> tuple[float, int]:
            began = time.perf_counter()
            (output,) = llm.generate([{"prompt_token_ids": list(ids)}], one, use_tqdm=False)
            return time.perf_counter() - began, output.num_cached_tokens or 0

        def settle() -> None:
            """Until all is written, where a thread does it."""
            if args.arm == "kvfold":
                get_kv_transfer_group()._store._queue.flush(60)

        warm, *measured = prompts(llm.get_tokenizer(), args.tokens, args.repeats + 1)
        for _ in range(2):  # both ways, so that what is set up once is
            ask(warm[:512])
            settle()
        cold, hit, longer = [], [], []
        for ids in measured:
            cold.append(ask(ids))
            settle()
            hit.append(ask(ids))
            longer.append(ask([*ids, *reversed(ids[:_QUESTION])]))
            settle()
    row: Row = {"arm": args.arm, "model": args.model, "dtype": args.dtype, "tokens": args.tokens}
    for name, found in (("cold", cold), ("hit", hit), ("longer", longer)):
        row[f"{name}_s"] = statistics.median(seconds for seconds, _ in found)
        row[f"{name}_cached"] = found[0][1]
    for name in ("hit", "longer"):
        row[f"{name}_ratio"] = row[f"{name}_s"] / row["cold_s"]
    return row


def rows(args: argparse.Namespace) -> Iterator[Row]:
    for arm in args.arms.split(","):
        words = ["--arm", arm, "--model", args.model, "--dtype", args.dtype]
        words += ["--tokens", str(args.tokens), "--repeats", str(args.repeats)]
        command = [sys.executable, "-m", "benchmarks.vllm_prefix", *words]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).resolve().parents[1])
        if done.returncode:
            raise ModelError(f"the arm {arm} failed; its messages stand above")
        yield json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> int:
    parser = argument_parser("vllm_prefix", __doc__)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=3000)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--arms", default=",".join(ARMS))
    parser.add_argument("--arm", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--save", action="store_true", help="append rows to benchmarks/results/vllm_prefix.jsonl")
    args = parser.parse_args(arguments)
    try:
        import vllm
    except ImportError as error:
        raise MissingExtra('this benchmark needs vLLM; install it with: pip install "kvfold[vllm]"') from error
    if args.arm is not None:
        row = measure(args)
        print(json.dumps(row), flush=True)
        os._exit(0)  # vLLM's threads would hold it up
    report("vllm_prefix", rows(args), save=args.save, vllm=vllm.__version__)
    return 0


if __name__ == "__main__":
    sys.exit(run_main(main, sys.argv[1:]))
