"""Packed prefixes: a document compressed once into an entry of the store, for engines with blocks of one length.

packed = pack(model, text, "keydiff + uniform + 4x", tier)      the entry lies in the tier
packed.prompt_token_ids(tokenizer, "Who paid?")                 what a client sends, with packed.kv_transfer_params
"""

from kvfold.packed.client import PackedPrefix
from kvfold.packed.pack import pack

__all__ = ["PackedPrefix", "pack"]
