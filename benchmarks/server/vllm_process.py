"""`vllm serve` as a process, from the Python of an environment that has vLLM."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from benchmarks.server.openai_client import OpenAIServer
from kvfold.errors import ModelError
from kvfold.models.pull.pull import resolve

_START_S = 600.0


def vllm_version(python: str) -> str:
    """ModelError if that Python has no vLLM."""
    command = [python, "-c", "from importlib.metadata import version; import vllm; print(vllm.__version__)"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    except OSError as error:
        raise ModelError(f"{python} cannot be run ({error}); give --vllm-python /path/to/venv/bin/python") from error
    if done.returncode:
        raise ModelError(f"{python} has no vLLM; docs/vllm.md tells how to install it")
    return done.stdout.split()[-1]


def preloaded(python: str) -> list[str]:
    """What vLLM's guide for CPUs recommends to preload, as far as it is there: Intel's OpenMP, which comes with vLLM's
    wheel, and tcmalloc (Debian: libtcmalloc-minimal4)."""
    openmp = Path(python).parent.parent / "lib" / "libiomp5.so"
    malloc = sorted(Path("/usr/lib").glob("*-linux-gnu/libtcmalloc_minimal.so.4"))
    return [str(path) for path in (openmp, *malloc) if path.exists()]


@contextmanager
def vllm_served(python: str, model: str, *options: str, kv_gib: int, log: Path) -> Iterator[OpenAIServer]:
    """On a free port; its whole process group is ended at the end, since its engine is a process of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", str(resolve(model)), "--port", str(port)]
    command += ["--served-model-name", "model", "--host", "127.0.0.1", *options]
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": str(kv_gib), "HF_HUB_OFFLINE": "1"}
    environment["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"  # else it keeps a core for its scheduler
    environment["LD_PRELOAD"] = ":".join(filter(None, (environment.get("LD_PRELOAD"), *preloaded(python))))
    with log.open("w", encoding="utf-8") as lines:
        process = subprocess.Popen(command, env=environment, stdout=lines, stderr=lines, start_new_session=True)
        try:
            _wait(f"http://127.0.0.1:{port}/health", process, log)
            yield OpenAIServer(port, "model")
        finally:
            with suppress(ProcessLookupError):  # it has ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            urlopen(url, timeout=5).close()
            return
        except (URLError, OSError):
            time.sleep(0.5)
    raise ModelError(f"vLLM did not start:\n{log.read_text(encoding='utf-8')[-3000:]}")
