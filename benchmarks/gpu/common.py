"""What the GPU benchmarks share: a model of the Llama-3.1-8B shape, event timing, bandwidth, floors.

The model has random weights: time and memory depend on shapes alone, and nothing has to be downloaded. This file
imports nothing of kvfold that imports transformers, so that other systems can be measured with it in environments of
their own.
"""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.rows import Row, percentile

Run = Callable[[], object]
Result = TypeVar("Result")

LLAMA_8B: Mapping[str, Any] = {
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}


def llama(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, **changes: object) -> Any:
    """Random weights of the Llama-3.1-8B shape, made on the device; `changes` replace config values."""
    config = LlamaConfig(**{**LLAMA_8B, **changes}, attn_implementation="sdpa")
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device("meta"):  # the initialisation of transformers would take minutes
            model = LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(before)
    model.to_empty(device=device)
    # Buffers were empty too; a rotary embedding computes its own when it is made.
    model.model.rotary_emb = type(model.model.rotary_emb)(config=config).to(device)
    generator = torch.Generator(device).manual_seed(0)
    for parameter in model.parameters():
        if parameter.ndim == 1:
            parameter.data.fill_(1.0)
        else:
            parameter.data.normal_(0.0, 0.02, generator=generator)
    return model.eval().requires_grad_(False)


def parse_shapes(text: str) -> list[tuple[int, int]]:
    """ "131072x1,32768x16": (tokens of context, sequences)."""
    pairs = (shape.split("x") for shape in text.split(","))
    return [(int(context), int(batch)) for context, batch in pairs]


def random_tokens(count: int, vocab_size: int, seed: int = 0) -> list[int]:
    return torch.randint(0, vocab_size, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


# Floors


def weight_bytes(model: Any) -> int:
    """Bytes of weights that a step reads: all but the input embedding, of which it reads a row a token."""
    embedding = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is embedding
    total = sum(int(parameter.nbytes) for parameter in model.parameters())
    return total if tied else total - int(embedding.nbytes)


def floor_ms(num_bytes: float, bandwidth: float) -> float:
    """Milliseconds below which no step that touches num_bytes can come, at bandwidth bytes a second."""
    return 1e3 * num_bytes / bandwidth


def kv_bytes(num_tokens: int, config: Any, itemsize: int = 2) -> int:
    """Keys and values of an ordinary cache of num_tokens."""
    per_token = config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return 2 * num_tokens * int(per_token) * itemsize


def copy_bandwidth(num_bytes: int = 4 << 30, device: str = "cuda") -> float:
    """Bytes a second, read plus written, of a large copy on the device: the median of ten."""
    source = torch.empty(num_bytes, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    return 2 * num_bytes / (1e-3 * statistics.median(event_ms(lambda: target.copy_(source), repeats=10)))


# Timing


def timed(run: Callable[[], Result]) -> tuple[float, Result]:
    """Milliseconds between device events around one run, and what it returned."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    found = run()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end), found


def event_ms(run: Run, *, repeats: int, warm_up: int = 2) -> list[float]:
    """Milliseconds of each repeat after the warm-up."""
    return [timed(run)[0] for _ in range(warm_up + repeats)][warm_up:]


def graph_ms(run: Run, *, repeats: int = 20, inner: int = 20) -> float:
    """Median milliseconds of one `run` inside a captured graph of `inner`: launches of small kernels cost nothing."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()  # compiles and allocates outside the capture
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(inner):
            run()
    return statistics.median(event_ms(graph.replay, repeats=repeats)) / inner


def spread(values: Sequence[float], unit: str) -> Row:
    """Median, p20 and p80 as columns of a row."""
    ordered = list(values)
    return {
        unit: statistics.median(ordered),
        f"{unit}_p20": percentile(ordered, 20),
        f"{unit}_p80": percentile(ordered, 80),
        "repeats": len(ordered),
    }


def clean() -> None:
    """Give memory that nothing holds any more back to the driver."""
    gc.collect()
    torch.cuda.empty_cache()
