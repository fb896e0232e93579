"""EpiCache (arXiv:2509.17396): a long conversation as a few episodes, each with a small KV cache of its own.

    with Episodes(model, turns, num_episodes=4, slots=512) as episodes:
        print(episodes.ask("What was the name of the hotel?").text)

Turns are clustered by topic. For every cluster the whole history is prefilled once, block by block, and after each
block the cache keeps the slots that the cluster's medoid turns attend to: no block is scored by its own end, and memory
is bounded by `slots` and one block. A question is routed to the cache of the nearest cluster.

Differences from the reference: turns are compared by their words (TF-IDF), not by an embedding model; layers and heads
share slots by a budget of the policy language (`ada`: heads; `global`: layers too), and only with a profile that was
measured `--by keys` by how much the keys of a layer change when the past is cut; medoid turns are used as they are,
without an instruction in front; all caches stay on the device. The cost is one prefill per episode.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from types import TracebackType
from typing import Any

import torch

from kvfold.compression.observe import forget_prompt
from kvfold.engine.layer_major import Progress
from kvfold.errors import InputError
from kvfold.models.loader import Model
from kvfold.pages.compaction import rewrite
from kvfold.pages.layer import LayerChange
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.reply import Reply
from kvfold.session import Session
from kvfold.stats import Stats
from kvfold.tfidf import Topics

_Kept = list[list[torch.Tensor]]  # positions, by layer and head


class Episodes:
    """KV caches over one history, one for each of at most `num_episodes` clusters of `window` turns.

    `slots`: mean slots per head of each cache. `block_len`: tokens between two evictions, in whole turns.
    `num_typical`: medoids of a cluster, the windows whose queries score the history. `terms`: more terms of the policy,
    such as "ada + int8".
    """

    def __init__(
        self,
        model: Model,
        turns: Sequence[str],
        *,
        num_episodes: int = 4,
        slots: int = 1024,
        window: int = 4,
        block_len: int = 2048,
        num_typical: int = 4,
        terms: str = "ada",
        progress: Progress | None = None,
    ) -> None:
        counts = {"num_episodes": num_episodes, "slots": slots, "window": window}
        for name, value in (counts | {"block_len": block_len, "num_typical": num_typical}).items():
            if value < 1:
                raise InputError(f"{name} is {value}; it must be at least 1")
        if isinstance(turns, str) or not any(turn.strip() for turn in turns):
            raise InputError("turns is a list of texts, at least one of them not empty")
        self.model = model
        self.windows = ["\n".join(turns[i : i + window]) for i in range(0, len(turns), window)]
        self.topics = Topics.of(self.windows, num_episodes)
        self.sessions: list[Session] = []
        try:
            for episode in range(self.topics.count):
                patch = self._patch(episode, num_typical)
                self.sessions.append(self._start(len(patch), slots, terms))
                for block in self._blocks(turns, block_len):
                    self.sessions[-1].extend(block, compress=False, progress=progress)
                    _keep_for(self.sessions[-1], patch)
        except BaseException:
            self.close()
            raise

    def _patch(self, episode: int, num_typical: int) -> list[int]:
        """Tokens of an episode's medoid windows (the patched prompt of the paper)."""
        typical = [self.windows[i] for i in self.topics.medoids(episode, num_typical)]
        return self._ids("\n" + "\n".join(typical))

    def _start(self, patch_len: int, slots: int, terms: str) -> Session:
        """A session whose observation window is the patch; only tokens before it are scored."""
        size = slots + patch_len + PageConfig.open_len
        return Session(self.model, f"prefill(epicache(window={patch_len}) + {size}tok) + {terms}")

    def _blocks(self, turns: Sequence[str], block_len: int) -> Iterator[str]:
        """The history in pieces of whole turns; each but the last reaches `block_len` tokens."""
        block, length = "", 0
        for turn in turns:
            block, length = f"{block}{turn}\n", length + len(self._ids(f"{turn}\n"))
            if length >= block_len:
                yield block
                block, length = "", 0
        if block:
            yield block

    def _ids(self, text: str) -> list[int]:
        found: list[int] = self.model.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def route(self, question: str) -> int:
        """Index of the episode nearest to a question."""
        return self.topics.nearest(question)

    def ask(self, question: str, **options: Any) -> Reply:
        """Ask the nearest episode without changing it; options as for `Session.ask`."""
        if not self.sessions:
            raise InputError("the episodes are closed; make new ones")
        return self.sessions[self.route(question)].ask(question, **options)

    def stats(self) -> list[Stats]:
        """Sizes of every episode's cache."""
        return [session.stats() for session in self.sessions]

    def close(self) -> None:
        """Free the pages. Closing twice is fine."""
        for session in self.sessions:
            session.close()
        self.sessions = []

    def __enter__(self) -> Episodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@torch.inference_mode()
def _keep_for(session: Session, patch: Sequence[int]) -> None:
    """Evict the slots that a prefill of the patch would evict; the patch itself is not appended."""
    cache = session.cache
    heads = [range(layer.num_kv_heads) for layer in cache.spec.layers]
    with session.fork() as branch:
        branch.extend(patch)
        kept: _Kept = [[branch.cache.positions(i, head) for head in of] for i, of in enumerate(heads)]
    forget_prompt(cache)
    changes = [_without(cache, layer, kept[layer]) for layer in range(cache.spec.num_layers)]
    if any(change.keep is not None for change in changes):
        rewrite(cache, changes, 0)


def _without(cache: SequenceCache, layer: int, kept: Sequence[torch.Tensor]) -> LayerChange:
    """The change that keeps only the slots at these positions in a layer."""
    spec, device = cache.spec.layers[layer], cache.arena.device
    none_ND = torch.empty(0, spec.head_dim, dtype=cache.spec.kv_dtype, device=device)
    none_N = torch.empty(0, dtype=torch.int64, device=device)
    change = LayerChange(none_ND, none_ND, none_N, [0] * spec.num_kv_heads)
    stays = [torch.isin(cache.positions(layer, head), positions) for head, positions in enumerate(kept)]
    if spec.compressible and not all(stay_S.all() for stay_S in stays):
        change.keep = [stay_S.nonzero().flatten().to(device) for stay_S in stays]
    return change
