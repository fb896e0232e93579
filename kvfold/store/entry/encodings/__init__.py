"""Encodings of KV tensors in byte tiers (`form=`, `--store-form`): exact, packed (lossless), cachegen (lossy)."""

from kvfold.errors import InputError
from kvfold.store.entry.encodings.base import Encoding, Exact, Packed, TensorSpec, TensorSpecs
from kvfold.store.entry.encodings.cachegen import CacheGen

__all__ = ["ENCODINGS", "Encoding", "TensorSpec", "TensorSpecs", "check_encoding"]

ENCODINGS: dict[str, Encoding] = {encoding.name: encoding for encoding in (Exact(), Packed(), CacheGen())}


def check_encoding(name: str) -> None:
    """InputError if there is no such encoding."""
    if name not in ENCODINGS:
        raise InputError(f'no form "{name}"; forms: {", ".join(ENCODINGS)}')
