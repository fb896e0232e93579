"""`kvfold serve` as a process, asked over HTTP."""

COMMANDS = ("load", "fairness", "prefix", "prompt_cost", "replicas", "routers", "engine_share")
