"""Prometheus metrics: counters, histograms (TTFT, inter-token latency) and gauges in text format 0.0.4."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import accumulate
from threading import Lock

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
_HELP = {
    "kvfold_requests_total": "HTTP requests by path and status.",
    "kvfold_prompt_tokens_total": "Prompt tokens by billing: cache read, cache write or plain.",
    "kvfold_reused_tokens_total": "Prompt tokens whose KV came from the prefix cache.",
    "kvfold_output_tokens_total": "Generated tokens.",
    "kvfold_cache_lookups_total": "Prompt-cache lookups by result: hit, or the reason of the miss.",
    "kvfold_first_token_seconds": "Time to first token (TTFT).",
    "kvfold_token_seconds": "Inter-token latency (ITL), mean of each reply.",
    "kvfold_memory_requests_total": "Served requests that name a user, by whether facts were recalled for the prompt.",
    "kvfold_memory_facts_written_total": "Facts of users written to the memory.",
    "kvfold_memory_errors_total": "Recalls and writes of the memory that failed.",
    "kvfold_proxy_requests_total": "Requests that a replica has answered, by replica.",
    "kvfold_proxy_retries_total": "Requests that a replica took and did not answer; each was tried once more.",
    "kvfold_packed_tokens_total": "Prompt tokens packed for the engine (--engine).",
    "kvfold_packed_slots_total": "KV slots per head that stand for them.",
    "kvfold_pack_failures_total": "Prefixes that could not be packed and were sent as they are.",
    "kvfold_pack_refusals_total": "Packed prefixes that the engine did not serve; each was packed once more.",
    "kvfold_store_events_total": "Prefix-store events by kind, tier and reason.",
}
HISTOGRAMS = ("kvfold_first_token_seconds", "kvfold_token_seconds")
Labels = tuple[tuple[str, str], ...]


class Metrics:
    """Written by any thread."""

    def __init__(self, histograms: Iterable[str] = HISTOGRAMS) -> None:
        self._lock = Lock()
        self._counts: dict[str, defaultdict[Labels, float]] = {}
        self._read: dict[str, tuple[str, str, Callable[[], float]]] = {}  # name -> type, help, reader
        # Shown from the first scrape on: rates need every bucket. Counts are of values in a bucket, not in those below.
        self._seen = {name: [0] * (len(BUCKETS_S) + 1) for name in histograms}
        self._sums = dict.fromkeys(histograms, 0.0)

    def add(self, name: str, amount: float = 1, **labels: str) -> None:
        with self._lock:
            self._counts.setdefault(name, defaultdict(float))[tuple(sorted(labels.items()))] += amount

    def observe(self, name: str, seconds: float) -> None:
        """Into a histogram."""
        with self._lock:
            self._seen[name][bisect_left(BUCKETS_S, seconds)] += 1
            self._sums[name] += seconds

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A value that is asked for when it is shown."""
        self._read[name] = "gauge", text, read

    def counter(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A count that is kept elsewhere."""
        self._read[name] = "counter", text, read

    def text(self, more: Mapping[str, Mapping[str, int]] | None = None) -> str:
        """Everything; `more` are counters kept elsewhere: name -> event -> count."""
        with self._lock:
            counts = {name: dict(found) for name, found in self._counts.items()}
            for name, seen in self._seen.items():
                upto = dict(zip((*(f"{bound:g}" for bound in BUCKETS_S), "+Inf"), accumulate(seen), strict=True))
                counts[f"{name}_bucket"] = {(("le", bound),): count for bound, count in upto.items()}
                counts |= {f"{name}_sum": {(): self._sums[name]}, f"{name}_count": {(): upto["+Inf"]}}
        for name, found in (more or {}).items():
            counts[name] = {(("event", event),): count for event, count in found.items()}
        lines: list[str] = []
        for name in sorted(counts):
            lines += [*_head(name), *(f"{name}{_labels(key)} {value:g}" for key, value in _ordered(counts[name]))]
        for name, (kind, text, read) in sorted(self._read.items()):
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", f"{name} {read():.17g}"]
        return "\n".join(lines) + "\n"


def _ordered(found: Mapping[Labels, float]) -> list[tuple[Labels, float]]:
    """By labels; the buckets of a histogram rise."""
    return sorted(found.items(), key=lambda item: [(name, float(x) if name == "le" else x) for name, x in item[0]])


def _head(name: str) -> list[str]:
    """HELP and TYPE, once for all lines of a histogram."""
    base = name.rsplit("_", 1)[0]
    is_histogram = base in _HELP and name.endswith(("_bucket", "_sum", "_count"))
    if is_histogram and not name.endswith("_bucket"):
        return []
    shown = base if is_histogram else name
    return [f"# HELP {shown} {_HELP.get(shown, shown)}", f"# TYPE {shown} {'histogram' if is_histogram else 'counter'}"]


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = str.maketrans({"\\": "\\\\", '"': '\\"', "\n": "\\n"})
    return "{" + ",".join(f'{name}="{value.translate(escaped)}"' for name, value in labels) + "}"
