"""Which tokens of a model end a sentence, told by their text."""

from __future__ import annotations

from collections.abc import Sequence
from weakref import WeakKeyDictionary

from torch import nn

from kvfold.errors import PolicyError
from kvfold.evicted.recall import recall_of
from kvfold.models.repeat_prompt import tokenizer_of
from kvfold.pages.sequence import SequenceCache
from kvfold.policy.policy import Policy

_STOPS = (".", "!", "?", "…", "。", "！", "？")
_CLOSING = " \t\"')]}*_»”’」』）"

_found: WeakKeyDictionary[nn.Module, frozenset[int]] = WeakKeyDictionary()


def needs_sentences(policy: Policy) -> bool:
    """Whether any of its terms has to know where sentences end."""
    recall = recall_of(policy)
    by_sentence = recall is not None and recall.unit == "sentence"
    return by_sentence or any(stage.evicts and stage.score.needs.sentence_len for _, stage in policy.stages())


def check_sentences(hf: nn.Module, policy: Policy) -> None:
    """PolicyError if the policy has to know where sentences end and this model cannot tell."""
    if needs_sentences(policy) and tokenizer_of(hf) is None:
        raise PolicyError(
            f'policy "{policy.short}" tells sentences by the text of tokens, and this model came without a tokenizer; '
            "load it with one, or use runs of tokens, as chunk takes them"
        )


def note_sentences(hf: nn.Module, sequences: Sequence[SequenceCache], tokens: Sequence[Sequence[int]]) -> None:
    """Where sentences end in what the sequences are going to read, for the policies that ask."""
    for sequence, ids in zip(sequences, tokens, strict=True):
        if needs_sentences(sequence.policy):
            sequence.sentences.note(sequence.logical_len, ids, ending_tokens(hf, sequence.spec.eos_token_ids))


def ending_tokens(hf: nn.Module, eos: frozenset[int] = frozenset()) -> frozenset[int]:
    """Ids of tokens that end a sentence, read from the whole vocabulary when they are first asked for, and `eos`."""
    if hf not in _found:
        tokenizer = tokenizer_of(hf)
        texts = tokenizer.batch_decode([[token] for token in range(len(tokenizer))])
        _found[hf] = eos.union(token for token, text in enumerate(texts) if _ends(text))
    return _found[hf]


def _ends(text: str) -> bool:
    return "\n" in text or text.rstrip(_CLOSING).endswith(_STOPS)
