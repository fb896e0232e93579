"""Names of stored prefixes: a hash chain over token ids, under everything that what is stored depends on.

A chunk's digest covers its parent's digest and its own token ids, so equal digests mean equal prefixes, and two prompts
that begin alike share names exactly as far as they agree. A snapshot's digest also covers the lengths at which the
prefix was compressed on the way, since what was kept depends on them. Nothing here depends on the process: no built-in
hashes, no order of dictionaries.

    scope     blake2b-128 over a Binding: weights, dtypes, RoPE, tokenizer, policy, pages, tenant, format
    digest_0  blake2b-256(scope)
    digest_i  blake2b-256(digest_i-1, ids of chunk i as uint32, little-endian)
    snapshot  blake2b-256(digest of its last tokens, lengths of earlier compressions as uint32, little-endian)
"""

from __future__ import annotations

import hashlib
import json
import re
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from sys import byteorder
from typing import Literal, NamedTuple

FORMAT_REVISION = 2
CHUNK_LEN = 256  # tokens

Kind = Literal["chunks", "snapshots", "marks"]
_TEXT = re.compile(r"([0-9a-f]{32})-([0-9a-f]{1,8})-([0-9a-f]{1,8})-([0-9a-f]{64})")


class Key(NamedTuple):
    """Slots of the tokens start … end of one prefix: of a chunk, of a part of one that ends at a marker, or of all from
    0 on in a snapshot."""

    scope: str
    start: int
    end: int
    digest: str

    @property
    def num_tokens(self) -> int:
        return self.end - self.start

    @property
    def text(self) -> str:
        return f"{self.scope}-{self.start:x}-{self.end:x}-{self.digest}"

    @classmethod
    def parse(cls, text: str) -> Key | None:
        """None if this is no key's text."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        key = cls(match[1], int(match[2], 16), int(match[3], 16), match[4])
        return key if key.text == text and key.start < key.end else None


@dataclass(frozen=True)
class Binding:
    """What stored slots depend on besides their tokens; a digest each, where the thing itself is large.

    `pages` is empty where page sizes change nothing of what is stored. `prefill_len` are the tokens a layer ran at a
    time: other shapes round differently, and a hit has to be bitwise what would have been computed. `form` is that of
    `kvfold.store.entry.encodings`: what lost something in it is served to nobody who asked for another. `signer` names
    the secret that entries are signed with: stores of different secrets leave each other's entries alone.
    """

    kind: Kind
    weights: str
    dtype: str
    kv_dtype: str
    rope: str
    tokenizer: str
    policy: str
    pages: str
    prefill_len: int
    chunk_len: int
    tenant: str
    form: str = "exact"
    signer: str = ""
    revision: int = FORMAT_REVISION

    def facts(self) -> dict[str, str | int]:
        """For a header; the tenant appears as a digest only."""
        return {**asdict(self), "tenant": digest_text(self.tenant)}

    @property
    def scope(self) -> str:
        return scope_of(self.facts())


def scope_of(facts: object) -> str:
    """The scope of what a header says an entry is bound to."""
    return digest_text(json.dumps(facts, sort_keys=True))


def digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def chunk_keys(scope: str, tokens: Sequence[int], chunk_len: int, *, with_rest: bool = False) -> list[Key]:
    """A key for every whole chunk, in order; `with_rest`, one also for the tokens behind them."""
    digests = [_root(scope), *_links(scope, tokens, chunk_len)]
    found = [Key(scope, i * chunk_len, (i + 1) * chunk_len, digest.hex()) for i, digest in enumerate(digests[1:])]
    whole = len(found) * chunk_len
    if with_rest and whole < len(tokens):
        found.append(Key(scope, whole, len(tokens), _next(digests[-1], tokens[whole:]).hex()))
    return found


def snapshot_keys(
    scope: str, tokens: Sequence[int], lens: Iterable[int], chunk_len: int, cuts: Sequence[int] = ()
) -> list[Key]:
    """The keys of the first so many tokens, for every length; the last chunk of one may be a part. `cuts`, ascending,
    are the lengths at which the tokens are compressed; those before its own are part of a key."""
    digests = [_root(scope), *_links(scope, tokens, chunk_len)]
    found = []
    for length in lens:
        whole, rest = divmod(length, chunk_len)
        digest = _next(digests[whole], tokens[length - rest : length]) if rest else digests[whole]
        found.append(Key(scope, 0, length, _next(digest, [cut for cut in cuts if 0 < cut < length]).hex()))
    return found


def _links(scope: str, tokens: Sequence[int], chunk_len: int) -> Iterator[bytes]:
    digest = _root(scope)
    for end in range(chunk_len, len(tokens) + 1, chunk_len):
        digest = _next(digest, tokens[end - chunk_len : end])
        yield digest


def _root(scope: str) -> bytes:
    return hashlib.blake2b(scope.encode(), digest_size=32).digest()


def _next(parent: bytes, tokens: Sequence[int]) -> bytes:
    ids = array("I", tokens)
    if byteorder == "big":
        ids.byteswap()
    return hashlib.blake2b(parent + ids.tobytes(), digest_size=32).digest()
