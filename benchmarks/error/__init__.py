"""What codecs and policies do to attention and to the next tokens of a model, without workloads."""

COMMANDS = ("codec", "policy")
