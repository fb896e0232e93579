"""Serialization of cached prefixes: entry format, signing, snapshots, schema checks, encodings of tensors."""
