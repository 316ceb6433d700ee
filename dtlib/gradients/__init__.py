"""Code that strategies share: the gradient reducer, flat buffers, shards, mixed precision, and preconditions."""
