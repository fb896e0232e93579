"""What is learned about a model before it serves: the networks of the score `learned`."""
