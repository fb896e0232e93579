"""A longer window without training: RoPE frequencies scaled by YaRN (arXiv:2309.00071) when a model is loaded.

kvfold.load("smollm2-135m", rope="yarn:4")     8,192 trained positions become 32,768
"""

from __future__ import annotations

import re
from typing import Any

from kvfold.errors import InputError, ModelError

_TEXT = re.compile(r"yarn:(\d+(?:\.\d+)?)\Z")
_MOST = 64.0  # times the trained window


def yarn_factor(text: str) -> float:
    """How many times longer `yarn:4` makes the window."""
    match = _TEXT.match(text)
    if match is None or not 1 < float(match[1]) <= _MOST:
        raise InputError(f'rope is "{text}"; write yarn: and a factor above 1 and at most {_MOST:g}, such as yarn:4')
    return float(match[1])


def scale_rope(config: Any, text: str) -> None:
    """Change a transformers config to YaRN; ModelError names the family where it cannot be."""
    factor = yarn_factor(text)
    rope = getattr(config, "rope_parameters", None)
    trained = getattr(config, "max_position_embeddings", None)
    name = config.model_type
    if not rope or not trained:
        raise ModelError(f"{name} has no rotary positions that rope={text} could scale; leave rope out")
    if "rope_type" not in rope:
        raise ModelError(f"{name} has other rotary frequencies in each kind of layer, which rope={text} cannot scale")
    if rope["rope_type"] != "default":
        kind = rope["rope_type"]
        raise ModelError(f"{name} was trained with scaled rotary frequencies ({kind}); leave rope out")
    kinds = getattr(config, "layer_types", None)
    if "sliding_attention" in (kinds or ()) or (kinds is None and getattr(config, "sliding_window", None)):
        raise ModelError(f"{name} has sliding-window layers, which do not reach farther by rope={text}; leave rope out")
    yarn = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": trained}
    config.rope_parameters = {**rope, **yarn}
    config.max_position_embeddings = int(trained * factor)
