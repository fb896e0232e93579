"""Saved sessions: one safetensors file with the codes as stored, and a header that binds them.

The header holds the format, the weights digest, the policy with its fingerprint, lengths, token ids and a SHA-256 over
all of that and every tensor. A file that is truncated, altered, or belongs to other weights is refused. Nothing in it
is unpickled or evaluated, and sizes are checked against the model before anything is read into pages.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvfold.errors import FileError, KvfoldError
from kvfold.models.loader import Model
from kvfold.pages.segment import LayerPages
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.sidecar import Moments

if TYPE_CHECKING:
    from kvfold.session import Session

FORMAT = "kvfold-session-1"


def save_session(session: Session, path: Path) -> None:
    """Write to a temporary name, sync, rename."""
    tensors = _tensors(session.cache)
    if session._logits_V is not None:
        tensors["logits"] = session._logits_V.cpu()
    header = {
        "format": FORMAT,
        "weights": session.model.weights_digest,
        "kv_dtype": str(session.model.spec.kv_dtype),
        "policy": str(session.policy),
        "fingerprint": session.policy.fingerprint,
        "page_size": session.cache.config.page_size,
        "open_len": session.cache.config.open_len,
        "chunk_len": session.runner.chunk_len,
        "template": session.template is not None,
        "turn": session._turn,
        "token_ids": session.token_ids,
        "sealed_len": session.cache.sealed_len,
        "last_compressed_len": session.cache.last_compressed_len,
        "open_fill": session.cache.open.committed,
        "pinned": session.cache.pinned,
        "counts": [session.cache.stored_lens(i) for i in range(session.model.spec.num_layers)],
        "moments": [None if s.moments is None else s.moments.count for s in session.cache.sidecar.layers],
    }
    text = json.dumps(header, sort_keys=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        save_file(tensors, temporary, metadata={"kvfold": text, "sha256": _checksum(text, tensors)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def load_session(cls: type[Session], model: Model, path: Path) -> Session:
    header, tensors = _read(path)
    _check_binding(header, model, path)
    session = cls(
        model,
        header["policy"],
        template="auto" if header["template"] else None,
        page_size=header["page_size"],
        open_len=header["open_len"],
        chunk_len=header["chunk_len"],
    )
    try:
        _fill(session.cache, header, tensors)
    except (KeyError, ValueError, IndexError, TypeError, RuntimeError) as error:
        session.close()
        if isinstance(error, KvfoldError):
            raise
        raise FileError(f"{path} does not fit its own header; save the session again") from error
    session.token_ids = [int(token) for token in header["token_ids"]]
    session._turn = header["turn"]
    session._logits_V = tensors["logits"].to(model.device) if "logits" in tensors else None
    return session


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise FileError(f"{path} does not exist")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        text = metadata["kvfold"]
        header = json.loads(text)
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise FileError(f"{path} is truncated or no saved session") from error
    if metadata.get("sha256") != _checksum(text, tensors):
        raise FileError(f"{path} was altered: its checksum does not match")
    return header, tensors


def _check_binding(header: dict[str, Any], model: Model, path: Path) -> None:
    if header.get("format") != FORMAT:
        raise FileError(f'{path} has format "{header.get("format")}"; this version reads {FORMAT}')
    if header["weights"] != model.weights_digest:
        raise FileError(f"{path} was saved with other weights than those of {model.name}; load that model instead")
    if header["kv_dtype"] != str(model.spec.kv_dtype):
        loaded = f"{model.name} was loaded with {model.spec.kv_dtype}"
        raise FileError(f"{path} holds a {header['kv_dtype']} cache, but {loaded}; choose that dtype")


def _tensors(cache: SequenceCache) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for i in range(cache.spec.num_layers):
        parts = cache.layer_parts(i)
        for item in cache.page_class(i).fields:
            found[f"{i}.{item.name}"] = torch.cat([_head_rows(part, item.name) for part in parts])
        # Slots of one head lie apart when there are several segments: their order is head by head within a part.
        found[f"{i}.parts"] = torch.tensor([part.lens for part in parts], dtype=torch.int64)
        for side, state in cache.tail.layers[i].state.items():
            found |= {f"{i}.state.{side}.{name}": tensor.cpu() for name, tensor in state.items()}
        fill = cache.open.committed
        found[f"{i}.open.k"] = cache.open.k[i][:, :fill].cpu().contiguous()
        found[f"{i}.open.v"] = cache.open.v[i][:, :fill].cpu().contiguous()
        seen = cache.sidecar.layers[i]
        named = {"mass": seen.mass_HS, "open_mass": seen.open_mass_HR, "last_q": seen.last_q_QWD}
        if seen.moments is not None:
            named |= {"moments.sum": seen.moments.sum_QD, "moments.outer": seen.moments.outer_QDD}
        found |= {f"{i}.side.{name}": t.cpu().contiguous() for name, t in named.items() if t is not None}
    return found


def _head_rows(part: LayerPages, name: str) -> Tensor:
    """All rows of one field, head after head; groups of a codec stay whole."""
    group = part.page_class.group
    rows = []
    for extents in part.extents:
        for extent in extents:
            item = next(item for item in part.page_class.fields if item.name == name)
            per_page = part.page_class.rows_per_page(item)
            per = part.page_class.page_size // per_page
            used = -(-extent.length // group) * group
            first = extent.first * per_page
            rows.append(extent.span.fields[name][first : first + used // per])
    return torch.cat(rows).cpu() if rows else part._empty(name)


def _fill(cache: SequenceCache, header: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    spec = cache.spec
    fill = int(header["open_fill"])
    for i, layer in enumerate(cache.tail.layers):
        for side in ("k", "v"):
            prefix = f"{i}.state.{side}."
            state = {name.removeprefix(prefix): t.to(cache.arena.device) for name, t in tensors.items() if
                     name.startswith(prefix)}  # fmt: skip
            if state or cache.policy.codec is not None:
                layer.state[side] = state
    num_parts = {len(tensors[f"{i}.parts"]) for i in range(spec.num_layers)}
    for part in range(max(num_parts)):
        counts = [tensors[f"{i}.parts"][part].tolist() for i in range(spec.num_layers)]
        cache.tail.reserve(counts)
        for i, layer in enumerate(cache.tail.layers):
            group = layer.page_class.group
            done = sum(-(-n // group) * group for row in tensors[f"{i}.parts"][:part].tolist() for n in row)
            total = sum(-(-n // group) * group for n in counts[i])
            codes = {}
            for item in layer.page_class.fields:
                per = layer.page_class.page_size // layer.page_class.rows_per_page(item)
                codes[item.name] = tensors[f"{i}.{item.name}"][done // per : (done + total) // per].to(
                    cache.arena.device
                )
            layer.append(codes, counts[i])
    for i in range(spec.num_layers):
        cache.open.k[i][:, :fill] = tensors[f"{i}.open.k"].to(cache.arena.device)
        cache.open.v[i][:, :fill] = tensors[f"{i}.open.v"].to(cache.arena.device)
        side_car = cache.sidecar.layers[i]
        side_car.mass_HS = _maybe(tensors, f"{i}.side.mass", cache)
        side_car.open_mass_HR = _maybe(tensors, f"{i}.side.open_mass", cache)
        side_car.last_q_QWD = _maybe(tensors, f"{i}.side.last_q", cache)
        if header["moments"][i] is not None:
            side_car.moments = Moments(
                int(header["moments"][i]),
                tensors[f"{i}.side.moments.sum"].to(cache.arena.device),
                tensors[f"{i}.side.moments.outer"].to(cache.arena.device),
            )
    cache.open.fill = cache.open.committed = fill
    cache.sealed_len = int(header["sealed_len"])
    cache.last_compressed_len = int(header["last_compressed_len"])
    cache.pinned = [(int(start), int(end)) for start, end in header["pinned"]]


def _maybe(tensors: dict[str, Tensor], name: str, cache: SequenceCache) -> Tensor | None:
    return tensors[name].to(cache.arena.device) if name in tensors else None


def _checksum(header: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
