"""Speed and memory on one GPU, on a model of the Llama-3.1-8B shape with random weights."""

COMMANDS = ("table", "attention", "decode", "prefill", "capacity", "peers", "sweep", "tune")
