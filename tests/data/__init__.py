"""Stored reference data and its loaders."""
