"""Constants of the generator and of the circle, used by all implementations."""

GOLDEN = 0x9E3779B97F4A7C15  # 2**64 divided by the golden ratio, made odd: the step of the counter
MIX_1 = 0xBF58476D1CE4E5B9
MIX_2 = 0x94D049BB133111EB
MASK_64 = 2**64 - 1
MASK_31 = 2**31 - 1
RADIUS_SQUARED = 2**62
