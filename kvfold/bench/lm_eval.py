"""kvfold as a model of the LM Evaluation Harness (EleutherAI): its tasks and scores over compressed caches.

    python -m kvfold.bench.lm_eval run --model kvfold --model_args "model=smollm2-135m,policy=keydiff + 4x" --tasks …

is the harness's own command line with the model "kvfold" known to it; importing this file makes it known in Python. The
harness counts, samples and scores; `kvfold.bench.likelihood` says what is read over the compressed cache. Tokens,
windows and truncation are those of the harness's `hf` model, so that policy `full` in fp32 gives its log-likelihoods.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby, islice
from typing import Any

import torch

from kvfold import __version__
from kvfold.bench.likelihood import BLOCK_LEN, GenerateUntil, PolicyLM
from kvfold.engine.sampling import Sampling
from kvfold.errors import InputError, KvfoldWarning, MissingExtra
from kvfold.models.loader import load

try:
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.models.utils import normalize_gen_kwargs
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ModuleNotFoundError as error:
    raise MissingExtra(
        'the model of the LM Evaluation Harness needs lm_eval, which is not installed; pip install "kvfold[bench]"'
    ) from error

MAX_NEW_TOKENS = 256
Pair = tuple[Any, list[int], list[int]]  # the strings, or None; tokens of context and continuation


@register_model("kvfold")
class KvfoldLM(TemplateLM):  # type: ignore[misc]
    """`batch_size`: replies that are decoded together; `block_len`: of a rolling text, see `PolicyLM.text`."""

    def __init__(
        self,
        model: str,
        policy: str = "full",
        *,
        dtype: str = "auto",
        device: str = "auto",
        memory: str | None = None,
        max_length: int | None = None,
        batch_size: int | str = 1,
        block_len: int = BLOCK_LEN,
    ) -> None:
        super().__init__()
        # The harness's command line asks for cuda:0 where nobody named a device.
        usable = "auto" if device == "cuda:0" and not torch.cuda.is_available() else device
        self.loaded = load(model, dtype=dtype, device=usable, memory=memory)
        self.judge = PolicyLM(self.loaded, policy, block_len=block_len)
        self.tokenizer = self.loaded.tokenizer
        self.max_length = max_length or self.loaded.spec.max_positions
        self.batch_size = _whole("batch_size", batch_size)
        self._device = self.loaded.device

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else int(begin)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Without a flag: as the tokenizer does, but never a second first token."""
        if add_special_tokens is None and string.startswith(self.tokenizer.decode([self.prefix_token_id])):
            add_special_tokens = False
        flags = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        found: list[int] = self.tokenizer.encode(string, **flags)
        return found

    def _loglikelihood_tokens(self, requests: Sequence[Pair], **_: Any) -> list[tuple[float, bool]]:
        """Options of one context follow each other in multiple choice: such a run is read once."""
        found: list[tuple[float, bool]] = []
        for context, run in groupby(map(self._cut, requests), key=lambda pair: pair[0]):
            found += self.judge.continuations(context, [option for _, option in run])
        for request, likelihood in zip(requests, found, strict=True):
            self.cache_hook.add_partial("loglikelihood", request[0], likelihood)
        self._tell_whole()
        return found

    def _cut(self, pair: Pair) -> tuple[list[int], list[int]]:
        """From the left, to what the model was made for; of a context one token stays."""
        _, context, option = pair
        if len(option) > self.max_length:
            raise InputError(f"a continuation has {len(option)} tokens; the model takes {self.max_length} at most")
        return context[-(self.max_length + 1 - len(option)) :], option

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        found = []
        for request in requests:
            (text,) = request.args
            found.append(sum(self.judge.text(*window) for window in self._windows(text)))
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, found[-1])
        self._tell_whole()
        return found

    def _windows(self, text: str) -> Iterator[tuple[list[int], list[int]]]:
        windows = get_rolling_token_windows(
            token_list=self.tok_encode(text), prefix_token=self.prefix_token_id, max_seq_len=self.max_length,
            context_len=1,
        )  # fmt: skip
        return map(make_disjoint_window, windows)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        found: list[str] = []
        for batch in _batches(requests, self.batch_size):
            found += self.judge.replies([self._ask(*request.args) for request in batch])
        for request, reply in zip(requests, found, strict=True):
            self.cache_hook.add_partial("generate_until", request.args, reply)
        self._tell_whole()
        return found

    def _ask(self, context: str, options: dict[str, Any]) -> GenerateUntil:
        wanted = normalize_gen_kwargs(options, MAX_NEW_TOKENS)
        stop = tuple(text for text in wanted.pop("until") if text)
        most = wanted.pop("max_gen_toks")
        if most >= self.max_length:
            raise InputError(f"{most} new tokens leave no room for a context in {self.max_length}; ask for fewer")
        return GenerateUntil(self.tok_encode(context)[-(self.max_length - most) :], most, stop, _sampling(wanted))

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    @property
    def tokenizer_name(self) -> str:
        return str(self.tokenizer.name_or_path).replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Stands in the harness's results: what was run, and how much of it was really compressed."""
        judge, spec = self.judge, self.loaded.spec
        return {
            "kvfold": __version__,
            "kvfold_policy": str(judge.policy),
            "kvfold_weights": self.loaded.weights_digest,
            "kvfold_dtype": f"{spec.dtype}/{spec.kv_dtype}".replace("torch.", ""),
            "kvfold_read": judge.num_read,
            "kvfold_kept_whole": judge.num_whole,
        }

    def _tell_whole(self) -> None:
        judge = self.judge
        if judge.num_whole:
            warnings.warn(
                f"{judge.num_whole} of {judge.num_read} contexts were too short for {judge.policy} and were kept "
                "whole; compare policies on tasks with longer contexts",
                KvfoldWarning,
                stacklevel=2,
            )


def _sampling(wanted: dict[str, Any]) -> Sampling:
    wanted.pop("do_sample", None)  # the harness sets temperature 0 where it is false
    known = {name: wanted.pop(name) for name in ("temperature", "top_k", "top_p", "seed") if name in wanted}
    if wanted:
        raise InputError(f"generation option {min(wanted)} is not known; options: temperature, top_k, top_p, seed")
    return Sampling(**{name: value for name, value in known.items() if value is not None})


def _whole(name: str, value: int | str) -> int:
    try:
        found = int(value)
    except ValueError:
        found = 0
    if found < 1:
        raise InputError(f"{name} is {value}; give a whole number of 1 or more")
    return found


def _batches(requests: Iterable[Any], size: int) -> Iterator[list[Any]]:
    left = iter(requests)
    while batch := list(islice(left, size)):
        yield batch


def main() -> None:
    from lm_eval.__main__ import cli_evaluate

    cli_evaluate()


if __name__ == "__main__":
    main()
