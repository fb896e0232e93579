"""Packs prefixes of prompts, each once, in a thread of its own, and remembers where their entries are."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.packed.client import PackedPrefix
from kvfold.packed.pack import check_packable, pack
from kvfold.policy.policy import Policy
from kvfold.serve.ops.metrics import Metrics
from kvfold.store.tiers.base import ByteTier

_MOST_KNOWN = 1 << 14
_log = logging.getLogger("kvfold.serve")


class Packer:
    """`tier`: the store that the engine's connector reads; it is closed with the packer."""

    def __init__(self, model: Model, policy: Policy, tier: ByteTier, secret: bytes = b"") -> None:
        check_packable(model, policy)
        self._model, self._policy, self._tier, self._secret = model, policy, tier, secret
        self._thread = ThreadPoolExecutor(1, "kvfold-packer")
        self._known: OrderedDict[bytes, asyncio.Task[PackedPrefix | None]] = OrderedDict()

    async def packed(self, name: bytes, tokens: Sequence[int], metrics: Metrics) -> PackedPrefix | None:
        """The prefix under this name; requests that come while it is packed wait for it. None: it stays as it is."""
        task = self._known.get(name)
        if task is None:
            task = self._known[name] = asyncio.create_task(self._pack(name, list(tokens), metrics))
            if len(self._known) > _MOST_KNOWN:
                self._known.popitem(last=False)
        self._known.move_to_end(name)
        return await asyncio.shield(task)

    def forget(self, name: bytes) -> None:
        """The engine did not find it."""
        self._known.pop(name, None)

    async def _pack(self, name: bytes, tokens: Sequence[int], metrics: Metrics) -> PackedPrefix | None:
        work = partial(pack, self._model, tokens, self._policy, self._tier, secret=self._secret)
        try:
            found = await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except InputError:
            return None  # too short: packing would save nothing
        except Exception as error:
            _log.error("a prefix could not be packed", exc_info=error)
            metrics.add("kvfold_pack_failures_total")
            self.forget(name)  # the next request tries again
            return None
        metrics.add("kvfold_packed_tokens_total", found.num_tokens)
        metrics.add("kvfold_packed_slots_total", found.num_slots)
        return found

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)  # the process ends before a pass that runs
        self._tier.close()
