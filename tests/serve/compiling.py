"""A server in a process of its own that tells which kernels its requests have compiled, or read from disk.

python -m tests.serve.compiling POLICY DTYPE
"""

from __future__ import annotations

import json
import os
import signal
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any

from kvfold.serve.server import open_store, serve, service_of
from kvfold.serve.settings import Settings
from tests import tiny

_LENS = (3, 40, 90, 90, 600)  # of prompts, which begin alike; of the last, kernels multiply no more rows


def kernels() -> dict[str, int]:
    """For how many types of arguments each kernel of numba's is loaded."""
    modules = [module for name, module in list(sys.modules.items()) if name.startswith("kvfold.")]
    values = {id(value): value for module in modules for value in vars(module).values()}.values()
    return {str(kernel.py_func): len(kernel.signatures) for kernel in values if hasattr(kernel, "py_func")}


def _complete(port: int, tokens: list[int]) -> None:
    """A reply that fills its open block twice."""
    body = {"model": "tiny", "prompt": tokens, "max_tokens": 70, "ignore_eos": True}
    url = f"http://127.0.0.1:{port}/v1/completions"
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    urllib.request.urlopen(request, timeout=120).read()


def _ask(port: int, out: Any) -> None:
    try:
        before = kernels()
        prompts = [tiny.prompt(length) for length in _LENS]
        _complete(port, prompts[0])
        with ThreadPoolExecutor() as pool:
            list(pool.map(lambda prompt: _complete(port, prompt), prompts * 2))
        after = kernels()
        print(json.dumps({"before": before, "after": after}), file=out, flush=True)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)


def main(policy: str, dtype: str) -> None:
    model = tiny.ready_bf16() if dtype == "bf16" else tiny.ready("llama")
    before = model.arena.used_bytes
    with service_of(model, policy, Settings(("tiny",)), open_store(model, host_bytes=16 << 20)) as service:

        def started(port: int) -> None:
            assert model.arena.used_bytes == before
            Thread(target=_ask, args=(port, sys.stdout)).start()

        serve(service, "127.0.0.1", 0, started, lambda trace: None)


if __name__ == "__main__":
    main(*sys.argv[1:])
