"""What kvfold's own engine says on a document, with the question and the reply uncompressed, as vLLM keeps them."""

from __future__ import annotations

from collections.abc import Sequence

import kvfold
from kvfold.packed import PackedPrefix
from kvfold.pages.open_block import OpenBlock

_ROOM = 256  # tokens of question and reply


def own_words(
    model: kvfold.Model, text: str, packed: PackedPrefix, questions: Sequence[str], max_tokens: int
) -> list[list[int]]:
    """Greedy tokens up to the end of sequence. Questions go into an open block, whose slots no codec sees."""
    with kvfold.Session(model, packed.policy) as session:
        session.extend(text)
        cache = session.cache
        assert not cache.open.fill
        cache.open.release()
        cache.open = OpenBlock(cache.arena, cache.spec, _ROOM)
        found = []
        for question in questions:
            ids = packed.prompt_token_ids(model.tokenizer, question)[packed.num_slots :]
            found.append(_continued(session, ids, max_tokens))
            cache.open.clear()
        return found


def _continued(session: kvfold.Session, ids: Sequence[int], max_tokens: int) -> list[int]:
    read = session.runner.verify([session.cache], [ids])[0]
    for _ in ids:
        logits = read.keep()
    found: list[int] = []
    while len(found) < max_tokens:
        found.append(int(logits.argmax()))
        if found[-1] in session.model.spec.eos_token_ids:
            break
        logits = session.runner.decode([session.cache], [found[-1]])[0]
    return found
