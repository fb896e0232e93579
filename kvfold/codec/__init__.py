"""Codecs: how KV slots are quantised. Importing this package registers every codec."""

from kvfold.codec.base import Codec, CrossLayerCodec, Field, Fields, Side, Slots, State
from kvfold.codec.basis import LowRankCodec
from kvfold.codec.fp8 import Fp8
from kvfold.codec.integer import Int2, Int4, Int8
from kvfold.codec.kivi import Kivi2, Kivi4
from kvfold.codec.minicache import MiniCache
from kvfold.codec.native import Bf16, Native
from kvfold.codec.palu import Palu

__all__ = [
    "Bf16", "Codec", "CrossLayerCodec", "Field", "Fields", "Fp8", "Int2", "Int4", "Int8", "Kivi2", "Kivi4",
    "LowRankCodec", "MiniCache", "Native", "Palu", "Side", "Slots", "State",
]  # fmt: skip
