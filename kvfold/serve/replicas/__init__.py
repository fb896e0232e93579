"""Several server processes behind one address: a proxy that sends prompts which begin alike to the same process.

client -> proxy (routing: rendezvous hash, bounded load) -> upstream (Unix socket) -> kvfold.serve.app of a replica
          combine: /metrics, /health, dashboard          fleet: starts, watches and ends the processes
"""
