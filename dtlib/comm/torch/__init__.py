"""Communication through torch's own process groups, and of tensors on GPUs."""
