"""What must not be shared: prefixes of other tenants, weights, dtypes, policies, tokenizers and shapes of runs."""

from __future__ import annotations

import os
import subprocess
import sys

import torch

from kvfold.models.loader import Model, wrap
from kvfold.store import PrefixStore
from kvfold.store.store import tokenizer_digest
from tests.store.common import CHUNK, make_prefixes
from tests.store.prefix_runs import TOKENS, matched, stored
from tests.tiny import build, ready, tokenizer


def test_tenants_share_nothing(model: Model, store: PrefixStore) -> None:
    stored(store, model, tenant="a")
    assert [matched(store, model, tenant=tenant) for tenant in ("a", "b", "")] == [5 * CHUNK, 0, 0]


def test_other_weights_under_the_same_name_share_nothing(model: Model, store: PrefixStore) -> None:
    stored(store, model)
    other = ready("llama", seed=1)
    assert other.name == model.name and matched(store, other) == 0


def test_other_dtypes_share_nothing(model: Model, store: PrefixStore) -> None:
    stored(store, model)
    assert matched(store, wrap(model.hf, tokenizer(), kv_dtype=torch.bfloat16)) == 0
    assert matched(store, wrap(build().to(torch.bfloat16), tokenizer())) == 0


def test_other_policies_share_nothing(model: Model, store: PrefixStore) -> None:
    stored(store, model)
    assert [matched(store, model, policy) for policy in ("full", "full + int8", "knorm + 2x")] == [5 * CHUNK, 0, 0]


def test_other_tokenizers_share_nothing(model: Model, store: PrefixStore) -> None:
    stored(store, model)
    other = tokenizer()
    other.add_tokens(["<more>"])
    assert matched(store, wrap(model.hf, other)) == 0


def test_runs_of_other_shapes_share_nothing(model: Model, store: PrefixStore) -> None:
    """What another length of chunks computed differs in its last bits."""
    stored(store, model)
    hit = store.prefixes(model, prefill_len=2 * CHUNK).lookup(TOKENS)
    hit.sequence.release()
    assert hit.matched_tokens == 0


def test_scopes_are_the_same_in_every_process(model: Model, store: PrefixStore) -> None:
    program = (
        "from tests.store.common import *; from tests.tiny import ready; from kvfold.store import *;"
        "print(make_prefixes(PrefixStore([], chunk_len=CHUNK), ready(), 'knorm + 2x').binding.scope)"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "7"}
    found = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert found.strip() == make_prefixes(store, model, "knorm + 2x").binding.scope
    assert tokenizer_digest(tokenizer()) == tokenizer_digest(tokenizer())
