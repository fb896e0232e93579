"""`kvfold serve --engine` as a process, in front of another server."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import openai
import pytest

from tests import tiny
from tests.serve.remote.fronting import fronting
from tests.serve.running import running, tool_model


def test_the_command_answers_with_the_words_of_its_engine_without_weights(tmp_path: Path) -> None:
    tiny.tokenizer().save_pretrained(tmp_path / "tiny")
    tiny.build("llama").config.save_pretrained(tmp_path / "tiny")  # and no weights
    key = tmp_path / "key"
    key.write_text("key-a\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    with running(tool_model()) as engine:
        words = ["--model", str(tmp_path / "tiny"), "--port", "0", "--engine", f"{engine.url}/v1", "--temperature", "0"]
        command = [sys.executable, "-m", "kvfold", "serve", *words, "--engine-key", str(key)]
        front = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        try:
            assert front.stdout is not None
            line = front.stdout.readline()
            assert line.startswith("tiny, full: http://"), line or front.communicate()[1]
            client = openai.OpenAI(base_url=f"{line.split()[2]}/v1", api_key="any", max_retries=0, timeout=120)
            pair = [
                one.completions.create(model="tiny", prompt="the cat sat", max_tokens=8).choices[0].text
                for one in (engine.openai, client)
            ]
        finally:
            front.send_signal(signal.SIGINT)
            errors = front.communicate(timeout=60)[1]
    assert pair[0] == pair[1] and pair[0]
    assert front.returncode in (0, 130), errors


def test_an_engine_that_is_killed_ends_its_streams_with_an_error_and_is_then_down(tmp_path: Path) -> None:
    tiny.build("llama").save_pretrained(tmp_path / "tiny")
    tiny.tokenizer().save_pretrained(tmp_path / "tiny")
    words = ["--model", str(tmp_path / "tiny"), "--port", "0", "--memory", "64MB", "--host-memory", "16MB"]
    command = [sys.executable, "-m", "kvfold", "serve", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as engine:
        try:
            assert engine.stdout is not None
            url = engine.stdout.readline().split()[2]
            with fronting(url, tiny.tokenizer()) as front:
                messages: Any = [{"role": "user", "content": "the cat"}]
                asked: Any = {"model": "tiny", "messages": messages, "extra_body": {"ignore_eos": True}}
                stream = front.openai.chat.completions.create(**asked, max_tokens=900, stream=True)
                pieces = iter(stream)
                next(pieces)
                engine.kill()
                with pytest.raises(openai.APIError, match="the engine behind this server does not answer"):
                    list(pieces)
                with pytest.raises(openai.InternalServerError, match="does not answer"):
                    front.openai.chat.completions.create(**asked, max_tokens=4)
                assert front.service.scheduler.num_running == front.service.scheduler.num_waiting == 0
        finally:
            engine.kill()
