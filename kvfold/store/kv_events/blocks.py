"""Which blocks of prompts the tiers of a store hold: the store's events, translated to KV events.

A block is a whole chunk of token ids. An entry of a byte tier is one block, or as a snapshot (compressed KV of a whole
prefix) all whole blocks of the original tokens; one of the device tier is all blocks up to its end. Entries may share
blocks: a block is stored with the first of them in a medium and removed with the last.

    tier    device   host   disk      shared by machines (Redis)
    medium  GPU      CPU    STORAGE   not told: no server holds it more than another
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import NamedTuple

from kvfold.store.events import Event
from kvfold.store.key import Binding, Key, chunk_keys, digest_text
from kvfold.store.kv_events.messages import (
    MEDIUM_CPU,
    MEDIUM_GPU,
    MEDIUM_STORAGE,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    ExtraKeys,
)
from kvfold.store.tiers.device import DeviceTier
from kvfold.store.tiers.host import HostTier

_MEDIA = {DeviceTier.name: MEDIUM_GPU, HostTier.name: MEDIUM_CPU}
_MAX_NAMED = 1 << 14  # blocks whose token ids are remembered: of prompts that are looked up or saved
_MAX_ENTRIES = 1 << 16  # of all tiers; the oldest are told as removed
Change = BlockStored | BlockRemoved | AllBlocksCleared


@dataclass(frozen=True)
class _Block:
    parent: str | None
    token_ids: array[int]
    extra: ExtraKeys


class _Named(NamedTuple):
    """The last whole block of an entry's tokens, and whether the entry is a snapshot."""

    tail: str
    is_snapshot: bool


class BlockIndex:
    """Thread-safe; `publish` is called in the order of changes, and must return at once."""

    def __init__(self, publish: Callable[[Change], None], shared: Collection[str] = ()) -> None:
        """`shared`: names of tiers that are left out."""
        self._publish, self._shared = publish, shared
        self._lock = Lock()
        self._blocks: OrderedDict[str, _Block] = OrderedDict()
        self._named: OrderedDict[Key, _Named] = OrderedDict()
        self._entries: OrderedDict[tuple[str, Key], list[str]] = OrderedDict()
        self._held: Counter[tuple[str, str]] = Counter()  # entries by medium and block
        publish(AllBlocksCleared())

    # What the store tells

    def name(self, binding: Binding, keys: Sequence[Key], tokens: Sequence[int]) -> None:
        """These keys are those of prefixes of `tokens`, shortest first."""
        if not keys or keys[-1].end < binding.chunk_len:
            return
        size, is_snapshot = binding.chunk_len, binding.kind != "chunks"
        chunks = chunk_keys(binding.scope, tokens[: keys[-1].end], size) if is_snapshot else keys
        whole = [key.digest for key in chunks if key.num_tokens == size]
        salt = digest_text(binding.tenant) if binding.tenant else ""
        extra = ("kvfold", binding.policy, salt)
        with self._lock:
            for number, digest in enumerate(whole):
                if digest not in self._blocks:
                    ids = array("I", tokens[number * size : (number + 1) * size])
                    self._blocks[digest] = _Block(whole[number - 1] if number else None, ids, extra)
                _keep(self._blocks, digest)
            for key in keys:
                if key.end >= size:
                    self._named[key] = _Named(whole[key.end // size - 1], is_snapshot)
                    _keep(self._named, key)

    def on_event(self, event: Event) -> None:
        """Subscriber of the store's events."""
        if event.key is None or not event.tier:
            return
        if event.kind == "stored":
            self.found(event.tier, event.key)
        elif event.kind in ("evicted", "quarantined", "failed"):
            self.lost([event.key], [event.tier])

    def found(self, tier: str, key: Key) -> None:
        """A tier holds this entry; nothing is told of one whose tokens are not known, as markers."""
        with self._lock:
            named = self._named.get(key)
            if named is None or tier in self._shared or (tier, key) in self._entries:
                return
            if tier == DeviceTier.name or named.is_snapshot:
                blocks = list(reversed(list(self._chain(named.tail))))
            else:
                blocks = [key.digest] if key.digest == named.tail and key.digest in self._blocks else []
            self._entries[tier, key] = blocks
            self._add(_medium(tier), blocks)
            if len(self._entries) > _MAX_ENTRIES:
                (oldest, _), gone = self._entries.popitem(last=False)
                self._remove(_medium(oldest), gone)

    def lost(self, keys: Iterable[Key], tiers: Sequence[str]) -> None:
        """These tiers do not hold these entries."""
        with self._lock:
            for key in keys:
                for tier in tiers:
                    self._remove(_medium(tier), self._entries.pop((tier, key), []))

    # What routers are told

    def _chain(self, digest: str | None) -> Iterator[str]:
        """A block and those before it, as far as they are known."""
        while digest is not None and (block := self._blocks.get(digest)) is not None:
            yield digest
            digest = block.parent

    def _add(self, medium: str, digests: Sequence[str]) -> None:
        new: list[str] = []  # a run of blocks one behind the other
        for digest in digests:
            self._held[medium, digest] += 1
            if self._held[medium, digest] == 1:
                new.append(digest)
            elif new:
                self._publish(self._stored(medium, new))
                new = []
        if new:
            self._publish(self._stored(medium, new))

    def _stored(self, medium: str, digests: Sequence[str]) -> BlockStored:
        blocks = [self._blocks[digest] for digest in digests]
        parent = blocks[0].parent
        return BlockStored(
            block_hashes=[bytes.fromhex(digest) for digest in digests],
            parent_block_hash=None if parent is None else bytes.fromhex(parent),
            token_ids=[token for block in blocks for token in block.token_ids],
            block_size=len(blocks[0].token_ids),
            lora_id=None,
            medium=medium,
            lora_name=None,
            extra_keys=[block.extra for block in blocks],
        )

    def _remove(self, medium: str, digests: Sequence[str]) -> None:
        """The last of a prompt first, so that none is without the block before it."""
        gone = []
        for digest in reversed(digests):
            self._held[medium, digest] -= 1
            if not self._held[medium, digest]:
                del self._held[medium, digest]
                gone.append(bytes.fromhex(digest))
        if gone:
            self._publish(BlockRemoved(gone, medium))


def _medium(tier: str) -> str:
    return _MEDIA.get(tier, MEDIUM_STORAGE)


def _keep(found: OrderedDict[str, _Block] | OrderedDict[Key, _Named], newest: str | Key) -> None:
    """Drop the oldest beyond the limit."""
    found.move_to_end(newest)  # type: ignore[arg-type]
    if len(found) > _MAX_NAMED:
        found.popitem(last=False)
