"""Commands that fit or train something on a model, or write what others train on."""
