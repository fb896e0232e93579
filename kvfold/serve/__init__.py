"""The HTTP server: Anthropic and OpenAI wire formats over one scheduler, with a prompt cache.

app -> api.{anthropic, openai_*} -> api.request -> prompt -> service -> kvfold.engine.scheduling (continuous batching)
                                    cache.{breakpoints, source, usage} -> kvfold.store (prefix cache)
"""
