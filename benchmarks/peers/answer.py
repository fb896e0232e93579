"""Answer kvfold's prompts with kvpress' presses and transformers' quantised caches.

    PEER-ENVIRONMENT/bin/python benchmarks/peers/answer.py WORK [--alone] [--part 0/4] [--limit-s S]

Runs in the environment of environment.sh and never imports kvfold. A press works in a hook after a layer's attention
and leaves the layer's output alone, so one forward serves all of them: each press's own `forward_hook` is called on a
copy of the layer's cache. `--alone` runs every press as its users do, `with press(model)`, a forward each; answers are
the same. A press that masks slots instead of evicting them (KVzip, Ada-KV) leaves its mask on the model, so it always
reads and answers alone. A quantised cache returns what it was given at its first update, so the same forward fills it.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

import kvpress  # type: ignore[import-not-found]
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache, QuantizedCache

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.exchange import (
    FORMAT,
    Answer,
    AnswerFile,
    Header,
    Method,
    Mode,
    Origin,
    Prompt,
    num_kept,
    part_of,
    read_jobs,
)

PACKAGES = ("kvpress", "transformers", "torch", "optimum-quanto", "hqq")
OUT_OF_TIME = 3


@dataclass
class Lane:
    """One method at one ratio, and the cache it leaves."""

    method: Method
    ratio: int
    cache: Any
    press: Any = None


def open_lane(model: Any, method: Method, ratio: int, num_tokens: int) -> Lane:
    arguments = dict(method.arguments or {})
    if method.kind == "quantized":
        return Lane(method, ratio, QuantizedCache(method.target, model.config, **arguments))
    if method.kind == "full":
        return Lane(method, ratio, DynamicCache())
    # kvpress keeps floor(T * (1 - ratio)); half a slot more makes that exactly what is wanted, whatever floats round to
    removed = 1 - (num_kept(num_tokens, ratio) + 0.5) / num_tokens
    *outer, inner = method.target.split(":")
    press = getattr(kvpress, inner)(compression_ratio=removed, **arguments)
    for name in outer:
        press = getattr(kvpress, name)(press)
    press.post_init_from_model(model)
    return Lane(method, ratio, DynamicCache(), press)


def read_together(model: Any, ids: Tensor, lanes: Iterable[Lane]) -> None:
    """One forward; every lane gets each layer's keys and values, then its press."""

    def share(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> Any:
        layer = kwargs["past_key_values"].layers[module.layer_idx]
        for lane in lanes:
            lane.cache.update(layer.keys, layer.values, module.layer_idx)
            if lane.press is not None:
                lane.press.forward_hook(module, args, {**kwargs, "past_key_values": lane.cache}, output)
        return output

    hooks = []
    for layer in model.model.layers:
        layer.self_attn.rotary_emb = model.model.rotary_emb  # as `with press(model)` does
        hooks.append(layer.self_attn.register_forward_hook(share, with_kwargs=True))
    try:
        model.model(input_ids=ids, past_key_values=DynamicCache())
    finally:
        for hook in hooks:
            hook.remove()


def read_alone(model: Any, ids: Tensor, lanes: Iterable[Lane]) -> None:
    """A forward for every lane, the way each library is used."""
    for lane in lanes:
        if lane.press is None:
            model.model(input_ids=ids, past_key_values=lane.cache)
            continue
        with lane.press(model):
            model.model(input_ids=ids, past_key_values=lane.cache)


class Written(NamedTuple):
    """What a batch of lanes wrote, each up to its end token, and the seconds of every step."""

    token_ids: list[tuple[int, ...]]
    seconds: list[float]


def write(model: Any, cache: Any, after: Tensor, start: int, most: int, ends: set[int]) -> Written:
    """Greedy over a batch of caches of one length; tokens keep their true positions."""
    todo, found, seconds = after, [list[int]() for _ in after], list[float]()
    while len(seconds) < most and not all(ends.intersection(row) for row in found):
        began = time.perf_counter()
        position = torch.arange(start, start + todo.shape[1], device=todo.device).expand_as(todo)
        logits = model(input_ids=todo, position_ids=position, past_key_values=cache, logits_to_keep=1).logits
        start, todo = start + todo.shape[1], logits[:, -1:].argmax(-1)
        for row, token in zip(found, todo[:, 0].tolist(), strict=True):
            if not ends.intersection(row):
                row.append(token)
        seconds.append(time.perf_counter() - began)
    return Written([tuple(row) for row in found], seconds)


def batches(lanes: Iterable[Lane]) -> Iterator[tuple[list[Lane], Any]]:
    """Plain caches of one length as one; quantised ones as they are."""
    groups: dict[object, list[Lane]] = {}
    for lane in lanes:
        alone = lane.method.kind == "quantized"
        groups.setdefault(lane.method.name if alone else lane.cache.get_seq_length(), []).append(lane)
    for group in groups.values():
        yield group, group[0].cache if len(group) == 1 else joined([lane.cache for lane in group])


def joined(caches: list[Any]) -> Any:
    found = DynamicCache()
    for index, layers in enumerate(zip(*(cache.layers for cache in caches), strict=True)):
        found.update(torch.cat([x.keys for x in layers]), torch.cat([x.values for x in layers]), index)
    return found


def held_bytes(found: Any) -> int:
    """Bytes of all tensors in a cache, quantised ones with their scales and shifts."""
    if isinstance(found, Tensor):
        if hasattr(found, "__tensor_flatten__"):
            return sum(held_bytes(getattr(found, name)) for name in found.__tensor_flatten__()[0])
        return found.untyped_storage().nbytes()
    if isinstance(found, dict):
        return sum(map(held_bytes, found.values()))
    if isinstance(found, (list, tuple)):
        return sum(map(held_bytes, found))
    return held_bytes(vars(found)) if type(found).__module__.startswith("transformers.") else 0


def run(model: Any, header: Header, prompt: Prompt, mode: Mode, read: Callable[..., None]) -> list[Answer]:
    """A row for every method and ratio."""
    compressed, _ = prompt.parts(mode)
    lanes = [open_lane(model, *lane, len(compressed)) for lane in header.lanes()]
    shared = [lane for lane in lanes if lane.method.kind != "masked"]
    answers = answer(model, header, prompt, mode, read, shared) if shared else []
    for lane in lanes:
        if lane.method.kind == "masked":
            answers += answer(model, header, prompt, mode, read_alone, [lane])
    return answers


def answer(
    model: Any, header: Header, prompt: Prompt, mode: Mode, read: Callable[..., None], lanes: list[Lane]
) -> list[Answer]:
    compressed, after = prompt.parts(mode)
    began = time.perf_counter()
    read(model, torch.tensor([compressed], device=model.device), lanes)
    prefill_s = time.perf_counter() - began
    answers = []
    for group, cache in batches(lanes):
        rest = torch.tensor([after] * len(group), device=model.device)
        sizes = [(held_bytes(lane.cache), lane.cache.get_seq_length()) for lane in group]
        written = write(model, cache, rest, len(compressed), prompt.max_new_tokens, set(header.eos_token_ids))
        for lane, (num_bytes, slots), ids in zip(group, sizes, written.token_ids, strict=True):
            steps = [1e3 * each for each in written.seconds[1 : len(ids)]]
            answers.append(
                Answer(
                    prompt.workload, prompt.task, prompt.index, mode, lane.method.name, lane.ratio, ids, num_bytes,
                    num_bytes, slots, prefill_s, written.seconds[0], statistics.median(steps) if steps else None,
                )
            )  # fmt: skip
    return answers


def versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("work", type=Path, help="folder with jobs.jsonl, where peer.jsonl is written")
    parser.add_argument("--alone", action="store_true", help="a forward of its own for every method")
    parser.add_argument("--part", type=part_of, default=(0, 1), metavar="I/N", help="every Nth prompt, from the Ith on")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="begin no prompt after so many seconds")
    options = parser.parse_args()
    began, started = time.monotonic(), time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    header, prompts = read_jobs(options.work)
    model = AutoModelForCausalLM.from_pretrained(
        header.folder, dtype=getattr(torch, header.dtype), attn_implementation="sdpa"
    )
    model.to(header.device).eval()
    device = torch.cuda.get_device_name() if header.device == "cuda" else "CPU"
    side = "peer_alone" if options.alone else "peer"
    index, count = options.part
    name = f"{side}.jsonl" if count == 1 else f"{side}.{index}of{count}.jsonl"
    file = AnswerFile(options.work / name, Origin(FORMAT, side, header.commit, started, device, versions()))
    lanes = [(method.name, ratio) for method, ratio in header.lanes()]
    with torch.inference_mode():
        for number, prompt in enumerate(prompts[index::count], 1):
            for mode in header.modes:
                place = (prompt.workload, prompt.task, prompt.index, mode)
                if all((*place, *lane) in file.done for lane in lanes):
                    continue
                if time.monotonic() - began > options.limit_s:
                    return OUT_OF_TIME
                file.append(run(model, header, prompt, mode, read_alone if options.alone else read_together))
            print(f"prompt {number}/{len(prompts)}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
