"""Seeds and the one mixing function behind every random number of the engine.

Random numbers are a function of (seed, output position), never a state, so a draw can be repeated in another batch,
after a retraction, on another engine. `bough.kernels.sampling.rows` computes the same mix on the device.
"""

MASK64 = 2**64 - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15  # splitmix64's increment: 2**64 divided by the golden ratio, made odd
MIX_STEPS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # (right shift, multiplier) of its finaliser
MIX_LAST_SHIFT = 31
DETERMINISTIC_SEED = 42


def mix64(value: int) -> int:
    """splitmix64's finaliser: a bijection on 64-bit integers in which every input bit reaches every output bit."""
    value &= MASK64
    for shift, multiplier in MIX_STEPS:
        value = ((value ^ (value >> shift)) * multiplier) & MASK64
    return value ^ (value >> MIX_LAST_SHIFT)


def seed_for_requests(random_seed: int | None, deterministic: bool) -> int | None:
    """The seed of requests that give none; None where each draws its own. Under deterministic inference the same
    request has the same answer, and so a seed that never changes."""
    return DETERMINISTIC_SEED if random_seed is None and deterministic else random_seed


def derive_seed(seed: int, index: int) -> int:
    """The seed of sample `index` among the n samples of one request.

    The first sample keeps the request's own seed, so that n = 1 and the first of n agree. The others lie in [0, 2**63),
    which every wire format and tensor holds.
    """
    if index == 0:
        return seed
    return mix64(mix64(seed) + index * GOLDEN_GAMMA) >> 1


def as_int64(value: int) -> int:
    """`value` modulo 2**64, as the signed integer with the same bits: the form that int64 tensors and arrays take."""
    value &= MASK64
    return value - 2**64 if value >= 2**63 else value
