"""The one runner that calls the model, and the loop that generates."""
