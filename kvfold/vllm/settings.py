"""What `kv_connector_extra_config` of vLLM's `--kv-transfer-config` may say to the connector."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvfold.errors import InputError
from kvfold.policy.size import parse_bytes

_DAY_S = 86400.0


@dataclass(frozen=True)
class Settings:
    """Options of the connector; the JSON object has the same names.

    Attributes:
        store: A folder that vLLM processes and `kvfold pack` share.
        redis: A Redis URL, behind the folder or alone.
        disk_bytes: About how much the folder holds, e.g. "100GB".
        ttl_s: Seconds for which an unused chunk is kept.
        chunk_len: Tokens of an entry, a multiple of the block size; 0 is the least multiple from 128 on.
        secret_file: 16 to 64 bytes that sign entries; without it KVFOLD_STORE_SECRET, or nothing.
    """

    store: str = ""
    redis: str = ""
    disk_bytes: int = 100 * 10**9
    ttl_s: float = 7 * _DAY_S
    chunk_len: int = 0
    secret_file: str = ""

    @classmethod
    def parse(cls, content: Mapping[str, Any]) -> Settings:
        """InputError for unknown names and values of another kind."""
        known = {field.name for field in fields(cls)}
        if unknown := sorted(set(content) - known):
            raise InputError(f'kv_connector_extra_config has "{unknown[0]}"; it takes {", ".join(sorted(known))}')
        given = dict(content)
        if "disk_bytes" in given:
            given["disk_bytes"] = parse_bytes(given["disk_bytes"])
        for name, value in given.items():
            kinds = (int, float) if name == "ttl_s" else (type(getattr(cls, name)),)
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise InputError(f"{name} in kv_connector_extra_config is {value!r}; give {kinds[0].__name__}")
        found = cls(**given)
        found._check()
        return found

    def _check(self) -> None:
        if not self.store and not self.redis:
            raise InputError('kv_connector_extra_config names no place; write {"store": "/var/kvfold"}')
        if self.disk_bytes < 1 or self.ttl_s <= 0 or self.chunk_len < 0:
            raise InputError("disk_bytes, ttl_s and chunk_len in kv_connector_extra_config have to be above 0")

    def chunk_tokens(self, block_size: int) -> int:
        """Tokens of an entry; InputError if they are no whole blocks."""
        found = self.chunk_len or -(-128 // block_size) * block_size
        if found % block_size:
            raise InputError(f"chunk_len is {found}, no multiple of vLLM's block size {block_size}; give a multiple")
        return found
