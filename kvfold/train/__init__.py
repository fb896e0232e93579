"""Offline calibration and training for a model: learned scorer, head profiles, low-rank bases."""
