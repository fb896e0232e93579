"""A drop-in transformers `Cache` for `model.generate(…, past_key_values=cache)`, batches and padding included.

    cache = kvfold.Cache(model, "keydiff + 4x")  # a transformers model, or one of `kvfold.load`
    model.generate(**inputs, past_key_values=cache)  # of a kvfold.Model: model.hf.generate

Every row of the batch is a sequence of its own, without its (left) padding. `update` only stages keys and values; the
attention function commits them. Tokens of the last forward can be cropped, as assisted decoding does with rejected
drafts; older ones cannot. `copy.deepcopy` forks: sealed pages are shared, copy-on-write.

    B batch   Q query heads   H KV heads   T tokens   D head dim
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NoReturn
from weakref import ref

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache as HfCache

from kvfold.compression.observe import ObserverSnapshot, forget_prompt
from kvfold.core import ModelSpec
from kvfold.errors import InputError, ModelError
from kvfold.models.attach import arena_of, attach, is_attached, module_of, spec_of
from kvfold.models.check import check_drop_in, check_policy
from kvfold.models.spec import attention_modules
from kvfold.pages.compaction import crop
from kvfold.pages.page_config import PageConfig
from kvfold.pages.sequence import SequenceCache
from kvfold.passes.decode import DecodePass
from kvfold.passes.prefill import PrefillPass
from kvfold.policy.policy import Policy
from kvfold.policy.size import bytes_text
from kvfold.stats import Stats, kept_positions, measure


class Cache(HfCache):  # type: ignore[misc]
    """The compressed KV cache of a batch, filled by the model's own forward calls, or before them by `kvfold.compress`.

    A model that is not attached is attached; `kvfold.attach(model)` in a `with` statement undoes that at its end.
    """

    def __init__(self, model: Any, policy: str | Policy, *, page_size: int = 16, open_len: int = 32) -> None:
        self._setup(model, Policy.parse(policy), PageConfig(page_size, open_len))
        check_drop_in(self.policy)

    @classmethod
    def filled(
        cls, model: Any, policy: Policy, config: PageConfig, sequences: Sequence[SequenceCache], seen_len: int
    ) -> Cache:
        """Over sequences that have read `seen_len` tokens, padding included. Later prompts are not compressed."""
        found = object.__new__(cls)
        found._setup(model, policy, config)
        found.sequences, found._seen_len, found._compresses = list(sequences), seen_len, False
        return found

    def _setup(self, model: Any, policy: Policy, config: PageConfig) -> None:
        super().__init__(layers=[])
        hf = module_of(model)
        if not is_attached(hf):
            attach(hf)
        self.spec: ModelSpec = spec_of(model)
        self._model = ref(hf)
        self.attention_ids = {id(module) for module in attention_modules(hf)}
        self.policy = policy
        check_policy(self.policy, self.spec)
        self.arena = arena_of(hf)
        self.config = config
        self._compresses = True  # the prompts that forward calls read
        self.sequences: list[SequenceCache] = []
        self._seen_len = 0  # tokens of the padded batch, which is what transformers counts
        self._num_added = 0  # of these, by the last forward
        self._pass: PrefillPass | DecodePass | None = None  # the forward that is running, or was interrupted
        self._undo = ObserverSnapshot([])
        self._starts: list[int] = []  # first real token of each row in the current forward

    # The interface of transformers' Cache

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._seen_len

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        if query_length == 0:  # transformers removes the cached tokens from the input, and none was left
            self._refuse_reuse()
        return self._seen_len + query_length, 0

    def get_max_length(self, layer_idx: int | None = None) -> int:
        return -1

    @property
    def batch_size(self) -> int:
        return len(self.sequences) or -1

    @property
    def is_initialized(self) -> bool:
        return bool(self.sequences)

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any) -> Any:
        model = self._model()
        if model is None or not is_attached(model):
            raise ModelError(
                "the model was detached from kvfold after this cache was made; call kvfold.attach(model) again, or use "
                "a cache of transformers"
            )
        return _Handle(self, layer_idx, key_states.detach(), value_states.detach()), None

    # Inspection

    @property
    def resident_bytes(self) -> int:
        return sum(sequence.resident_bytes for sequence in self.sequences)

    def stats(self, row: int = 0) -> Stats:
        """Sizes of one row now: lengths, resident bytes, bytes read per decode step, slots by layer and head.

        `print(cache)` and `resident_bytes` are of all rows.
        """
        return measure(self._row(row))

    def kept(self, layer: int, head: int, row: int = 0) -> list[int]:
        """Original positions of the slots that one head of a row keeps; padding is not counted."""
        return kept_positions(self._row(row), layer, head)

    def _row(self, row: int) -> SequenceCache:
        if not -len(self.sequences) <= row < len(self.sequences):
            raise InputError(f"row {row} does not exist; the cache holds {len(self.sequences)} rows")
        return self.sequences[row]

    def __repr__(self) -> str:
        if not self.sequences:
            return f'kvfold.Cache("{self.policy.short}", empty)'
        wide = f", dtype={str(self.spec.kv_dtype).removeprefix('torch.')}" if self.spec.kv_dtype.itemsize > 2 else ""
        full = sum(self.spec.full_bytes(sequence.logical_len) for sequence in self.sequences)
        return (
            f'kvfold.Cache("{self.policy.short}", rows={len(self.sequences)}, tokens={self._seen_len}, '
            f"resident={bytes_text(self.resident_bytes)}, full={bytes_text(full)}, "
            f"ratio={full / max(self.resident_bytes, 1):.2f}x{wide})"
        )

    # Copies

    def __deepcopy__(self, memo: dict[int, Any]) -> Cache:
        """An independent cache over the same tokens: rows are forked, and only open blocks are copied."""
        if self._pass is not None:
            self._drop_interrupted()
        branch = object.__new__(Cache)
        memo[id(self)] = branch
        branch.__dict__.update(self.__dict__ | {"sequences": []})
        for sequence in self.sequences:
            branch.sequences.append(sequence.fork())
        branch._undo = ObserverSnapshot([])
        return branch

    def __copy__(self) -> Cache:
        return copy.deepcopy(self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise InputError(
            "a kvfold.Cache cannot be pickled: its slots lie in the memory of one process; use copy.deepcopy for a "
            "second cache over the same tokens, or kvfold.Session and its save() for a file"
        )

    # One forward

    def check_positions(self, position_BT: Tensor) -> None:
        """Refuse tokens at positions that are held already: transformers cut the held ones off an input that was no
        longer than them. On a GPU the position of a single token is not read, which would wait for every decode step.
        """
        if position_BT.shape[-1] == 1 and position_BT.device.type != "cpu":
            return
        last_B = position_BT[:, -1].expand(len(self.sequences)) if len(position_BT) == 1 else position_BT[:, -1]
        if any(last < row.logical_len for last, row in zip(last_B.tolist(), self.sequences, strict=False)):
            self._refuse_reuse()

    def _refuse_reuse(self) -> NoReturn:
        raise InputError(
            f"this cache has read {self._seen_len} tokens and the input is no longer than that; give all of these "
            "tokens and the new ones behind them, with copy.deepcopy(cache) for each question, or make a new "
            "kvfold.Cache for another prompt"
        )

    def attend(self, layer: int, query: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, mask: Tensor | None) -> Tensor:
        if layer == 0:
            self._begin(k_BHTD, mask)
        current = self._pass
        assert current is not None
        if isinstance(current, PrefillPass):
            out_BTQD = self._read(current, layer, query, k_BHTD, v_BHTD)
        else:  # no row is padded
            packed = (x.transpose(0, 1).flatten(1, 2) for x in (query, k_BHTD, v_BHTD))
            out_BTQD = current.attend_packed(layer, *packed).unflatten(0, (len(query), -1))
        if layer == self.spec.num_layers - 1:
            self._end(current, query.shape[2])
        return out_BTQD

    def _read(self, current: PrefillPass, layer: int, query: Tensor, k_BHTD: Tensor, v_BHTD: Tensor) -> Tensor:
        out = torch.zeros_like(query)
        for row, start in enumerate(self._starts):
            new = query[row, :, start:], k_BHTD[row, :, start:], v_BHTD[row, :, start:]
            out[row, :, start:] = current.attend(layer, row, *new)
        current.finish_layer(layer)
        return out.transpose(1, 2)

    def _end(self, current: PrefillPass | DecodePass, num_tokens: int) -> None:
        current.finish()
        self._pass = None
        self._seen_len += num_tokens
        self._num_added = num_tokens
        if isinstance(current, PrefillPass):
            for sequence in self.sequences:
                forget_prompt(sequence)

    def _begin(self, k_BHTD: Tensor, mask: Tensor | None) -> None:
        batch, num_tokens = k_BHTD.shape[0], k_BHTD.shape[2]
        if not self.sequences:
            check_drop_in(self.policy)
            self.sequences, self._compresses = self._new_sequences(batch), True
        if batch != len(self.sequences):
            raise InputError(self._other_rows(batch))
        starts = _left_padding(mask, batch, num_tokens, self._seen_len)
        self._drop_interrupted()
        for sequence in self.sequences:
            sequence.commit_all()
        self._starts = starts
        grows = all(sequence.logical_len for sequence in self.sequences) and not any(starts)
        reads_prompt = not self._compresses and num_tokens > 1  # behind a compressed context, as a session reads it
        if grows and num_tokens <= self.config.open_len and not reads_prompt:
            self._pass = DecodePass.begin(self.sequences, num_tokens)
        else:
            lens = [num_tokens - start for start in starts]
            self._pass = PrefillPass.begin(self.sequences, lens, compress=self._compresses)
        self._undo = ObserverSnapshot(self.sequences)

    def _other_rows(self, batch: int) -> str:
        held = f"the cache holds {len(self.sequences)} row(s), the input {batch}"
        times, rest = divmod(batch, len(self.sequences))
        if rest or times < 2:
            return f"{held}; use a cache per batch"
        return (
            f"{held}; for num_beams or num_return_sequences={times} call cache.batch_repeat_interleave({times}) first, "
            "for other prompts use a cache per batch"
        )

    def _new_sequences(self, batch: int) -> list[SequenceCache]:
        """One for each row, or none if the arena is full."""
        found: list[SequenceCache] = []
        try:
            for _ in range(batch):
                found.append(SequenceCache(self.arena, self.spec, self.policy, self.config))
        except BaseException:
            for sequence in found:
                sequence.release()
            raise
        return found

    def _drop_interrupted(self) -> None:
        """Undo a forward that did not reach the last layer: it has changed only the observer state."""
        if self._pass is not None:
            self._undo.restore()
            self._pass = None

    # Rows

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: rows become copies of other rows; sealed memory is shared."""
        self._select([int(i) for i in beam_idx])

    def batch_select_indices(self, indices: Tensor) -> None:
        self._select([int(i) for i in indices.nonzero().flatten()] if indices.dtype == torch.bool else indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select([i for i in range(len(self.sequences)) for _ in range(repeats)])

    def _select(self, rows: Sequence[int]) -> None:
        last_use = {row: at for at, row in enumerate(rows)}
        chosen = [
            self.sequences[row] if last_use[row] == at else self.sequences[row].fork() for at, row in enumerate(rows)
        ]
        for row, sequence in enumerate(self.sequences):
            if row not in last_use:
                sequence.release()
        self.sequences = chosen

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens of the last forward; a negative number, as transformers gives it. A prompt that ran together
        with drafts stays compressed as it was with them."""
        count = abs(tokens_to_remove)
        if tokens_to_remove > 0:
            raise InputError(f"crop({tokens_to_remove}): give the tokens to remove as a negative number")
        most = min([self._num_added, *(sequence.logical_len for sequence in self.sequences)])
        if count > most:
            raise InputError(f"crop(-{count}): only the {most} tokens of the last forward can be removed")
        for sequence in self.sequences:
            crop(sequence, count)
        self._seen_len -= count
        self._num_added -= count

    def reset(self) -> None:
        """Empty the cache and free its pages."""
        for sequence in self.sequences:
            sequence.release()
        self.sequences, self._seen_len, self._num_added, self._pass = [], 0, 0, None

    def __del__(self) -> None:
        for sequence in self.__dict__.get("sequences", ()):
            sequence.release()


@dataclass
class _Handle:
    cache: Cache
    layer: int
    k_BHTD: Tensor
    v_BHTD: Tensor

    def check(self, module: nn.Module, position_ids: Tensor | None) -> None:
        if id(module) not in self.cache.attention_ids:
            raise ModelError("this kvfold.Cache was made for another model; make one for the model that generates")
        if self.layer == 0 and position_ids is not None and position_ids.dim() == 2:
            self.cache.check_positions(position_ids)

    @torch.no_grad()
    def attend(self, query: Tensor, mask: Tensor | None) -> Tensor:
        return self.cache.attend(self.layer, query, self.k_BHTD, self.v_BHTD, mask)


def _left_padding(mask: Tensor | None, batch: int, num_tokens: int, seen_len: int) -> list[int]:
    """Number of padding tokens at the start of each row: a token that may not attend to itself is padding."""
    if mask is None:
        return [0] * batch
    if mask.shape[-1] < seen_len + num_tokens:
        raise InputError(f"the attention mask covers {mask.shape[-1]} tokens, not the {seen_len + num_tokens} seen")
    own = mask.expand(batch, -1, -1, -1)[:, 0].diagonal(offset=seen_len, dim1=-2, dim2=-1)[:, :num_tokens]
    return first_real(own if own.dtype == torch.bool else own == 0)


def first_real(real_BT: Tensor, least: int = 1) -> list[int]:
    """The first token of each row that is no padding; InputError unless padding is on the left of `least` tokens."""
    num_tokens = real_BT.shape[1]
    start_B = (~real_BT).sum(-1)
    ordered_BT = real_BT == (torch.arange(num_tokens, device=real_BT.device) >= start_B.unsqueeze(-1))
    if not bool(ordered_BT.all()) or bool((start_B > num_tokens - least).any()):
        needed = "a token" if least == 1 else f"{least} tokens"
        raise InputError(
            f"padding must be on the left, and every row needs {needed}; set tokenizer.padding_side='left'"
        )
    found: list[int] = start_B.tolist()
    return found
