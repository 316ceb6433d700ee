"""What every rank did and held: traces, memory, progress."""
