"""Whether a model, or the drop-in cache, can run a policy: what the policy expression alone cannot tell."""

from __future__ import annotations

from kvfold.core import ModelSpec
from kvfold.errors import PolicyError
from kvfold.models.sentences import needs_sentences
from kvfold.policy.policy import Policy
from kvfold.policy.registry import term_of
from kvfold.score.shared.predictor import predictor_for


def check_policy(policy: Policy, spec: ModelSpec) -> None:
    """PolicyError if this model cannot run this policy."""
    evicts = policy.prefill.size is not None or policy.decode.size is not None
    if evicts and not spec.compressible_layers:
        raise PolicyError(f'policy "{policy.short}": every layer of {spec.name} is a sliding window; use "full"')
    for variant in policy.variants:
        variant.check(spec)
    _check_layers(policy, spec)
    _check_output(policy, spec)
    _check_predictor(policy, spec)
    _check_reader(policy, spec)
    _check_token_pruning(policy, spec)
    _check_below(policy, spec)
    if not policy.position.shifts:
        return
    ropes = [layer.rope for layer in spec.layers if layer.compressible]
    if any(rope is None for rope in ropes):
        raise PolicyError(f'policy "{policy.short}": slot needs rotary positions, which {spec.name} does not have')
    if any(rope is not None and rope.depends_on_length for rope in ropes):
        raise PolicyError(
            f'policy "{policy.short}": slot needs fixed RoPE frequencies; those of {spec.name} depend on the length, '
            "so use keep"
        )


def _check_layers(policy: Policy, spec: ModelSpec) -> None:
    layers = policy.codec.layers
    if not any(layers.holds(i, spec.num_layers) for i in range(spec.num_layers)):
        raise PolicyError(
            f'policy "{policy.short}": layers={layers} holds none of the {spec.num_layers} layers of {spec.name}'
        )


def _check_output(policy: Policy, spec: ModelSpec) -> None:
    asks = any(stage.size is not None and stage.score.needs.output for _, stage in policy.stages())
    if asks and any(spec.layers[i].wo_MX is None for i in spec.compressible_layers):
        raise PolicyError(
            f'policy "{policy.short}": its score needs the output projection of attention (o_proj), which kvfold '
            f"cannot find in {spec.name} as a plain matrix; use a score that does not, such as kvzip or snapkv"
        )


def _check_predictor(policy: Policy, spec: ModelSpec) -> None:
    """The network of a trained score exists and was trained on these weights."""
    for _, stage in policy.stages():
        if stage.size is not None and stage.score.needs.predictor is not None:
            predictor_for(spec, stage.score.needs.predictor)


def _check_reader(policy: Policy, spec: ModelSpec) -> None:
    if policy.attend.selects and not any(policy.attend.at(i).selects for i in spec.compressible_layers):
        raise PolicyError(
            f'policy "{policy.short}": no layer of {spec.name} would select pages; let the reader skip fewer '
            f"layers than {spec.num_layers}, or leave it out"
        )


def _check_token_pruning(policy: Policy, spec: ModelSpec) -> None:
    if not policy.token_pruning.prunes:
        return
    name = f'policy "{policy.short}": {term_of(policy.token_pruning).name}'
    if len(spec.compressible_layers) < spec.num_layers:
        raise PolicyError(
            f"{name} prunes tokens between layers, but {spec.name} has sliding-window layers, whose windows count "
            f"unpruned tokens; remove it"
        )
    if not 0 <= policy.token_pruning.last_full_layer(spec.num_layers) < spec.num_layers - 1:
        raise PolicyError(f"{name} needs a layer before the last of {spec.num_layers}; give layer=, or remove it")


def _check_below(policy: Policy, spec: ModelSpec) -> None:
    """A cross-layer codec needs a layer below with the same slots: same shape, without a sliding window."""
    for i in spec.compressible_layers:
        if not any(codec.needs_below for codec in policy.codec.sides(i, spec.num_layers)):
            continue
        if i == 0:
            raise PolicyError(f'policy "{policy.short}": layer 0 has no layer below; give this codec layers=1:')
        layer, below = spec.layers[i], spec.layers[i - 1]
        same = (layer.num_kv_heads, layer.head_dim) == (below.num_kv_heads, below.head_dim)
        if not (below.compressible and same):
            raise PolicyError(
                f'policy "{policy.short}": layer {i - 1} of {spec.name} does not hold the slots of layer {i}; leave '
                f"layer {i} to another codec with layers="
            )


def check_drop_in(policy: Policy) -> None:
    """PolicyError for a policy that a transformers Cache cannot run: it gets no token ids and runs no model."""
    name, stage = f'policy "{policy.short}"', policy.prefill
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
