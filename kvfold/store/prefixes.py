"""The prefix cache of one model, policy and tenant: where a hit is decided (lookup), and what is saved.

On a server cache markers and their lifetimes decide first (kvfold/serve/cache/source.py).

At least one prompt token is always left to prefill, for its logits. If an entry turns out invalid while it is loaded,
it is quarantined and the lookup restarts without it. Without `wait` that may happen during the prefill of the remaining
tokens (PrefixLost), and the caller looks up again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from kvfold.errors import InputError, OutOfPages, PrefixLost
from kvfold.models.loader import Model
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy
from kvfold.store.context import StoreContext
from kvfold.store.entry.encodings import ENCODINGS
from kvfold.store.entry.format import Fields, encode
from kvfold.store.entry.snapshot import read_slots, share_prefix, snapshot_blocks
from kvfold.store.events import Event, Reason
from kvfold.store.key import PAGE_LEN, Binding, Key, chunk_keys, snapshot_keys
from kvfold.store.lookup import Loader, Lookup
from kvfold.store.tiers.device import DeviceTier
from kvfold.store.tiers.eviction import Lease

Ttl = Literal["5m", "1h"] | float
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_MAX_TTL_S = 30 * 86400.0
_COPIED_CHUNKS = 16  # device-to-host copies at a time
_MOST_LOST = 8  # invalid copies in one lookup before it is a miss
_FLOPS = 1e13  # nominal: only ratios between entries matter


@dataclass(frozen=True)
class Hit:
    """A sequence owned by the caller with the KV of the first `matched_tokens`, and the slowest tier read; on a miss
    the sequence is empty and `miss` has the reason."""

    sequence: SequenceCache
    matched_tokens: int
    tier: str | None
    miss: Reason | None = None


class Prefixes:
    """Made by `PrefixStore.prefixes`; used by the model's thread."""

    def __init__(self, store: StoreContext, model: Model, policy: Policy, config: PageConfig, binding: Binding) -> None:
        self.binding = binding
        self._store = store
        self._model, self._policy, self._config = model, policy, config
        self.empty = partial(SequenceCache, model.arena, model.spec, policy, config)  # as on a miss; OutOfPages
        self._device = store.device
        self._encoding = ENCODINGS[binding.form]
        self._loader = Loader(binding, store.secret, store.max_entry_bytes, store.tiered.quarantine)
        self._seconds_per_token = 2 * sum(p.numel() for p in model.hf.parameters()) / _FLOPS

    def for_tenant(self, tenant: str) -> Prefixes:
        """The same model and policy for another tenant, without hashing the model again."""
        return Prefixes(self._store, self._model, self._policy, self._config, replace(self.binding, tenant=tenant))

    @property
    def has_chunks(self) -> bool:
        """Whether any whole chunk can be reused, not only snapshots at markers."""
        return self.binding.kind == "chunks"

    def save_lengths(self, num_tokens: int, markers: Sequence[int] | None = None) -> list[int]:
        """Lengths at which a prompt is saved, ascending; at least one token is left to prefill."""
        last = max(num_tokens - 1, 0)
        found = {marker for marker in markers or () if 0 < marker <= last}
        if self.has_chunks and (markers is None or max(markers, default=0) > last):
            found.add(last // self.binding.chunk_len * self.binding.chunk_len)
        return sorted(found - {0})

    @staticmethod
    def _reuse_len(num_tokens: int, markers: Sequence[int] | None) -> int:
        """Tokens that may be reused: up to the last marker, or the last page if that is not inside the prompt."""
        last, end = max(num_tokens - 1, 0), num_tokens if markers is None else max(markers, default=0)
        return end if end <= last else last - last % PAGE_LEN

    # Looking up

    def lookup(
        self,
        tokens: Sequence[int],
        *,
        markers: Sequence[int] | None = None,
        cuts: Sequence[int] | None = None,
        at: float | None = None,
        wait: bool = True,
    ) -> Hit:
        """The longest cached prefix, for a request that started `at` (default: now).

        `markers`: lengths at which snapshots may have been saved (default: all in the key index); with chunks, reuse
        ends at the last marker, or without markers at the last whole chunk, on the device at the last page. `cuts`:
        lengths at which this prompt is compressed (default: the markers); only snapshots compressed at the same lengths
        match. OutOfPages only if there is no memory for an empty sequence.

        Without `wait`, chunks may still be loading. Prefill the remaining tokens with `Runner.prefill`, which waits for
        each layer; on PrefixLost release the sequence and look up again. The hit is counted once all layers are loaded.
        """
        at = self._store.clock() if at is None else at
        keys = self._candidates(tokens, markers, cuts)
        found = self._find(keys, tokens[: self._reuse_len(len(tokens), markers)], at, wait) if keys else "too_short"
        if isinstance(found, Hit):
            return found
        self._store.events.emit(Event("missed", "", found, None, len(tokens)))
        return Hit(self.empty(), 0, None, found)

    def prefetch(
        self, tokens: Sequence[int], *, markers: Sequence[int], cuts: Sequence[int] | None = None, at: float
    ) -> None:
        """Copy what such a lookup would read to the fastest byte tier, in the background; thread-safe. Copies are
        checked when they are read."""
        if len(self._store.tiered.tiers) > 1:
            self._store.fetch_async(partial(self._fetch, tokens, markers, cuts, at))

    def _fetch(self, tokens: Sequence[int], markers: Sequence[int], cuts: Sequence[int] | None, at: float) -> None:
        """Chunks up to one that no tier has, or the longest snapshot; nothing if the device holds it all."""
        keys = self._candidates(tokens, markers, cuts)
        if not keys or self._store.key_index.has(keys[-1], 0.0, [DeviceTier.name]):
            return
        for key in keys if self.has_chunks else reversed(keys):
            is_there = self._store.tiered.prefetch(key, at, self._store.max_entry_bytes)
            if is_there != self.has_chunks:
                return

    def _candidates(
        self, tokens: Sequence[int], markers: Sequence[int] | None, cuts: Sequence[int] | None
    ) -> list[Key]:
        """Keys to look up, shortest first."""
        keys = self._keys_of(tokens, markers, cuts)
        self._store.name_blocks(self.binding, keys, tokens)
        return keys

    def _keys_of(self, tokens: Sequence[int], markers: Sequence[int] | None, cuts: Sequence[int] | None) -> list[Key]:
        scope, chunk_len = self.binding.scope, self.binding.chunk_len
        if self.has_chunks:
            end = max(self.save_lengths(len(tokens), markers), default=0)
            return chunk_keys(scope, tokens[:end], chunk_len, with_rest=True)
        lens = self.save_lengths(len(tokens), self._store.snapshots(scope) if markers is None else markers)
        cuts = sorted(markers or ()) if cuts is None else cuts
        keys = snapshot_keys(scope, tokens, lens, chunk_len, cuts)
        return [key for key in keys if markers is not None or key in self._store.key_index]

    def _find(self, keys: Sequence[Key], tokens: Sequence[int], at: float, wait: bool) -> Hit | Reason:
        """Retry after an invalid copy, which the next attempt skips, and after freeing device memory. Ends as a miss
        after _MOST_LOST invalid copies, since each attempt reads the valid ones again."""
        device, num_lost = self._store.device, 0
        while num_lost < _MOST_LOST:
            attempt = Lookup(self._store, self._loader, self.empty, at)
            try:
                found = attempt.read_chunks(keys, tokens) if self.has_chunks else attempt.read_snapshot(keys)
                if wait:
                    attempt.wait()
            except PrefixLost:
                num_lost += 1
            except OutOfPages:
                if device is None or not device.shrink():
                    return "no_memory"
            else:
                if attempt.sequence is None:
                    break
                hit = Hit(attempt.sequence, attempt.sequence.committed_len, attempt.tier)
                on_hit = partial(self._on_hit, attempt, found, tokens[: hit.matched_tokens], at)
                if hit.sequence.loading is None:
                    on_hit()
                else:
                    hit.sequence.loading.then = on_hit
                return hit
        return self._store.key_index.miss_reason(keys[0] if self.has_chunks else keys[-1])

    def _on_hit(self, attempt: Lookup, keys: Sequence[Key], tokens: Sequence[int], at: float) -> None:
        """Promote what was read to faster tiers, and refresh the time to live of all that was used."""
        tiered, used = self._store.tiered, attempt.used
        self._store.events.emit(Event("hit", attempt.tier, None, None, len(tokens)))
        for one in used:
            self._store.key_index.set_ttl(one.copy.key, one.lease.ttl_s)
            if not one.copy.is_pending:
                self._store.found_block(one.copy.tier.name, one.copy.key)
            tiered.promote_async(one.copy.key, one.copy.tier, one.num_bytes, one.lease)
        tiered.touch_async([one.copy for one in used], keys, at)
        if used and self._device is not None and attempt.sequence is not None:
            worth = sum(one.lease.saved_s for one in used)
            lease = Lease(at, min(one.lease.ttl_s for one in used), worth)
            if self._device.put_chunks(keys, attempt.sequence, lease, tokens if self.has_chunks else None):
                self._device.emit("promoted", keys[-1], 0)

    # Saving

    def save(
        self,
        sequence: SequenceCache,
        tokens: Sequence[int],
        *,
        upto: int | None = None,
        cuts: Sequence[int] = (),
        ttl: Ttl = "5m",
        at: float | None = None,
        prefill_s: float | None = None,
    ) -> int:
        """Store the sequence's KV of the first `upto` of `tokens`, for a request that started `at` (default: now).

        Returns the number of tokens a lookup can find. Chunks: all sealed whole ones, and a partial one that ends at
        `upto`. Snapshots: at the sequence's own length only; `cuts` are the lengths at which it was compressed before.
        `prefill_s`, the prefill time of these tokens, is their value for eviction (default: estimated from the model's
        size).
        """
        ttl_s, at = _ttl_s(ttl), self._store.clock() if at is None else at
        end = min(len(tokens) if upto is None else upto, len(tokens))
        if self.has_chunks:
            end = min(end, sequence.sealed_len)
            keys = chunk_keys(self.binding.scope, tokens[:end], self.binding.chunk_len, with_rest=end == upto)
        else:
            if end != sequence.committed_len:
                raise InputError(
                    f"the sequence has {sequence.committed_len} tokens and upto is {end}; a compressed sequence can be "
                    "saved at its own length only: save it there"
                )
            keys = snapshot_keys(self.binding.scope, tokens, [end] if end else [], self.binding.chunk_len, cuts)
        if not keys:
            return 0
        self._store.name_blocks(self.binding, keys, tokens)
        per_token = self._seconds_per_token if prefill_s is None else prefill_s / end
        is_held = self._put_on_device(sequence, tokens, keys, Lease(at, ttl_s, per_token * keys[-1].end))
        if not self._store.offload:
            return keys[-1].end if is_held else 0
        tiers = [tier.name for tier in self._store.tiered.tiers]
        missing = [key for key in keys if not self._store.key_index.has(key, ttl_s, tiers)]
        for begin in range(0, len(missing), _COPIED_CHUNKS):
            group = missing[begin : begin + _COPIED_CHUNKS]
            for key, blocks in zip(group, self._blocks(sequence, group), strict=True):
                self._write(key, blocks, Lease(at, ttl_s, per_token * key.num_tokens))
        return keys[-1].end

    def _put_on_device(self, sequence: SequenceCache, tokens: Sequence[int], keys: Sequence[Key], lease: Lease) -> bool:
        """Share pages copy-on-write. Whether the device holds them."""
        device, ids = self._device, tokens if self.has_chunks else None
        if device is None:
            return False
        if device.serves(keys[-1], lease):
            return True
        if sequence.committed_len == keys[-1].end:
            return device.put_chunks(keys, sequence, lease, ids)
        whole = None
        try:
            whole = sequence.fork()  # the tail becomes a segment, whose first slots can be shared
            first = share_prefix(whole, keys[-1].end)
        except OutOfPages:
            device.emit("failed", keys[-1], 0, "no_room")
            return False
        finally:
            if whole is not None:
                whole.release()
        is_held = device.put_chunks(keys, first, lease, ids)
        first.release()
        return is_held

    def _blocks(self, sequence: SequenceCache, keys: Sequence[Key]) -> list[dict[str, Fields]]:
        """Blocks of each key, copied to the host: one copy per layer is faster than one per chunk."""
        if not self.has_chunks:
            return [snapshot_blocks(sequence)]
        found: list[dict[str, Fields]] = [{} for _ in keys]
        start = keys[0].start
        for i in range(sequence.spec.num_layers):
            fields = {name: x.cpu() for name, x in read_slots(sequence, i, start, keys[-1].end).items()}
            for key, blocks in zip(keys, found, strict=True):
                mine = slice(key.start - start, key.end - start)
                blocks[str(i)] = {name: x_HNW[:, mine] for name, x_HNW in fields.items()}
        return found

    def _write(self, key: Key, blocks: dict[str, Fields], lease: Lease) -> None:
        num_bytes = sum(tensor.nbytes for fields in blocks.values() for tensor in fields.values())
        job = partial(self._encode, key, blocks, lease)
        if self._store.tiered.put_async(key, num_bytes, job, lease):
            self._store.key_index.set_ttl(key, lease.ttl_s)

    def _encode(self, key: Key, blocks: dict[str, Fields], lease: Lease) -> bytes:
        if self.has_chunks:
            blocks = {name: self._encoding.pack(x, int(name) / len(blocks)) for name, x in blocks.items()}
        return encode(key, self.binding, blocks, lease, self._store.secret)


def _ttl_s(ttl: Ttl) -> float:
    found = _TTL_S.get(ttl) if isinstance(ttl, str) else float(ttl)
    if found is None or not 1 <= found <= _MAX_TTL_S:
        raise InputError(f'a time to live is "5m", "1h" or 1 to {_MAX_TTL_S:.0f} seconds, not {ttl!r}')
    return found
