"""Context parallelism: ranks share the tokens of each sequence, and attention goes over all of them.

It is torch's and Megatron-LM's word; DeepSpeed says sequence parallelism, and Megatron-LM uses that for another thing
(parallel/tensor). plain.py is ring attention as it is read in class, plain_ulysses.py Ulysses; attention.py has both
for real models, order.py who has which tokens, module.py any module of torch's.

H. Liu, M. Zaharia and P. Abbeel, "Ring attention with blockwise transformers for near-infinite context",
arXiv:2310.01889; S. A. Jacobs et al., "DeepSpeed Ulysses", arXiv:2309.14509; W. Brandon et al., "Striped attention",
arXiv:2311.09431. The zigzag order is that of Megatron-LM and of "Llama 3", arXiv:2407.21783, section 3.3.2.
"""

from dtlib.parallel.context import contract  # noqa: F401  # plain.py's, on import
from dtlib.parallel.context.module import ContextParallel

__all__ = ["ContextParallel"]
