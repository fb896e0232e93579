"""The prefix store without a server."""

COMMANDS = ("tiers", "encodings")
