"""Type aliases for libraries that are imported late; in annotations they stand in quotes, as in ``"Tensor | None"``."""

from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import ipyparallel
    import torch
    from ipykernel import ipkernel
    from matplotlib import axis, figure

    import dtlib.comm
    from dtlib.lab.engines import engine_set

AsyncResult: TypeAlias = "ipyparallel.AsyncResult"
Client: TypeAlias = "ipyparallel.Client"
EngineSet: TypeAlias = "engine_set.EngineSet"
Communicator: TypeAlias = "dtlib.comm.Communicator"
Axis: TypeAlias = "axis.Axis"
Figure: TypeAlias = "figure.Figure"
Kernel: TypeAlias = "ipkernel.IPythonKernel"
Dtype: TypeAlias = "torch.dtype"
Module: TypeAlias = "torch.nn.Module"
Tensor: TypeAlias = "torch.Tensor"
