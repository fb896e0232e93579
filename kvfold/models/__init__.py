"""The only place that knows transformers: catalogue and loading, the spec of a model's cache, attaching, the cache."""
