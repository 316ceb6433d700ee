"""Fewer bits on the wire. Counterpart: ``horovod.torch.Compression``."""

import torch


class NoneCompressor:
    """Tensors travel as they are. ``compress`` gives what travels, and what ``decompress`` needs to undo it."""

    @staticmethod
    def compress(tensor):
        return tensor, None

    @staticmethod
    def decompress(tensor, ctx):
        return tensor


class FP16Compressor:
    """Floating-point tensors travel as float16: 11 significant bits, up to 65504. ``ctx`` is the dtype before."""

    @staticmethod
    def compress(tensor):
        return (tensor.to(torch.float16) if tensor.is_floating_point() else tensor), tensor.dtype

    @staticmethod
    def decompress(tensor, ctx):
        return tensor.to(ctx)


class Compression:
    none, fp16 = NoneCompressor, FP16Compressor
