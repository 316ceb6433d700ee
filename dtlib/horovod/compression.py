"""Compression of messages to fewer bits per number. Counterpart: ``horovod.torch.Compression``."""

import torch
from torch import Tensor


class NoneCompressor:
    """No compression, and the interface of all compressors."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        """Return the tensor to send, and the context that ``decompress`` needs."""
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> Tensor:
        """Return ``tensor`` in its original dtype; ``ctx`` is the context from ``compress``."""
        return tensor if ctx is None else tensor.to(ctx)  # type: ignore[call-overload]  # a dtype


class FP16Compressor(NoneCompressor):
    """Compression of floating-point tensors to float16: 11 significant bits, up to 65504."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        """Return ``tensor`` in float16, and its original dtype. Integers are not changed."""
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype


class Compression:
    """Horovod's names of the compressors."""

    none, fp16 = NoneCompressor, FP16Compressor
