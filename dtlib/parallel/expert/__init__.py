"""Expert parallelism: experts are sharded over ranks, and a gate sends each token to one or two of them.

plain.py is read in class; layer.py supports real models. N. Shazeer et al., "Outrageously large neural networks",
arXiv:1701.06538; D. Lepikhin et al., "GShard", arXiv:2006.16668. Counterparts: DeepSpeed's and Megatron-LM's mixtures
of experts.
"""

from dtlib.gradients.precision import clip_grad_norm_
from dtlib.parallel.expert import checks  # noqa: F401  # installs the checks of plain.py on import
from dtlib.parallel.expert.layer import MixtureOfExperts, whole_state_dict

__all__ = ["MixtureOfExperts", "clip_grad_norm_", "whole_state_dict"]
