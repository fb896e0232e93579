"""The test's end of `tests.vllm.driver`, and models for it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from kvfold.models.pull.pull import resolve

ROOT = Path(__file__).resolve().parents[2]
MODULE = {"kv_connector": "FoldConnector", "kv_connector_module_path": "kvfold.vllm", "kv_role": "kv_both"}
Answer = dict[str, Any]


def transfer(store: Path, **more: Any) -> dict[str, Any]:
    """A `--kv-transfer-config` over a folder."""
    extra = {"store": str(store), **more}
    return {**MODULE, "kv_load_failure_policy": "recompute", "kv_connector_extra_config": extra}


class Engine:
    """Use it in a `with` statement; its whole process group is ended at the end."""

    def __init__(self, model: Path | str, **options: Any) -> None:
        """Options of `vllm.LLM`, and `variables` of the environment."""
        variables: Mapping[str, str] = options.pop("variables", {})
        reading, writing = os.pipe()
        words = [json.dumps({"model": str(model), "max_model_len": 4096, **options}), str(writing)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "2", **variables}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.vllm.driver", *words],
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            pass_fds=[writing],
            env=environment,
            text=True,
            cwd=ROOT,
            start_new_session=True,
        )
        os.close(writing)
        self._answers = os.fdopen(reading)
        self.log = ""
        self.block_size = 0

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Engine:
        self.block_size = self._read()["block_size"]
        return self

    def __exit__(self, *_: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()
        self._answers.close()

    def _read(self) -> Any:
        line = self._answers.readline()
        if not line:
            self.log = self._process.communicate()[1]
            raise RuntimeError(f"the engine ended:\n{self.log[-4000:]}")
        return json.loads(line)

    def _tell(self, **command: Any) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        return self._read()

    def generate(self, requests: Sequence[dict[str, Any]]) -> list[Answer]:
        found: list[Answer] = self._tell(op="generate", requests=list(requests))
        return found

    def ask(self, ids: Sequence[int], max_tokens: int = 8, **more: Any) -> Answer:
        """One request; `more`: salt, transfer, params."""
        params = {"max_tokens": max_tokens, **more.pop("params", {})}
        return self.generate([{"ids": list(ids), "params": params, **more}])[0]

    def cancel(self, request: dict[str, Any], num_steps: int) -> None:
        """Abort a request after so many steps of the engine."""
        self._tell(op="cancel", request=request, num_steps=num_steps)

    def flush(self) -> None:
        """Wait until everything is stored."""
        assert self._tell(op="flush")

    def metrics(self) -> dict[str, float]:
        return {name.removeprefix("vllm:kvfold_"): value for name, value in self._tell(op="metrics").items()}

    def counter(self, name: str) -> float:
        """One of vLLM's own."""
        found: float = self._tell(op="counter", name=name)
        return found


def save_tiny(folder: Path, seed: int = 0) -> Path:
    """Random Llama of four layers with SmolLM2's tokenizer; its logits differ widely."""
    torch.manual_seed(seed)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 49152}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = LlamaConfig(**sizes, **heads, max_position_embeddings=8192, initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(resolve("smollm2-135m", progress=False)).save_pretrained(folder)
    return folder
