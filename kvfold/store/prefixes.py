"""The prefixes of one model under one policy, for one tenant: look up, save.

At least one token is always left to run, for its logits. If an entry turns out bad half-way, it is set aside, what was
filled so far is dropped, and the lookup starts again without it. Where the caller does not `wait`, this may come out in
the pass over the tokens behind the prefix, and the caller starts again.
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
from kvfold.store.entry.encodings import FORMS
from kvfold.store.entry.format import Fields, encode
from kvfold.store.entry.slots import copy_prefix, read_slots
from kvfold.store.entry.snapshot import take
from kvfold.store.events import Event, Reason
from kvfold.store.key import Binding, Key, chunk_keys, snapshot_keys
from kvfold.store.load import Loader
from kvfold.store.lookup import Reading
from kvfold.store.tiers.device import DeviceTier
from kvfold.store.tiers.eviction import Lease

Ttl = Literal["5m", "1h"] | float
_TTL_S = {"5m": 300.0, "1h": 3600.0}
_MAX_TTL_S = 30 * 86400.0
_COPIED_CHUNKS = 16  # at a time
_MOST_LOST = 8  # bad copies that one lookup comes upon before it is a miss
_FLOPS = 1e13  # nominal: entries are compared with each other


@dataclass(frozen=True)
class Hit:
    """A sequence of the caller's own that has read the first `matched_tokens`, and the slowest tier some came from; on
    a miss the sequence is empty, and `miss` says why."""

    sequence: SequenceCache
    matched_tokens: int
    tier: str | None
    miss: Reason | None = None


class Prefixes:
    """Made by `PrefixStore.prefixes`; used by the thread that runs the model."""

    def __init__(self, store: StoreContext, model: Model, policy: Policy, config: PageConfig, binding: Binding) -> None:
        self.binding = binding
        self._store = store
        self._model, self._policy, self._config = model, policy, config
        self._new = partial(SequenceCache, model.arena, model.spec, policy, config)
        self._device = store.device
        self._form = FORMS[binding.form]
        self._loader = Loader(binding, store.secret, store.max_entry_bytes, store.cascade.set_aside)
        self._seconds_per_token = 2 * sum(p.numel() for p in model.hf.parameters()) / _FLOPS

    def for_tenant(self, tenant: str) -> Prefixes:
        """Of the same model and policy, for somebody else; quicker to make than the first ones."""
        return Prefixes(self._store, self._model, self._policy, self._config, replace(self.binding, tenant=tenant))

    @property
    def has_chunks(self) -> bool:
        """Whether any whole chunk can be reused, not only what was saved at exactly some marker."""
        return self.binding.kind == "chunks"

    def stops(self, num_tokens: int, markers: Sequence[int] | None = None) -> list[int]:
        """Lengths at which a prompt of so many tokens is to be saved, ascending: at least one token is left to run."""
        last = max(num_tokens - 1, 0)
        found = {marker for marker in markers or () if 0 < marker <= last}
        if self.has_chunks and (markers is None or max(markers, default=0) > last):
            found.add(last // self.binding.chunk_len * self.binding.chunk_len)
        return sorted(found - {0})

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
        """The longest stored prefix, for a request that started `at` (now).

        `markers` are lengths at which snapshots may lie (default: all that this process knows of); where chunks are
        stored, reuse ends at the last one, or without markers with the last whole chunk. `cuts` are the lengths at
        which this prompt is compressed (default: the markers): a snapshot that was compressed elsewhere on its way is
        not the prefix of this prompt. OutOfPages only if there is no memory for an empty sequence.

        Without `wait` the layers of chunks may still be on their way. The tokens that are left are to be read with
        `Runner.prefill`, which waits for each layer where it needs it; on PrefixLost release the sequence and look up
        again. The hit counts as one when all layers are there.
        """
        at = self._store.clock() if at is None else at
        keys = self._candidates(tokens, markers, cuts)
        found = self._find(keys, at, wait) if keys else "too_short"
        if isinstance(found, Hit):
            return found
        self._store.events.emit(Event("missed", "", found, None, len(tokens)))
        return Hit(self._new(), 0, None, found)

    def empty(self) -> SequenceCache:
        """What a lookup that finds nothing would begin with; OutOfPages if there is no memory for it."""
        return self._new()

    def prefetch(
        self, tokens: Sequence[int], *, markers: Sequence[int], cuts: Sequence[int] | None = None, at: float
    ) -> None:
        """Bring what such a lookup will ask for to the fastest tier, in the background; any thread may call this.

        Copies are checked when they are looked up, as all are.
        """
        if len(self._store.cascade.tiers) > 1:
            self._store.fetch_later(partial(self._fetch, tokens, markers, cuts, at))

    def _fetch(self, tokens: Sequence[int], markers: Sequence[int], cuts: Sequence[int] | None, at: float) -> None:
        """Chunks up to one that nobody has, or the longest snapshot there is; nothing if the device holds it all."""
        keys = self._candidates(tokens, markers, cuts)
        if not keys or self._store.known.has(keys[-1], 0.0, [DeviceTier.name]):
            return
        for key in keys if self.has_chunks else reversed(keys):
            is_there = self._store.cascade.bring(key, at, self._store.max_entry_bytes)
            if is_there != self.has_chunks:
                return

    def _candidates(
        self, tokens: Sequence[int], markers: Sequence[int] | None, cuts: Sequence[int] | None
    ) -> list[Key]:
        """Keys of what may be stored, shortest first."""
        scope, chunk_len = self.binding.scope, self.binding.chunk_len
        if self.has_chunks:
            end = max(self.stops(len(tokens), markers), default=0)
            return chunk_keys(scope, tokens[:end], chunk_len, with_rest=True)
        lens = self.stops(len(tokens), self._store.snapshots(scope) if markers is None else markers)
        cuts = sorted(markers or ()) if cuts is None else cuts
        keys = snapshot_keys(scope, tokens, lens, chunk_len, cuts)
        return [key for key in keys if markers is not None or key in self._store.known]

    def _find(self, keys: Sequence[Key], at: float, wait: bool) -> Hit | Reason:
        """Try until an attempt ends. One that does not has met a bad copy, which the next leaves out, or frees memory;
        a lookup that meets many bad copies is over: each attempt reads what is good once more."""
        device, num_lost = self._store.device, 0
        while num_lost < _MOST_LOST:
            reading = Reading(self._store, self._loader, self._new, at)
            try:
                found = reading.read_chunks(keys) if self.has_chunks else reading.read_snapshot(keys)
                if wait:
                    reading.wait()
            except PrefixLost:
                num_lost += 1
            except OutOfPages:
                if device is None or not device.shrink():
                    return "no_memory"
            else:
                if reading.sequence is None:
                    break
                hit = Hit(reading.sequence, found[-1].end, reading.tier)
                if hit.sequence.loading is None:
                    self._used(reading, found, at)
                else:
                    hit.sequence.loading.then = partial(self._used, reading, found, at)
                return hit
        return self._store.known.why(keys[0] if self.has_chunks else keys[-1])

    def _used(self, reading: Reading, keys: Sequence[Key], at: float) -> None:
        """What was read goes to faster tiers, and all that was used lives longer."""
        cascade, used = self._store.cascade, reading.used
        self._store.events.emit(Event("hit", reading.tier, None, None, keys[-1].end))
        for one in used:
            self._store.known.lives(one.copy.key, one.lease.ttl_s)
            cascade.promote_later(one.copy.key, one.copy.tier, one.num_bytes, one.lease)
        cascade.slide_later([one.copy for one in used], keys, at)
        if used and self._device is not None and reading.sequence is not None:
            worth = sum(one.lease.saved_s for one in used)
            lease = Lease(at, min(one.lease.ttl_s for one in used), worth)
            if self._device.put_chunks(keys, reading.sequence, lease):
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
        """Keep what the sequence has read of `tokens`, up to `upto` of them, for a request that started `at` (now).

        Returns how many tokens can be found again from now on. Where chunks are stored, whole ones that are sealed
        are, and the tokens behind the last one if `upto` names their end; a snapshot is kept at the sequence's own
        length only, with `cuts`, the lengths at which it was compressed before. `prefill_s`, the time these tokens
        took, tells what they are worth; without it that is estimated from the model's size.
        """
        ttl_s, at = _ttl_s(ttl), self._store.clock() if at is None else at
        end = min(len(tokens) if upto is None else upto, len(tokens))
        if self.has_chunks:
            end = min(end, sequence.sealed_len)
            keys = chunk_keys(self.binding.scope, tokens[:end], self.binding.chunk_len, with_rest=end == upto)
        else:
            _check_length(end, sequence)
            keys = snapshot_keys(self.binding.scope, tokens, [end] if end else [], self.binding.chunk_len, cuts)
        if not keys:
            return 0
        per_token = self._seconds_per_token if prefill_s is None else prefill_s / end
        self._hold(sequence, keys, Lease(at, ttl_s, per_token * keys[-1].end))
        missing = [key for key in keys if not self._is_stored(key, ttl_s)]
        for begin in range(0, len(missing), _COPIED_CHUNKS):
            group = missing[begin : begin + _COPIED_CHUNKS]
            for key, blocks in zip(group, self._blocks(sequence, group), strict=True):
                self._write(key, blocks, Lease(at, ttl_s, per_token * key.num_tokens))
        return keys[-1].end

    def _hold(self, sequence: SequenceCache, keys: Sequence[Key], lease: Lease) -> None:
        """On the device, by reference where the sequence ends with the last key, else as a copy."""
        device = self._device
        if device is None or device.serves(keys[-1], lease):
            return
        if sequence.committed_len == keys[-1].end:
            device.put_chunks(keys, sequence, lease)
            return
        try:
            copy = copy_prefix(sequence, keys[-1].end)
        except OutOfPages:
            device.emit("failed", keys[-1], 0, "no_room")
            return
        device.put_chunks(keys, copy, lease)
        copy.release()

    def _is_stored(self, key: Key, ttl_s: float) -> bool:
        return self._store.known.has(key, ttl_s, [tier.name for tier in self._store.cascade.tiers])

    def _blocks(self, sequence: SequenceCache, keys: Sequence[Key]) -> list[dict[str, Fields]]:
        """Of each key, copied to the host: of a device, a copy per layer is quicker than one per chunk."""
        if not self.has_chunks:
            return [take(sequence)]
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
        if self._store.cascade.put_later(key, num_bytes, job, lease):
            self._store.known.lives(key, lease.ttl_s)

    def _encode(self, key: Key, blocks: dict[str, Fields], lease: Lease) -> bytes:
        if self.has_chunks:
            blocks = {name: self._form.pack(x, int(name) / len(blocks)) for name, x in blocks.items()}
        return encode(key, self.binding, blocks, lease, self._store.secret)


def _ttl_s(ttl: Ttl) -> float:
    found = _TTL_S.get(ttl) if isinstance(ttl, str) else float(ttl)
    if found is None or not 1 <= found <= _MAX_TTL_S:
        raise InputError(f'a time to live is "5m", "1h" or 1 to {_MAX_TTL_S:.0f} seconds, not {ttl!r}')
    return found


def _check_length(end: int, sequence: SequenceCache) -> None:
    if end != sequence.committed_len:
        raise InputError(
            f"the sequence has read {sequence.committed_len} tokens and {end} are to be saved; what was compressed "
            "can be saved at its own length only: save it there"
        )
