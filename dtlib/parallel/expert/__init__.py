"""Expert parallelism: a gate sends each token to a few of many experts, which ranks share out.

plain.py is what is read in class; layer.py has it for real models. N. Shazeer et al., "Outrageously large neural
networks", arXiv:1701.06538; D. Lepikhin et al., "GShard", arXiv:2006.16668. Counterparts: DeepSpeed's and Megatron-LM's
mixtures of experts.
"""

from dtlib.parallel.expert import contract  # noqa: F401  # plain.py's, on import
from dtlib.parallel.expert.layer import MixtureOfExperts, clip_grad_norm_, load_whole_state_dict, whole_state_dict

__all__ = ["MixtureOfExperts", "clip_grad_norm_", "load_whole_state_dict", "whole_state_dict"]
