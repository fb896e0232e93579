"""What scorers compute of long prompts on a GPU, without the temporaries of plain operations."""
