"""What a client needs to ask about a packed prefix: placeholder ids, ids of the question, kv_transfer_params.

packed = PackedPrefix.load("handbook.json")                      written by `kvfold pack --out handbook.json`
body = {"prompt": packed.prompt_token_ids(tokenizer, "Who?"), "kv_transfer_params": packed.kv_transfer_params}
packed.check(answer["kv_transfer_params"])                       raises unless the prefix was served
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvfold.atomic_io import write_whole
from kvfold.errors import FileError, InputError
from kvfold.models.chat_template import ChatTemplate, Conversation, Turn
from kvfold.packed.placeholders import placeholder_ids

FORMAT = "kvfold packed prefix 1"
ENTRY, SLOTS, TOKENS, ERROR = "kvfold_entry", "kvfold_slots", "kvfold_tokens", "kvfold_error"
PACK_AGAIN = "pack the document again"  # how refusals end of entries that a store has lost
_MAX_FILE_BYTES = 1 << 16


@dataclass(frozen=True)
class PackedPrefix:
    """One entry of a store, and all that a client has to know of it.

    Attributes:
        entry: Its name in the store.
        num_slots: Slots in every head; positions that it takes of the engine's context.
        num_tokens: Tokens of the document.
        vocab_size: Placeholder ids are below it.
        num_bytes: Of the entry.
        model: The model as it was named when the entry was made.
        dtype: Of weights and KV cache; the engine has to run the same one.
        policy: What kept the slots, with the size that was rounded to whole blocks.
        has_template: Whether the document stands in an open user turn of the chat template.
        is_ragged: Whether heads have lengths of their own, or codecs; `num_slots` are then what their bytes take.
        slack_bytes: Of a ragged entry, bytes of the engine's blocks that stay unused: what smaller layers leave.
    """

    entry: str
    num_slots: int
    num_tokens: int
    vocab_size: int
    num_bytes: int
    model: str
    dtype: str
    policy: str
    has_template: bool
    is_ragged: bool = False
    slack_bytes: int = 0

    @property
    def placeholder_ids(self) -> list[int]:
        """The prompt's first ids."""
        return placeholder_ids(self.entry, self.num_slots, self.vocab_size)

    @property
    def kv_transfer_params(self) -> dict[str, Any]:
        """What names the entry to the connector."""
        return {ENTRY: self.entry, SLOTS: self.num_slots}

    def prompt_token_ids(self, tokenizer: Any, question: str) -> list[int]:
        """The whole prompt: placeholders, the question, and what opens the reply, as `Session.ask` would read them."""
        template = ChatTemplate.of(tokenizer) if self.has_template else None
        if self.has_template and template is None:
            raise InputError(
                "the entry has a chat template, and this tokenizer has none; use the model's own tokenizer"
            )
        talk = Conversation(tokenizer, template, frozenset())
        turn: Turn = "user" if self.has_template else "reply"
        text = f"\n\n{question}" if self.has_template else question
        ids = self.placeholder_ids
        return [*ids, *talk.text_ids(text, turn, ids[-1:]), *talk.reply_ids(turn)]

    def check(self, answer: Mapping[str, Any] | None) -> None:
        """InputError unless the `kv_transfer_params` of an answer say that this entry was served."""
        told = dict(answer or {})
        if ERROR in told:
            raise InputError(f"the packed prefix was refused: {told[ERROR]}")
        if told.get(ENTRY) != self.entry:
            raise InputError(
                "the answer does not say that the packed prefix was served; run vLLM with kvfold's connector "
                "(kv_connector_module_path kvfold.vllm), and send kv_transfer_params with the prompt"
            )

    def save(self, path: str | Path) -> None:
        write_whole(Path(path), json.dumps({"format": FORMAT, **asdict(self)}, indent=1) + "\n")

    @classmethod
    def load(cls, path: str | Path) -> PackedPrefix:
        try:
            with open(path, "rb") as file:
                content = json.loads(file.read(_MAX_FILE_BYTES))
        except (OSError, ValueError, RecursionError) as error:
            raise FileError(f"{path} cannot be read ({error}); name a file that kvfold pack --out wrote") from error
        return cls.of(content, str(path))

    @classmethod
    def of(cls, content: Any, name: str = "the record") -> PackedPrefix:
        """From what `save` wrote, or `kvfold pack --json` printed."""
        if not isinstance(content, dict) or content.get("format") != FORMAT:
            raise FileError(f'{name} has no format "{FORMAT}"; name a file that kvfold pack --out wrote')
        kinds = {"int": int, "str": str, "bool": bool}
        known = [field for field in fields(cls) if field.name in content or field.default is MISSING]
        wanted = {field.name: kinds[str(field.type)] for field in known}
        bad = [key for key, kind in wanted.items() if type(content.get(key)) is not kind]
        if bad or content["num_slots"] < 1 or content["vocab_size"] < 1:
            raise FileError(f"{name} has no valid {bad[0] if bad else 'size'}; write it again with kvfold pack --out")
        return cls(**{key: content[key] for key in wanted})
