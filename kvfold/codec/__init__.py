"""How a kept slot is stored. Importing this package registers every codec."""

from kvfold.codec.base import Codec, Field, Fields, Side, Slots, State
from kvfold.codec.integer import Int2, Int4, Int8
from kvfold.codec.native import Bf16, Native

__all__ = ["Bf16", "Codec", "Field", "Fields", "Int2", "Int4", "Int8", "Native", "Side", "Slots", "State"]
