"""Mixed precision: the model in 16 bits, its master copy and the optimizer's states in 32.

    16 bits   parameters ---> forward, backward ---> gradients
                  ^                                     | / loss scale
    32 bits   master weights <--- optimizer step <--- gradients

P. Micikevicius et al., "Mixed precision training", ICLR 2018.
"""

import torch


class MasterWeights:
    """float32 copies of parameters in 16 bits; an optimizer is made of ``masters`` instead of the parameters.

    float32 and float64 parameters are their own masters.
    """

    def __init__(self, parameters):
        self.parameters = list(parameters)
        self.masters = [
            torch.nn.Parameter(parameter.detach().float()) if parameter.dtype.itemsize == 2 else parameter
            for parameter in self.parameters
        ]

    def take_gradients(self, scale: float = 1.0) -> None:
        """Give the masters the gradients of the parameters, divided by ``scale``."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if parameter is not master:
                master.grad = None if parameter.grad is None else parameter.grad.detach().float()
            if master.grad is not None and scale != 1:
                master.grad.div_(scale)

    def give_values(self) -> None:
        """Give the parameters the values of their masters, rounded."""
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if parameter is not master:
                    parameter.copy_(master)


class LossScale:
    """What the loss is multiplied with, so that small gradients do not vanish in float16.

    It doubles after ``window`` good steps in a row and halves after ``hysteresis`` steps with an overflow; a step that
    overflows is skipped. ``dynamic=False`` keeps it as it is. Counterpart: DeepSpeed's ``DynamicLossScaler``.
    """

    def __init__(self, scale: float = 1.0, dynamic: bool = False, window=1000, hysteresis=2, smallest=1.0):
        self.scale = scale
        self.dynamic = dynamic
        self.window, self.hysteresis, self.smallest = window, hysteresis, smallest
        self._good, self._patience = 0, hysteresis

    def update(self, overflow: bool) -> None:
        """Tell it how a step went."""
        if not self.dynamic:
            return
        if overflow:
            self._good = 0
            self._patience -= 1
            if self._patience <= 0:
                self.scale = max(self.smallest, self.scale / 2)
                self._patience = 1
            return
        self._good += 1
        if self._good % self.window == 0:
            self.scale *= 2
            self._patience = self.hysteresis


def all_finite(gradients) -> bool:
    """True if no gradient has an infinity or a NaN."""
    return all(bool(torch.isfinite(gradient).all()) for gradient in gradients if gradient is not None)


def clip_by_norm(gradients, largest: float) -> float:
    """Scale gradients down together so that their joint 2-norm is at most ``largest``; returns the norm before."""
    gradients = [gradient for gradient in gradients if gradient is not None]
    if not gradients:
        return 0.0
    norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(gradient) for gradient in gradients]))
    torch._foreach_mul_(gradients, float(torch.clamp(largest / (norm + 1e-6), max=1.0)))
    return float(norm)
