"""Communication through torch's process groups, and for CUDA tensors."""
