"""Fewer bits on the wire. Counterpart: ``horovod.torch.Compression``."""

from typing import Protocol, TypeVar

import torch
from torch import Tensor

Context = TypeVar("Context")


class Compressor(Protocol[Context]):
    """``compress`` gives what travels, and what ``decompress`` needs to undo it."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, Context]: ...
    @staticmethod
    def decompress(tensor: Tensor, ctx: Context) -> Tensor: ...


class NoneCompressor:
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, None]:
        return tensor, None

    @staticmethod
    def decompress(tensor: Tensor, ctx: None) -> Tensor:
        return tensor


class FP16Compressor:
    """Floating-point tensors travel as float16: 11 significant bits, up to 65504. ``ctx`` is the dtype before."""

    @staticmethod
    def compress(tensor: Tensor) -> tuple[Tensor, torch.dtype]:
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor: Tensor, ctx: torch.dtype) -> Tensor:
        return tensor.to(ctx)


class Compression:
    none, fp16 = NoneCompressor, FP16Compressor
