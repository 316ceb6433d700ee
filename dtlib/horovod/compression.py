"""Fewer bits on the wire. Counterpart: ``horovod.torch.Compression``."""

import torch


class Compressor:
    """What travels instead of a tensor: ``compress`` gives it and what ``decompress`` needs to undo it."""

    @staticmethod
    def compress(tensor):
        raise NotImplementedError

    @staticmethod
    def decompress(tensor, ctx):
        raise NotImplementedError


class NoneCompressor(Compressor):
    """Tensors travel as they are."""

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


class FP16Compressor(Compressor):
    """Floating-point tensors travel as float16: 11 significant bits, up to 65504. ``ctx`` is the dtype before."""

    @staticmethod
    def compress(tensor):
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


class Compression:
    none = NoneCompressor
    fp16 = FP16Compressor
