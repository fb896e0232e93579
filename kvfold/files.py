"""Saved sessions: one safetensors file with the codes as stored, and a header that binds them to model and policy.

    metadata   "kvfold": JSON with format, weights digest, cache dtype, policy, page sizes and turn
               "sha256": over that text and every tensor's name, dtype, shape and bytes
    tensors    those of `kvfold.pages.dump`, "token_ids" and "logits" (after the last token read)

A file that is truncated, altered, or belongs to other weights is refused. Nothing in it is unpickled or evaluated, and
shapes are checked against the model before anything is written into pages.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from kvfold.errors import FileError, PolicyError
from kvfold.models.loader import Model
from kvfold.pages.dump import dump, restore
from kvfold.whole import replacing

if TYPE_CHECKING:
    from kvfold.session import Session

FORMAT = "kvfold-session-3"


def save_session(session: Session, path: Path) -> None:
    tensors = {**dump(session.cache), "token_ids": torch.tensor(session.token_ids, dtype=torch.int64)}
    if session._logits_V is not None:
        tensors["logits"] = session._logits_V.cpu()
    text = json.dumps(_header(session), sort_keys=True)
    with replacing(path) as temporary:
        save_file(tensors, temporary, metadata={"kvfold": text, "sha256": _checksum(text, tensors)})


def _header(session: Session) -> dict[str, Any]:
    return {
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
    }


def load_session(cls: type[Session], model: Model, path: Path) -> Session:
    """FileError if the file is not whole, not ours, or of another model; OutOfPages if there is no room for it."""
    header, tensors = _read(path)
    _check_binding(header, model, path)
    session = _empty_session(cls, model, header, path)
    try:
        restore(session.cache, tensors)
        session.token_ids = tensors["token_ids"].tolist()
        if session.cache.committed_len > len(session.token_ids):
            raise ValueError("more tokens are stored than were read")
        session._turn = header["turn"]
        session._logits_V = tensors["logits"].to(model.device) if "logits" in tensors else None
    except BaseException as error:
        session.close()
        if isinstance(error, (LookupError, ValueError, TypeError, RuntimeError)):
            raise FileError(f"{path} does not fit its own header; save the session again") from error
        raise
    return session


def _empty_session(cls: type[Session], model: Model, header: dict[str, Any], path: Path) -> Session:
    try:
        session = cls(
            model,
            header["policy"],
            template="auto" if header["template"] else None,
            page_size=header["page_size"],
            open_len=header["open_len"],
            chunk_len=header["chunk_len"],
        )
    except PolicyError as error:
        raise FileError(f"{path} has a policy this version cannot run: {error}") from error
    if session.policy.fingerprint != header["fingerprint"]:
        session.close()
        raise FileError(f'{path} was saved when "{session.policy.short}" meant something else; read the text again')
    return session


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
        raise FileError(f"{path} is truncated or no saved session; save it again") from error
    if metadata.get("sha256") != _checksum(text, tensors):
        raise FileError(f"{path} was altered: its checksum does not match; save it again")
    return header, tensors


def _check_binding(header: dict[str, Any], model: Model, path: Path) -> None:
    if header.get("format") != FORMAT:
        raise FileError(f'{path} has format "{header.get("format")}"; this version reads {FORMAT}')
    if header["weights"] != model.weights_digest:
        raise FileError(f"{path} was saved with other weights than those of {model.name}; load that model instead")
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
