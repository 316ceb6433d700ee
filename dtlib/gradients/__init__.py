"""What strategies share: flat memory, gradients that leave during the backward pass, slices, precision."""
