"""Vectors of sentences: TF-IDF of the text itself, static word vectors, and small encoders."""
