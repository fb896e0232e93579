"""Entry format of the prefix cache: preamble, signed JSON header, one safetensors block per layer with a digest each.

    preamble   magic, revision, time to live (s), header length, prefill time saved (µs)      28 bytes
    header     JSON: key, binding, and of every block its name, bytes and digest              at most 1 MiB
    digest     blake2b-256 over preamble and header
    blocks     safetensors of one layer each, after those of the whole sequence, if any

Every digest is keyed with the store's secret, if it has one. A reader trusts nothing: lengths are checked against
limits and the file size before allocation, a block is returned only if its digest matches, nothing is unpickled. Blocks
are read one by one, so that the first layers can be used while later ones are loading.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO, Literal, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from kvfold.errors import FileError, InputError
from kvfold.store.key import FORMAT_REVISION, Binding, Key, scope_of
from kvfold.store.tiers.eviction import Lease

VARIABLE = "KVFOLD_STORE_SECRET"
_MIN_BYTES = 16
_MAX_BYTES = 64  # the longest key of blake2b


def read_secret(path: str | Path | None) -> bytes:
    """From a file, else the variable, else empty; trailing white space is stripped. Never from the command line, which
    other users of a machine can read."""
    if path is None:
        text = os.environ.get(VARIABLE)
        return b"" if text is None else _checked(text.encode(), VARIABLE)
    try:
        with open(path, "rb") as file:
            return _checked(file.read(1 << 10), str(path))
    except OSError as error:
        raise FileError(f"the secret in {path} cannot be read ({error}); name a file that holds it") from error


def _checked(data: bytes, place: str) -> bytes:
    secret = data.rstrip()
    _check_length(len(secret), f"the secret in {place}")
    return secret


def check_secret(secret: bytes) -> None:
    """InputError unless it is empty or of valid length."""
    if secret:
        _check_length(len(secret), "the secret")


def _check_length(num_bytes: int, name: str) -> None:
    if not _MIN_BYTES <= num_bytes <= _MAX_BYTES:
        hint = "random ones, such as those of `openssl rand -hex 32`"
        raise InputError(f"{name} has {num_bytes} bytes; give {_MIN_BYTES} to {_MAX_BYTES} {hint}")


def signer_of(secret: bytes) -> str:
    """Public identifier of a secret; empty without one."""
    return hashlib.blake2b(b"kvfold signer", digest_size=16, key=secret).hexdigest() if secret else ""


MAGIC = b"KVFOLD\x00P"
MAX_HEADER_BYTES = 1 << 20
MAX_ENTRY_BYTES = 4 << 30
_PREAMBLE = struct.Struct("<8sHxxIIQ")
PREAMBLE_BYTES = _PREAMBLE.size
_DIGEST_BYTES = 32
_MAX_UINT32 = (1 << 32) - 1

Fields = dict[str, Tensor]
InvalidReason = Literal["corrupt", "truncated", "foreign", "swapped", "unsigned"]


class InvalidEntry(FileError):
    """An entry that cannot be used."""

    def __init__(self, reason: InvalidReason, detail: str) -> None:
        super().__init__(f"a cached prefix is {reason}: {detail}; it is quarantined and recomputed")
        self.reason = reason


class Preamble(NamedTuple):
    """Readable before the entry is checked."""

    ttl_s: int
    saved_s: float
    header_bytes: int


class _Block(NamedTuple):
    name: str
    num_bytes: int
    digest: str


def encode(key: Key, binding: Binding, blocks: Mapping[str, Fields], lease: Lease, secret: bytes = b"") -> bytes:
    """Blocks in order; names are layer numbers, or "sequence"."""
    payload = [save({name: tensor.contiguous() for name, tensor in fields.items()}) for fields in blocks.values()]
    listed = [(name, len(data), _digest(data, secret)) for name, data in zip(blocks, payload, strict=True)]
    header = json.dumps({"key": key.text, "binding": binding.facts(), "blocks": listed}).encode()
    ttl_s, saved_us = min(round(lease.ttl_s), _MAX_UINT32), round(1e6 * lease.saved_s)
    head = _PREAMBLE.pack(MAGIC, FORMAT_REVISION, ttl_s, len(header), saved_us) + header
    return b"".join((head, bytes.fromhex(_digest(head, secret)), *payload))


def peek(data: bytes) -> Preamble | None:
    """The unchecked preamble; None without the magic and revision."""
    if len(data) < PREAMBLE_BYTES:
        return None
    magic, revision, ttl_s, header_bytes, saved_us = _PREAMBLE.unpack_from(data)
    return Preamble(ttl_s, saved_us / 1e6, header_bytes) if (magic, revision) == (MAGIC, FORMAT_REVISION) else None


def claims(data: bytes) -> tuple[int, float]:
    """Time to live and prefill time saved, in seconds, as the unchecked preamble says; 0 if there is none."""
    preamble = peek(data)
    return (0, 0.0) if preamble is None else (preamble.ttl_s, preamble.saved_s)


class EntryReader:
    """Reads and checks one entry block by block. InvalidEntry if it does not match key and `binding`; with None for
    `binding`, if it does not match its key. `facts`: the entry's binding."""

    def __init__(
        self,
        file: BinaryIO,
        key: Key,
        binding: Binding | None,
        *,
        secret: bytes = b"",
        max_bytes: int = MAX_ENTRY_BYTES,
    ) -> None:
        self._file = file
        self._secret = secret
        self.num_bytes = file.seek(0, os.SEEK_END)
        file.seek(0)
        self.preamble, header = self._read_header(key)
        _check_header(header, key, binding)
        self.facts: dict[str, Any] = header["binding"]
        self._blocks = _listed(header)
        self._check_sizes(max_bytes)

    def _read_header(self, key: Key) -> tuple[Preamble, dict[str, Any]]:
        fixed = self._read(PREAMBLE_BYTES)
        preamble = peek(fixed)
        if preamble is None:
            raise InvalidEntry("foreign", "it has no preamble of this revision")
        if preamble.header_bytes > MAX_HEADER_BYTES:
            raise InvalidEntry("corrupt", f"its header claims {preamble.header_bytes} bytes")
        text = self._read(preamble.header_bytes)
        if not hmac.compare_digest(self._read(_DIGEST_BYTES).hex(), _digest(fixed + text, self._secret)):
            if _signer(text, key) not in (None, signer_of(self._secret)):
                raise InvalidEntry("unsigned", "it is signed with another secret, or with none")
            raise InvalidEntry("corrupt", "its header does not match its digest")
        return preamble, _header(text)

    def _check_sizes(self, max_bytes: int) -> None:
        expected = self._file.tell() + sum(block.num_bytes for block in self._blocks)
        if expected > max_bytes:
            raise InvalidEntry("corrupt", f"its blocks claim {expected} bytes, more than {max_bytes}")
        if expected != self.num_bytes:
            raise InvalidEntry("truncated", f"it has {self.num_bytes} bytes of {expected}")

    def blocks(self) -> Iterator[tuple[str, Fields]]:
        """(name, tensors), checked lazily."""
        for block in self._blocks:
            data = self._read(block.num_bytes)
            if not hmac.compare_digest(_digest(data, self._secret), block.digest):
                raise InvalidEntry("corrupt", f"block {block.name} does not match its digest")
            try:
                yield block.name, load(data)
            except SafetensorError as error:
                raise InvalidEntry("corrupt", f"block {block.name} holds no tensors") from error

    def _read(self, num_bytes: int) -> bytes:
        try:
            data = self._file.read(num_bytes)
        except OSError as error:
            raise InvalidEntry("truncated", f"it cannot be read ({error})") from error
        if len(data) != num_bytes:
            raise InvalidEntry("truncated", f"it ends {num_bytes - len(data)} bytes early")
        return data


