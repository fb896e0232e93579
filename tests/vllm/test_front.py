"""kvfold's HTTP API before a vLLM server: packed prefixes give kvfold's own words, and usage counts their tokens."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import anthropic
import pytest

import kvfold
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.serve.api.request import Block, ChatRequest
from kvfold.serve.remote.packer import Packer
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests.serve.remote.fronting import Front, fronting
from tests.vllm.engine import save_tiny
from tests.vllm.test_server import served

POLICY = "keydiff + uniform + 4x"
TEXT = kvfold.example_text()
MARKER: Any = {"type": "ephemeral"}


def expected(model: Model, front: Front, policy: str, question: str) -> str:
    """What kvfold's own engine writes over the same slots."""
    blocks = [Block("system", "system", TEXT), Block("text", "user", question, 0)]
    prompt = front.service.renderer.prompt(ChatRequest("tiny", blocks, 8))
    assert prompt.ends is not None
    end = prompt.ends[0]
    with kvfold.Session(model, policy, template=None) as session:
        session.extend(prompt.tokens[:end]).extend(prompt.tokens[end:], compress=False)
        return str(session.generate(max_new_tokens=8).text)


def ask(front: Front, question: str, **more: Any) -> Any:
    system: Any = [{"type": "text", "text": TEXT, "cache_control": MARKER}]
    turns: Any = [{"role": "user", "content": question}]
    return front.anthropic.messages.create(model="tiny", system=system, messages=turns, max_tokens=8, **more)


def test_a_marked_prompt_is_packed_once_and_answered_by_vllm(tmp_path: Path) -> None:
    store, folder = tmp_path / "store", save_tiny(tmp_path / "model")
    model = kvfold.load(str(folder), dtype="float32", device="cpu", memory="512MB")
    tier = SharedDiskTier(store)
    packer = Packer(model, Policy.parse(POLICY), tier)
    with served(folder, store) as url, fronting(url, model.tokenizer, POLICY, packer, point_tokens=512) as front:
        first, second = ask(front, "Who?"), ask(front, "Where?")
        (task,) = packer._known.values()
        packed = task.result()
        assert packed is not None and packed.num_slots < packed.num_tokens / 2
        for question, found in (("Who?", first), ("Where?", second)):
            assert found.content[0].text == expected(model, front, packed.policy, question)
            usage = found.usage
            counted = usage.input_tokens + usage.cache_creation_input_tokens + usage.cache_read_input_tokens
            assert counted > packed.num_tokens > 900
        assert (first.usage.cache_read_input_tokens, second.usage.cache_read_input_tokens) == (0, packed.num_tokens)
        with front.anthropic.messages.stream(
            model="tiny",
            system=[{"type": "text", "text": TEXT, "cache_control": MARKER}],
            messages=[{"role": "user", "content": "Who?"}],
            max_tokens=8,
        ) as stream:
            assert stream.get_final_text() == first.content[0].text
        for path in store.rglob("*"):  # the engine loses it: it is packed once more
            if path.is_file() and path.stat().st_size > 1 << 20:
                path.unlink()
        time.sleep(11)  # the connector reads the head of an entry every 10 s; then a stream is cut
        assert ask(front, "When?").content[0].text == expected(model, front, packed.policy, "When?")
        metrics = front.service.metrics.text()
        assert f"kvfold_packed_tokens_total {2 * packed.num_tokens}" in metrics
        assert "kvfold_pack_refusals_total 2" in metrics, "the stream, and the check that tells why"
        chat = front.openai.chat.completions.create(
            model="tiny",
            messages=[{"role": "system", "content": TEXT}, {"role": "user", "content": "Who?"}],
            max_tokens=8,
            prompt_cache_key="apart",
        )
        assert chat.choices[0].message.content == first.content[0].text
        short = front.openai.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hello"}], max_tokens=8, stop=["\u2603"]
        )
        assert short.usage is not None and short.usage.completion_tokens == 8
        foreign = kvfold.load(str(save_tiny(tmp_path / "other", seed=1)), dtype="float32", memory="512MB")
        other = Packer(foreign, Policy.parse(POLICY), tier)
        with fronting(url, model.tokenizer, POLICY, other, point_tokens=512) as front:
            for _ in range(2):
                with pytest.raises(anthropic.InternalServerError, match="it was packed with other weights"):
                    ask(front, "Who?")
            assert len(other._known) == 1, "what does not fit is not packed again"


def test_full_leaves_prompts_to_vllm(tmp_path: Path) -> None:
    folder = save_tiny(tmp_path / "model")
    model = kvfold.load(str(folder), dtype="float32", device="cpu", memory="512MB")
    with served(folder, tmp_path / "store") as url, fronting(url, model.tokenizer) as front:
        assert front.service.max_positions == 4096
        assert ask(front, "Who?").content[0].text == expected(model, front, "full", "Who?")
