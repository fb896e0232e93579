"""The HTTP server: Anthropic and OpenAI wire formats over one scheduler, with a prompt cache.

app -> anthropic, chat, completions, responses -> ask -> prompt -> service -> kvfold.engine.scheduler
                                                   plan, entries, bill, source -> kvfold.store
"""
