"""Keys of cached prefixes: a hash chain over token ids (as vLLM's block hashes), rooted in a digest of the binding.

A chunk's digest covers its parent's digest and its own token ids, so equal digests mean equal prefixes, and two prompts
share keys exactly as far as they agree. A snapshot's digest also covers the lengths at which the prefix was compressed,
since the kept slots depend on them. Keys do not depend on the process: no built-in hashes, no dictionary order.

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

import numpy as np
from numpy.typing import NDArray

FORMAT_REVISION = 2
CHUNK_LEN = 256  # tokens
PAGE_LEN = 16  # tokens: what is in memory is shared in multiples of it

Ids = NDArray[np.int64]
Kind = Literal["chunks", "snapshots", "marks", "packed", "ragged"]
_TEXT = re.compile(r"([0-9a-f]{32})-([0-9a-f]{1,8})-([0-9a-f]{1,8})-([0-9a-f]{64})")


class Key(NamedTuple):
    """Tokens start … end of a prefix: a chunk, a partial chunk that ends at a marker, or from 0 on a snapshot."""

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
        """None if the text is no key."""
        match = _TEXT.fullmatch(text)
        if match is None:
            return None
        key = cls(match[1], int(match[2], 16), int(match[3], 16), match[4])
        return key if key.text == text and key.start < key.end else None


@dataclass(frozen=True)
class Binding:
    """Everything besides tokens that stored KV depends on; digests of what is large.

    `pages` is empty where page sizes do not matter. `prefill_len`: the prefill chunk; other shapes round differently,
    and a hit is bitwise equal to a computed prefix. `form`: the encoding (`kvfold.store.entry.encodings`), so lossy
    entries are never served to a store of another one. `signer` identifies the signing secret: stores with different
    secrets share no entries.
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
        """For an entry's header; the tenant as a digest."""
        return {**asdict(self), "tenant": digest_text(self.tenant)}

    @property
    def scope(self) -> str:
        return scope_of(self.facts())


def scope_of(facts: object) -> str:
    """Scope of the binding in an entry's header."""
    return digest_text(json.dumps(facts, sort_keys=True))


def digest_text(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def chunk_keys(scope: str, tokens: Sequence[int], chunk_len: int, *, with_rest: bool = False) -> list[Key]:
    """A key for every whole chunk, in order; `with_rest`: also for the partial chunk after them."""
    digests = [_root(scope), *_links(scope, tokens, chunk_len)]
    found = [Key(scope, i * chunk_len, (i + 1) * chunk_len, digest.hex()) for i, digest in enumerate(digests[1:])]
    whole = len(found) * chunk_len
    if with_rest and whole < len(tokens):
        found.append(Key(scope, whole, len(tokens), _next(digests[-1], tokens[whole:]).hex()))
    return found


def snapshot_keys(
    scope: str, tokens: Sequence[int], lens: Iterable[int], chunk_len: int, cuts: Sequence[int] = ()
) -> list[Key]:
    """Keys of the prefixes of these lengths. `cuts`, ascending, are the lengths at which the prompt is compressed;
    those below a snapshot's length are part of its key."""
    digests = [_root(scope), *_links(scope, tokens, chunk_len)]
    found = []
    for length in lens:
        whole, rest = divmod(length, chunk_len)
        digest = _next(digests[whole], tokens[length - rest : length]) if rest else digests[whole]
        found.append(Key(scope, 0, length, _next(digest, [cut for cut in cuts if 0 < cut < length]).hex()))
    return found


def common_len(a_N: Ids, b_N: Ids) -> int:
    """Token ids from the first one on that are the same."""
    length = min(len(a_N), len(b_N))
    differs_N = a_N[:length] != b_N[:length]
    first = int(np.argmax(differs_N)) if length else 0
    return first if length and differs_N[first] else length


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
