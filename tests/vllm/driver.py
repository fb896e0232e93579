"""A vLLM engine in a process of its own: JSON commands on stdin, one a line, answers on a pipe.

The engine runs inside the process, without further ones, so that ending it ends all of it.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    options = json.loads(sys.argv[1])
    answers = os.fdopen(int(sys.argv[2]), "w")
    os.environ.update(VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", HF_HUB_OFFLINE="1")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    from vllm import LLM
    from vllm.config import KVTransferConfig

    from kvfold.vllm.plugin import register

    register()  # as vLLM does, where the metadata of the installed package is not that of an older checkout
    transfer = options.pop("transfer", None)
    config = None if transfer is None else KVTransferConfig(**transfer)
    common = {"dtype": "float32", "enforce_eager": True, "disable_log_stats": False}
    llm = LLM(**common, kv_transfer_config=config, **options)
    print(json.dumps({"block_size": llm.llm_engine.vllm_config.cache_config.block_size}), file=answers, flush=True)
    for line in sys.stdin:
        print(json.dumps(answer(llm, **json.loads(line))), file=answers, flush=True)
    os._exit(0)  # without waiting for the engine's threads


def answer(llm: Any, op: str, **given: Any) -> Any:
    if op == "generate":
        return generate(llm, given["requests"])
    if op == "cancel":
        return cancel(llm, given["request"], given["num_steps"])
    if op == "metrics":
        return {metric.name: metric.value for metric in llm.get_metrics() if "kvfold" in metric.name}
    if op == "counter":
        return sum(metric.value for metric in llm.get_metrics() if metric.name == given["name"])
    if op == "flush":
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group()._store._queue.flush(60)
    raise ValueError(op)


def generate(llm: Any, requests: list[dict[str, Any]]) -> list[dict[str, Any]]:
    given = [parsed(request) for request in requests]
    prompts, params = [prompt for prompt, _ in given], [options for _, options in given]
    return [told(output) for output in llm.generate(prompts, params, use_tqdm=False)]


def parsed(request: dict[str, Any]) -> tuple[Any, Any]:
    """A prompt and its sampling parameters."""
    from vllm import SamplingParams

    salt = {"cache_salt": request["salt"]} if "salt" in request else {}
    extra = {"kv_transfer_params": request["transfer"]} if "transfer" in request else None
    params = SamplingParams(**{"temperature": 0.0, "logprobs": 5, **request["params"]}, extra_args=extra)
    return {"prompt_token_ids": request["ids"], **salt}, params


def cancel(llm: Any, request: dict[str, Any], num_steps: int) -> int:
    """Abort a request after so many steps, and run until the engine is idle; steps that it took."""
    engine, count = llm.llm_engine, num_steps
    engine.add_request("cancelled", *parsed(request))
    for _ in range(num_steps):
        engine.step()
    engine.abort_request(["cancelled"])
    while engine.has_unfinished_requests():
        engine.step()
        count += 1
    return count


def told(output: Any) -> dict[str, Any]:
    one = output.outputs[0]
    logprobs = [{str(token): value.logprob for token, value in step.items()} for step in one.logprobs or ()]
    return {
        "ids": list(one.token_ids),
        "text": one.text,
        "logprobs": logprobs,
        "cached": output.num_cached_tokens,
        "transfer": output.kv_transfer_params,
    }


if __name__ == "__main__":
    main()
