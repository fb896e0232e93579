"""What a policy asks of a model, beyond what its expression can tell."""

from __future__ import annotations

from kvfold.core import ModelSpec
from kvfold.errors import PolicyError
from kvfold.policy.policy import Policy
from kvfold.policy.registry import term_of
from kvfold.score.predictor import predictor_for


def check_policy(policy: Policy, spec: ModelSpec) -> None:
    """PolicyError if this model cannot run this policy."""
    evicts = policy.prefill.size is not None or policy.decode.size is not None
    if evicts and not spec.compressible_layers:
        raise PolicyError(f'policy "{policy.short}": every layer of {spec.name} is a sliding window; use "full"')
    for _, stage in policy.stages():
        stage.budget.check(spec)
    for codec in policy.codec.codecs:
        codec.check(spec)
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
            f'policy "{policy.short}": its score looks at the output projection of attention, which kvfold cannot find '
            f"in {spec.name} as a plain matrix; use a score that does not, such as kvzip or snapkv"
        )


def _check_predictor(policy: Policy, spec: ModelSpec) -> None:
    """What a trained score predicts with is there, and was trained on these weights."""
    for _, stage in policy.stages():
        if stage.size is not None and stage.score.needs.predictor is not None:
            predictor_for(spec, stage.score.needs.predictor)


def _check_reader(policy: Policy, spec: ModelSpec) -> None:
    if policy.attend.chooses and not any(policy.attend.at(i).chooses for i in spec.compressible_layers):
        raise PolicyError(
            f'policy "{policy.short}": every layer of {spec.name} would read everything; let the reader skip fewer '
            f"layers than {spec.num_layers}, or leave it out"
        )


def _check_token_pruning(policy: Policy, spec: ModelSpec) -> None:
    if not policy.token_pruning.prunes:
        return
    name = f'policy "{policy.short}": {term_of(policy.token_pruning).name}'
    if len(spec.compressible_layers) < spec.num_layers:
        raise PolicyError(f"{name} leaves tokens behind that sliding windows of {spec.name} count; use dense")
    if not 0 <= policy.token_pruning.last_full_layer(spec.num_layers) < spec.num_layers - 1:
        raise PolicyError(f"{name} needs a layer before the last of {spec.num_layers}; give layer=, or use dense")


def _check_below(policy: Policy, spec: ModelSpec) -> None:
    """A codec that needs the layer below finds the same slots there only in a like layer that keeps everything."""
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
