"""Models by name: where they can be had, downloaded, verified and converted to a transformers checkpoint."""
