"""Fewer bits per number in a message. Counterpart: ``horovod.torch.Compression``."""

import torch
from torch import Tensor


class NoneCompressor:
    """``compress`` returns the tensor that is sent, and the context with which ``decompress`` undoes it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: object) -> Tensor:
        return tensor if ctx is None else tensor.to(ctx)  # type: ignore[call-overload]  # a dtype


class FP16Compressor(NoneCompressor):
    """Send floating-point tensors as float16: 11 significant bits, up to 65504. The context is the dtype before."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, object]:
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype


class Compression:
    none, fp16 = NoneCompressor, FP16Compressor
