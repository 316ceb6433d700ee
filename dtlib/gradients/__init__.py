"""What strategies share: the reducer of gradients, flat memory, shards, precision, and what plain classes rely on."""
