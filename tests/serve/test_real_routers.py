"""smg and vllm-router before two servers, where they are installed; KVFOLD_ROUTERS names their bin folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import anthropic
import openai
import pytest

from tests.serve.asking import TENANTS, until
from tests.serve.replicas.ports import free_port
from tests.serve.running import Running, running, tool_model

HELLO: Any = {"model": "tiny", "max_tokens": 4, "messages": [{"role": "user", "content": "the cat sat"}]}
VERSIONS = {"smg": "smg==1.13.0", "vllm-router": "vllm-router==0.1.16"}


@contextmanager
def routed(name: str, servers: list[Running], log: Path, *options: str) -> Iterator[str]:
    """The router's address, once it serves."""
    where = os.pathsep.join((os.environ.get("KVFOLD_ROUTERS", ""), os.environ["PATH"]))
    command = shutil.which(name, path=where)
    if command is None:
        pytest.skip(f"{name} is not installed: pip install {VERSIONS[name]}, and name its bin folder in KVFOLD_ROUTERS")
    port = free_port()
    words = [command, *(["launch"] if name == "smg" else []), "--host", "127.0.0.1", "--port", str(port)]
    words += ["--prometheus-host", "127.0.0.1", "--prometheus-port", str(free_port()), "--policy", "cache_aware"]
    words += ["--worker-urls", *(server.url for server in servers), *options]
    with log.open("w") as output:
        process = subprocess.Popen(words, stdout=output, stderr=output)
        try:
            until(lambda: process.poll() is not None or _serves(port))
            assert process.poll() is None, log.read_text()
            yield f"http://127.0.0.1:{port}"
        finally:
            process.kill()
            process.wait()


def _serves(port: int) -> bool:
    try:
        asked = Request(f"http://127.0.0.1:{port}/v1/models", headers={"authorization": "Bearer key-a"})
        with urlopen(asked, timeout=5) as answer:
            return b"tiny" in answer.read()
    except OSError:
        return False


def openai_at(url: str, key: str = "key-a") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=60)


@pytest.mark.parametrize("name", ["smg", "vllm-router"])
def test_clients_are_served_through_a_router(name: str, tmp_path: Path) -> None:
    with (
        running(tool_model()) as first,
        running(tool_model()) as second,
        routed(name, [first, second], tmp_path / "log") as url,
    ):
        client = openai_at(url)
        expected = first.openai.chat.completions.create(**HELLO).choices[0].message.content
        assert client.chat.completions.create(**HELLO).choices[0].message.content == expected
        chunks = list(client.chat.completions.create(**HELLO, stream=True))
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
        found = client.responses.create(model="tiny", input="the cat sat", max_output_tokens=4)
        assert found.usage is not None
        assert found.usage.output_tokens == 4
        with pytest.raises(openai.BadRequestError, match=r"kvfold\.policy"):
            client.chat.completions.create(**HELLO, extra_body={"kvfold": {"policy": "int4"}})
        messages = anthropic.Anthropic(base_url=url, auth_token="key-a", max_retries=0, timeout=60).messages
        assert messages.create(**HELLO).content[0].to_dict()["text"] == expected
        counted = messages.count_tokens(model="tiny", messages=HELLO["messages"])
        assert counted.input_tokens == found.usage.input_tokens


def test_smg_knows_one_key_and_so_one_tenant(tmp_path: Path) -> None:
    """It asks servers for their models with the key that it was started with, and takes that one alone."""
    with (
        running(tool_model(), tenants=TENANTS, key="key-a") as server,
        routed("smg", [server], tmp_path / "log", "--api-key", "key-a") as url,
    ):
        assert openai_at(url).chat.completions.create(**HELLO).choices
        for key in ("key-b", "wrong"):
            with pytest.raises(openai.AuthenticationError):
                openai_at(url, key).chat.completions.create(**HELLO)
        assert set(server.service.recents) == {"red"}
