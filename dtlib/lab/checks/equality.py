"""When values are the same, and bytes few enough, for judges of float64."""

NUMBER = 8  # bytes of a float64
SPARE = 32 * NUMBER  # step counters, flags


def same(came, expected) -> bool:
    import torch

    return came.shape == expected.shape and torch.allclose(came, expected, rtol=1e-8, atol=1e-10)
