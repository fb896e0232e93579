"""Whether a model, or the drop-in cache, can run a policy: what the policy expression alone cannot tell."""

from __future__ import annotations

from collections.abc import Iterator

from kvfold.core import ModelSpec
from kvfold.errors import PolicyError
from kvfold.models.sentences import needs_sentences
from kvfold.policy.policy import Policy
from kvfold.policy.registry import term_of
from kvfold.score.predictor import predictor_for


def check_policy(policy: Policy, spec: ModelSpec) -> None:
    """PolicyError if this model cannot run this policy."""
    evicts = any(stage.evicts for _, stage in policy.stages())
    if evicts and not spec.compressible_layers:
        reason = f"every layer of {spec.name} is a sliding window, and windows are never evicted from"
        raise PolicyError(f'policy "{policy.short}": {reason}; use full, or a codec such as int4')
    for variant in policy.variants:
        variant.check(spec)
    for reason in (*_misfits(policy, spec), *_below(policy, spec), *_positions(policy, spec)):
        raise PolicyError(f'policy "{policy.short}": {reason}')
    for _, stage in policy.stages():
        if stage.evicts and stage.score.needs.predictor is not None:
            predictor_for(spec, stage.score.needs.predictor)  # refused unless it was trained on these weights


def _misfits(policy: Policy, spec: ModelSpec) -> Iterator[str]:
    layers, pruning = policy.codec.layers, policy.token_pruning
    if not any(layers.holds(i, spec.num_layers) for i in range(spec.num_layers)):
        yield f"layers={layers} holds none of the {spec.num_layers} layers of {spec.name}"
    asks = any(stage.evicts and stage.score.needs.output for _, stage in policy.stages())
    if asks and any(spec.layers[i].wo_MX is None for i in spec.compressible_layers):
        yield (
            f"its score needs the output projection of attention (o_proj), which kvfold cannot find in {spec.name} as "
            "a plain matrix; use a score that does not, such as kvzip or snapkv"
        )
    if policy.attend.selects and not any(policy.attend.at(i).selects for i in spec.compressible_layers):
        yield (
            f"no layer of {spec.name} would select pages; let the reader skip fewer layers than {spec.num_layers}, or "
            "leave it out"
        )
    if pruning.prunes and len(spec.compressible_layers) < spec.num_layers:
        yield (
            f"{term_of(pruning).name} prunes tokens between layers, but {spec.name} has sliding-window layers, whose "
            "windows count unpruned tokens; remove it"
        )
    elif pruning.prunes and not 0 <= pruning.last_full_layer(spec.num_layers) < spec.num_layers - 1:
        yield f"{term_of(pruning).name} needs a layer before the last of {spec.num_layers}; give layer=, or remove it"


def _below(policy: Policy, spec: ModelSpec) -> Iterator[str]:
    """A cross-layer codec needs a layer below with the same slots: same shape, without a sliding window."""
    for i in spec.compressible_layers:
        if not any(codec.needs_below for codec in policy.codec.sides(i, spec.num_layers)):
            continue
        if i == 0:
            yield "layer 0 has no layer below; give this codec layers=1:"
        layer, below = spec.layers[i], spec.layers[i - 1]
        same = (layer.num_kv_heads, layer.head_dim) == (below.num_kv_heads, below.head_dim)
        if not (below.compressible and same):
            yield (
                f"layer {i - 1} of {spec.name} does not hold the slots of layer {i}; leave layer {i} to another codec "
                "with layers="
            )


def _positions(policy: Policy, spec: ModelSpec) -> Iterator[str]:
    ropes = [layer.rope for layer in spec.layers if layer.compressible and policy.position.shifts]
    if any(rope is None for rope in ropes):
        yield f"slot needs rotary positions, which {spec.name} does not have"
    if any(rope is not None and rope.depends_on_length for rope in ropes):
        yield f"slot needs fixed RoPE frequencies; those of {spec.name} depend on the length, so use keep"


def check_reads_ids(policy: Policy) -> None:
    """PolicyError for a policy that shortens text, where only token ids come in."""
    if policy.shorten is not None:
        raise PolicyError(
            f'policy "{policy.short}" shortens text, and only token ids come in here; shorten the text first with '
            "kvfold.shorten(text, ...), or use kvfold.answer, kvfold.generate or kvfold.Session"
        )


def check_drop_in(policy: Policy) -> None:
    """PolicyError for a policy that a transformers Cache cannot run: it gets no token ids and runs no model."""
    name, stage = f'policy "{policy.short}"', policy.prefill
    check_reads_ids(policy)
    for part, needs in (("its score", stage.score.needs), ("its fit", stage.evicted.needs)):
        if stage.size is not None and needs.replay is not None:
            raise PolicyError(
                f"{name}: {part} replays the prompt, and a transformers Cache does not run the model; use "
                "kvfold.compress, kvfold.Session or kvfold.generate"
            )
    if policy.token_pruning.prunes:
        raise PolicyError(
            f"{name} prunes tokens between layers, which a transformers Cache cannot do; use kvfold.compress, or "
            "remove that term"
        )
    if needs_sentences(policy):
        raise PolicyError(
            f"{name} needs token ids to find sentences, and a transformers Cache never receives them; use "
            "kvfold.compress, kvfold.Session or kvfold.generate, or chunk(...)"
        )