def _header(text: bytes) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidEntry("corrupt", "its header is no JSON") from error
    if not isinstance(header, dict):
        raise InvalidEntry("corrupt", "its header is no object")
    return header


def _signer(text: bytes, key: Key) -> object:
    """Identifier of the secret that signed the entry; None if its header does not match the key."""
    facts = _header(text).get("binding")
    return facts.get("signer") if isinstance(facts, dict) and scope_of(facts) == key.scope else None


def _check_header(header: dict[str, Any], key: Key, binding: Binding | None) -> None:
    if header.get("key") != key.text:
        raise InvalidEntry("swapped", "its header has another key")
    facts = header.get("binding")
    if not isinstance(facts, dict) or (scope_of(facts) != key.scope if binding is None else facts != binding.facts()):
        raise InvalidEntry("foreign", "it belongs to another model, policy or tenant")


def _listed(header: dict[str, Any]) -> list[_Block]:
    try:
        blocks = [_Block(str(name), int(size), str(digest)) for name, size, digest in header["blocks"]]
    except (KeyError, TypeError, ValueError) as error:
        raise InvalidEntry("corrupt", "its list of blocks cannot be read") from error
    if any(block.num_bytes < 0 for block in blocks):
        raise InvalidEntry("corrupt", "a block has a negative size")
    return blocks


def _digest(data: bytes, secret: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES, key=secret).hexdigest()
