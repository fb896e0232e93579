"""Saved sessions: one safetensors file with the codes as stored, and a header that binds them to model and policy.

    metadata   "kvfold": JSON with format, weights digest, cache dtype, policy, page sizes and turn
               "sha256": over that text and every tensor's name, dtype, shape and bytes
    tensors    those of `kvfold.pages.serialize`, "token_ids" and "logits" (after the last token read)

A file that is truncated, altered, or belongs to other weights is refused. Nothing in it is unpickled or evaluated, and
shapes are checked against the model before anything is written into pages.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvfold.atomic_io import replacing
from kvfold.errors import FileError
from kvfold.models.chat_template import Turn
from kvfold.models.loader import Model
from kvfold.pages.sequence import SequenceCache
from kvfold.pages.serialize import dump, restore

FORMAT = "kvfold-session-3"
_IN_HEADER = ("policy", "fingerprint", "page_size", "open_len", "chunk_len", "template", "turn")


@dataclass(frozen=True)
class SessionState:
    """What a session is beside its KV cache. `fingerprint` names what the policy meant when it was saved."""

    policy: str
    fingerprint: str
    page_size: int
    open_len: int
    chunk_len: int
    template: bool
    turn: Turn
    token_ids: list[int]
    logits_V: Tensor | None  # after the last token read


def save_session(path: Path, model: Model, cache: SequenceCache, state: SessionState) -> None:
    tensors = {**dump(cache), "token_ids": torch.tensor(state.token_ids, dtype=torch.int64)}
    if state.logits_V is not None:
        tensors["logits"] = state.logits_V.cpu()
    binding = {"format": FORMAT, "weights": model.session_digest, "kv_dtype": str(model.spec.kv_dtype)}
    text = json.dumps(binding | {name: getattr(state, name) for name in _IN_HEADER}, sort_keys=True)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"kvfold": text, "sha256": _checksum(text, tensors)})


def read_session(path: Path, model: Model) -> tuple[SessionState, dict[str, Tensor]]:
    """The state and the tensors of the cache. FileError if the file is not whole, not ours, or of another model."""
    header, tensors = _read(path)
    _check_binding(header, model, path)
    try:
        token_ids = tensors.pop("token_ids").tolist()
        logits_V = tensors.pop("logits").to(model.device) if "logits" in tensors else None
        said = {name: header[name] for name in _IN_HEADER}
        return SessionState(**said, token_ids=token_ids, logits_V=logits_V), tensors
    except LookupError as error:
        raise misfit(path) from error


def restore_cache(cache: SequenceCache, tensors: dict[str, Tensor], state: SessionState, path: Path) -> None:
    """Fill an empty cache. OutOfPages if there is no room for it; FileError if the tensors are not those of a cache."""
    try:
        restore(cache, tensors)
        if cache.committed_len > len(state.token_ids):
            raise ValueError("more tokens are stored than were read")
    except (LookupError, ValueError, TypeError, RuntimeError) as error:
        raise misfit(path) from error


def misfit(path: Path) -> FileError:
    return FileError(f"{path} does not fit its own header; save the session again")


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    if not path.is_file():
        raise FileError(f"{path} is no file; give the path of a saved session")
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
        text = metadata["kvfold"]
        header = json.loads(text)
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        raise FileError(f"{path} is truncated or no saved session; give a file that Session.save wrote") from error
    if metadata.get("sha256") != _checksum(text, tensors):
        raise FileError(f"{path} was altered: its checksum does not match; save it again")
    return header, tensors


def _check_binding(header: dict[str, Any], model: Model, path: Path) -> None:
    if header.get("format") != FORMAT:
        raise FileError(f'{path} has format "{header.get("format")}"; this version reads {FORMAT}')
    if header["weights"] != model.session_digest:
        raise FileError(
            f"{path} was saved with other weights, or another rope, than {model.name} has; load it as it was then"
        )
    if header["kv_dtype"] != str(model.spec.kv_dtype):
        loaded = f"{model.name} was loaded with {model.spec.kv_dtype}"
        raise FileError(f"{path} holds a {header['kv_dtype']} cache, but {loaded}; choose that dtype")


def _checksum(header: str, tensors: dict[str, Tensor]) -> str:
    digest = hashlib.sha256(header.encode())
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.flatten().view(torch.uint8).numpy().tobytes() if tensor.numel() else b"")
    return digest.hexdigest()
