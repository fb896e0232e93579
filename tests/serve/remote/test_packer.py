"""Prefixes are packed once for all that wait, again when the engine has lost them, and not where it saves nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

import kvfold
from kvfold.errors import PolicyError
from kvfold.models.loader import Model
from kvfold.policy.policy import Policy
from kvfold.serve.ops.metrics import Metrics
from kvfold.serve.remote.packer import Packer
from kvfold.serve.remote.service import needs_model
from kvfold.store.tiers.shared_disk import SharedDiskTier
from tests import tiny
from tests.packed.common import saved
from tests.serve.remote.fronting import fronting
from tests.serve.running import running, tool_model

POLICY = Policy.parse("keydiff + uniform + 4x")
TOKENS = tiny.prompt(600)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return saved(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def packer(model: Model, tmp_path: Path) -> Iterator[Packer]:
    found = Packer(model, POLICY, SharedDiskTier(tmp_path / "store"))
    yield found
    found.close()


def _count(metrics: Metrics, name: str) -> float:
    return sum(float(line.split()[-1]) for line in metrics.text().splitlines() if line.startswith(name))


def test_a_prefix_is_packed_once_for_all_and_again_when_it_was_forgotten(packer: Packer) -> None:
    metrics = Metrics()

    async def ask() -> list[Any]:
        found = await asyncio.gather(*(packer.packed(b"one", TOKENS, metrics) for _ in range(5)))
        left = asyncio.create_task(packer.packed(b"two", TOKENS[:500], metrics))
        await asyncio.sleep(0)
        left.cancel()
        other = await packer.packed(b"two", TOKENS[:500], metrics)
        packer.forget(b"one")
        return [*found, other, await packer.packed(b"one", TOKENS, metrics)]

    *same, other, again = asyncio.run(ask())
    assert len({one.entry for one in (*same, again)}) == 1 and other.entry != again.entry
    assert (again.num_tokens, again.num_slots, again.has_template) == (600, 256, False)
    assert _count(metrics, "kvfold_packed_tokens_total ") == 600 + 500 + 600


def test_a_prefix_that_could_not_be_packed_is_tried_again(model: Model, tmp_path: Path) -> None:
    store, metrics = tmp_path / "store", Metrics()
    packer = Packer(model, POLICY, SharedDiskTier(store))

    async def ask() -> list[Any]:
        store.rename(tmp_path / "gone")
        store.write_text("no folder")
        found = await packer.packed(b"one", TOKENS, metrics)
        store.unlink()
        (tmp_path / "gone").rename(store)
        return [found, await packer.packed(b"one", TOKENS, metrics)]

    failed, packed = asyncio.run(ask())
    packer.close()
    assert failed is None and packed.num_tokens == 600
    assert _count(metrics, "kvfold_pack_failures_total ") == 1


def test_what_packing_does_not_shorten_stays_as_it_is(packer: Packer) -> None:
    assert asyncio.run(packer.packed(b"short", TOKENS[:100], Metrics())) is None


def test_an_engine_without_the_connector_is_told(packer: Packer) -> None:
    messages: Any = [
        {"role": "system", "content": kvfold.example_text()[:800]},
        {"role": "user", "content": "who"},
    ]
    with (
        running(tool_model()) as engine,
        fronting(engine.url, engine.service.tokenizer, str(POLICY), packer, point_tokens=300) as front,
    ):
        with pytest.raises(openai.InternalServerError, match="kv_transfer_params: the field is not supported here"):
            front.openai.chat.completions.create(model="tiny", messages=messages, max_tokens=4)
        found = front.openai.chat.completions.create(model="tiny", messages=messages[1:], max_tokens=4)
        assert found.usage is not None and found.usage.completion_tokens == 4, "short prompts are sent as they are"


def test_policies_are_left_to_the_engine_packed_or_refused() -> None:
    assert not needs_model(Policy.parse("full")) and needs_model(POLICY)
    for text in ("int4", "kvzip + global + 4x", "shorten(graph, 2x)"):
        with pytest.raises(PolicyError, match=r"policy "):
            needs_model(Policy.parse(text))
