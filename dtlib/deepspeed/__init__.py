"""DeepSpeed's names, for scripts and listings of its tutorials: ``import dtlib.deepspeed as deepspeed``.

``docs/reference/conformance/deepspeed.md`` lists which names are offered, and alternatives for the others.
"""

from dtlib.deepspeed import pipe as pipe
from dtlib.deepspeed import utils as utils
from dtlib.deepspeed.pipe import PipelineModule as PipelineModule
from dtlib.deepspeed.scripts import add_config_arguments as add_config_arguments
from dtlib.deepspeed.scripts import init_distributed as init_distributed
from dtlib.training import initialize as initialize
