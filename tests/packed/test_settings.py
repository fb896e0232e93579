"""Options of the connector, which are read without vLLM."""

from __future__ import annotations

from typing import Any

import pytest

from kvfold.errors import InputError
from kvfold.vllm.settings import Settings


@pytest.mark.parametrize(
    ("content", "told"),
    [
        ({}, "names no place"),
        ({"dir": "/x"}, 'has "dir"; it takes chunk_len, disk_bytes'),
        ({"store": "/x", "ttl_s": "1h"}, "ttl_s in kv_connector_extra_config is '1h'"),
        ({"store": "/x", "disk_bytes": "much"}, "no amount of memory"),
        ({"store": "/x", "chunk_len": True}, "chunk_len in kv_connector_extra_config is True"),
        ({"store": "/x", "chunk_len": -1}, "have to be above 0"),
    ],
)
def test_options_are_checked(content: dict[str, Any], told: str) -> None:
    with pytest.raises(InputError, match=told):
        Settings.parse(content)


def test_chunks_are_whole_blocks() -> None:
    settings = Settings.parse({"store": "/x", "disk_bytes": "2GB", "ttl_s": 60})
    assert settings.disk_bytes == 2 * 10**9
    assert [settings.chunk_tokens(size) for size in (16, 48, 128, 256)] == [128, 144, 128, 256]
    with pytest.raises(InputError, match="no multiple of vLLM's block size 128"):
        Settings.parse({"store": "/x", "chunk_len": 192}).chunk_tokens(128)
