"""The inference engine: model runner, continuous-batching scheduler, chunked prefill, sampling, speculation."""
