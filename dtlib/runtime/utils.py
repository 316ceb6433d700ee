"""DeepSpeed's name: ``deepspeed.runtime.utils.set_random_seed``."""

import random

import numpy as np
import torch


def set_random_seed(seed: int) -> None:
    """Seed Python's, numpy's and torch's generators. Counterpart: ``deepspeed.runtime.utils.set_random_seed``."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
