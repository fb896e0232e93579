"""Download models by name: catalogue, verified download, conversion to a transformers checkpoint."""
