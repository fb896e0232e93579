"""What a model computes between its matrix products, for GPUs; triton is imported by kernel files alone."""
