"""KV events: which blocks of which prompts this process holds, told to routers over ZeroMQ in vLLM's format.

blocks: tiers' events -> BlockStored, BlockRemoved      messages: the format      publisher: sockets, replay
"""
