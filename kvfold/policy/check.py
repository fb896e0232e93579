"""Combinations that cannot work, each refused with its reason and with what works instead."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Any, TypeGuard

from kvfold.errors import PolicyError
from kvfold.policy.bind import missing_arguments
from kvfold.policy.parts import PolicyParts, Stage, default_trigger
from kvfold.policy.registry import Term, default, term_of, terms
from kvfold.policy.text import noun

if TYPE_CHECKING:
    from kvfold.codec.base import Codec
    from kvfold.codec.basis import LowRankCodec


def check(policy: PolicyParts) -> None:
    """Raise PolicyError for the first thing that cannot work."""
    rules = (_fit, _recall, _idle_terms, _codec, _below, _basis, _reader, _token_pruning)
    arguments = chain.from_iterable(map(_arguments, policy.variants))
    stages = chain.from_iterable(_stage(phase, stage) for phase, stage in policy.stages())
    for reason in chain(arguments, stages, _phases(policy), *(rule(policy) for rule in rules)):
        raise PolicyError(reason)


def _arguments(variant: Term) -> Iterator[str]:
    """Whole numbers are counts, and a trigger counts from 1; `Term.validate` says what else is refused."""
    term = term_of(variant)
    reason = variant.validate()
    if reason is not None:
        yield f"{term.name}: {reason}"
    least = 1 if term.axis == "when" else 0
    for field in term.arguments:
        value = getattr(variant, field.name)
        if type(value) is int and value < least:
            yield f"{term.name}: {field.name} is at least {least}, not {value}"


def _stage(phase: str, stage: Stage) -> Iterator[str]:
    name, trigger = _name(stage.score), _name(stage.when)
    if stage.score.keeps_all and stage.size is not None:
        others = ", ".join(term.name for term in terms("score") if not term.variant.keeps_all)
        yield (
            f"{phase} has score {name}, which keeps everything, and size {stage.size}; "
            f"leave the size out or take another score: {others}"
        )
    if not stage.score.keeps_all and stage.size is None:
        yield (
            f"{phase} has score {name} but no size that says how much to keep; "
            f"add one, such as {name} + 8x, {name} + 2048tok or {name} + 12.5%mem"
        )
    if stage.when.phase != phase:
        yield f"trigger {trigger} belongs to {stage.when.phase}, not to {phase}"
    if not stage.evicts and stage.when != default_trigger(phase, stage.score, None):
        yield (
            f"trigger {trigger} has no effect, since {phase} keeps everything; "
            f"leave it out or add a score and a size, such as h2o + 8x"
        )


def _phases(policy: PolicyParts) -> Iterator[str]:
    """Scores that need what a phase does not have: the end of the prompt, a second reading of it."""
    prefill, decode = policy.prefill, policy.decode
    if prefill.evicts and prefill.when.chunk_len is not None and prefill.score.needs.end_of_prompt:
        yield (
            f"score {_name(prefill.score)} looks at the end of the prompt, which is not there yet between_chunks; "
            f"use after_prefill or a score that needs no end: {', '.join(_scores_without_end())}"
        )
    if decode.may_evict and decode.score.needs.replay is not None:
        name, size = _name(decode.score), decode.size
        yield (
            f"score {name} reads the prompt a second time, and there is none while decoding, so {size} cannot hold "
            f"then; write prefill({name} + {size}), alone or with a score for decoding, such as "
            f"prefill({name} + {size}) + decode(tova + {size})"
        )


def _fit(policy: PolicyParts) -> Iterator[str]:
    """Fitting needs queries of a whole prompt, and readers that add biases."""
    prefill, decode, name = policy.prefill, policy.decode, _name(policy.decode.evicted)
    if decode.evicted.has_bias and decode.may_evict:
        yield (
            f"{name} calibrates kept slots on the queries of a prompt, and there is none while decoding; write "
            f"prefill(... + {name}), alone or with decode(...), which then drops or merges"
        )
    if not prefill.evicted.has_bias or not prefill.evicts:
        return
    fits = f"{_name(prefill.evicted)} calibrates kept slots on the queries of a whole prompt"
    if prefill.when.chunk_len is not None:
        yield f"{fits}, which is not there yet between_chunks; use after_prefill"
    if policy.position.shifts:
        yield f"{fits} at the positions keys had, and position {_name(policy.position)} moves them; use keep"
    if policy.attend.selects:
        yield (
            f"{_name(prefill.evicted)} gives slots biases, and reader {_name(policy.attend)} ranks pages by keys "
            "alone; read everything with all"
        )


def _recall(policy: PolicyParts) -> Iterator[str]:
    recalling = [stage for _, stage in policy.stages() if stage.evicts and stage.evicted.recall is not None]
    for stage in recalling:
        if stage.size is not None and stage.size.counts_bytes:
            yield (
                f"recall keeps summaries of all evicted pages, which grow with the text, so {stage.size} cannot hold; "
                "give a number of slots, such as 2048tok or 8x"
            )
    if len({stage.evicted for stage in recalling}) > 1:
        yield "prefill and decode recall in two ways from one host store; write recall once, outside both, or in one"


def _idle_terms(policy: PolicyParts) -> Iterator[str]:
    for axis in () if _evicts(policy) else ("budget", "protect", "evicted"):
        for _, stage in policy.stages():
            variant = getattr(stage, axis)
            if variant != default(axis):
                yield (
                    f"{noun(axis)} {_name(variant)} has no effect, since everything is kept; "
                    f"leave it out or add a score and a size, such as snapkv + 8x"
                )


def _codec(policy: PolicyParts) -> Iterator[str]:
    plan, native = policy.codec, default("codec")
    if not plan.layers.is_all and plan.k == plan.v == native:
        yield f"layers={plan.layers} has no effect on {_name(native)}; name a codec for these layers"
    fixed = [codec for codec in plan.codecs if not codec.relocatable]
    moving = [_name(stage.when) for _, stage in policy.stages() if stage.when.repeats]
    if fixed and moving:
        free = [term.name for term in terms("codec") if term.variant.relocatable]
        yield (
            f"codec {_name(fixed[0])} encodes a slot together with its neighbours, so stored slots cannot be evicted "
            f"one by one, as trigger {moving[0]} would; "
            f"use after_prefill + never, or a codec whose slots can move: {', '.join(free)}"
        )


def _below(policy: PolicyParts) -> Iterator[str]:
    stacked = [_name(codec) for codec in policy.codec.codecs if codec.needs_below]
    if stacked and _evicts(policy):
        yield (
            f"codec {stacked[0]} stores a slot against the same slot of the layer below, which may be evicted "
            "there; keep everything with full, or store each layer by itself, as int4 does"
        )
    if stacked and policy.attend.selects:
        yield (
            f"codec {stacked[0]} decodes a layer together with the one below, so reader {_name(policy.attend)} "
            "cannot read some of its pages alone; read everything with all"
        )


def _basis(policy: PolicyParts) -> Iterator[str]:
    for codec in filter(_is_low_rank, policy.codec.codecs):
        if policy.attend.selects:
            yield (
                f"codec {_name(codec)} stores keys before RoPE, and reader {_name(policy.attend)} ranks pages by keys "
                "as they are stored; read everything with all"
            )
        if codec.heads_together > 1 and _evicts(policy):
            yield (
                f"codec {_name(codec)} with this file stores {codec.heads_together} heads together, and each head may "
                "evict other slots; keep everything with full, or write a file with kvfold calibrate --heads 1"
            )


def _is_low_rank(codec: Codec) -> TypeGuard[LowRankCodec]:
    return codec.needs_basis


def _reader(policy: PolicyParts) -> Iterator[str]:
    if policy.attend.selects and policy.position.shifts:
        yield (
            f"reader {_name(policy.attend)} ranks pages by keys as they are stored, and position "
            f"{_name(policy.position)} moves them when they are read; use keep, or read everything with all"
        )


def _token_pruning(policy: PolicyParts) -> Iterator[str]:
    """Pruned layers have no queries and slots of some tokens, and their positions are not consecutive."""
    if not policy.token_pruning.prunes:
        return
    name, stage = _name(policy.token_pruning), policy.prefill
    needs = [part.needs for part in (stage.score, stage.evicted) if stage.evicts]
    if any(need.replay or need.query_stats or need.new_queries for need in needs):
        yield (
            f"{name} prunes tokens between layers, and score {_name(stage.score)} with {_name(stage.evicted)} "
            "looks at queries of all of them in every layer; use a score that looks at the end alone, such as snapkv, "
            "and drop"
        )
    if stage.when.chunk_len is not None:
        yield f"{name} looks at the end of the prompt, which is not there yet between_chunks; use after_prefill"
    if policy.position.shifts:
        shift = _name(policy.position)
        yield f"{name} prunes tokens in later layers, where position {shift} would close gaps; use keep"
    if any(codec.needs_below for codec in policy.codec.codecs):
        yield f"{name} stores fewer slots in later layers, and the codec needs the same in the layer below"


def _scores_without_end() -> list[str]:
    """Scores that need no end of the prompt; needs may depend on arguments, so defaults decide."""
    complete = [term for term in terms("score") if not missing_arguments(term, ())]
    return [term.name for term in complete if not (term.variant.keeps_all or term.variant().needs.end_of_prompt)]


def _evicts(policy: PolicyParts) -> bool:
    return policy.prefill.evicts or policy.decode.evicts


def _name(variant: Any) -> str:
    return term_of(variant).name
