"""Context parallelism: each sequence is sharded over ranks, and attention covers the tokens of all ranks.

torch and Megatron-LM use this name. DeepSpeed says sequence parallelism, a name that Megatron-LM uses for something
else (parallel/tensor). plain.py (ring attention) and plain_ulysses.py (Ulysses) are read in class. attention.py has
both for real models, order.py assigns tokens to ranks, and module.py applies them to any torch module.

H. Liu, M. Zaharia and P. Abbeel, "Ring attention with blockwise transformers for near-infinite context",
arXiv:2310.01889; S. A. Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509; W. Brandon et al., "Striped attention",
arXiv:2311.09431. The zigzag order is used by Megatron-LM and by "Llama 3", arXiv:2407.21783, section 3.3.2.
"""

from dtlib.parallel.context import checks  # noqa: F401  # installs the checks of plain.py on import
from dtlib.parallel.context.module import ContextParallel

__all__ = ["ContextParallel"]
