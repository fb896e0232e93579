"""Texts longer than the context window: chunks read as forks of one shared prefix, answers merged level by level."""
