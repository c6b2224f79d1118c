# SPDX-License-Identifier: MIT OR Apache-2.0
"""`draw`: the one random number behind one token, as a pure function of what the token is.

Rules: there is no generator and no state. The number depends on the seed, on which sequence of the request it is, and
on the token's position; never on the batch, the slot, the step, the rank or the time. So a token that is computed
again, alone or among others, comes out the same.

Source: Philox4x32 with 10 rounds, from Salmon, Moraes, Dror and Shaw, "Parallel Random Numbers: As Easy as 1, 2, 3",
SC11. Checked against the known answers that the authors publish with Random123.

Exact definition of `draw(seed, sequence_index, position)`:
    key     = (seed mod 2**32, seed div 2**32)
    counter = (position mod 2**32, position div 2**32, sequence_index, PURPOSE_TOKEN)
    w       = philox4x32(counter, key)
    result  = ((w[0] + w[1] * 2**32) div 2**11) / 2**53
"""

from __future__ import annotations

Words = tuple[int, int, int, int]

# The counter's last word says what a number is for, so that a later use can never meet the numbers of this one.
PURPOSE_TOKEN = 0

_ROUNDS = 10
_MULTIPLIER_0, _MULTIPLIER_1 = 0xD2511F53, 0xCD9E8D57
_KEY_STEP_0, _KEY_STEP_1 = 0x9E3779B9, 0xBB67AE85
_U32 = 0xFFFFFFFF


def draw(seed: int, sequence_index: int, position: int) -> float:
    """A number in [0, 1), a multiple of 2**-53. `seed` and `position` are u64, `sequence_index` is u32.

    Raises ValueError for a value outside its range, which two inputs would otherwise share.
    """
    for name, value, bits in (("seed", seed, 64), ("sequence_index", sequence_index, 32), ("position", position, 64)):
        if not 0 <= value < 1 << bits:
            raise ValueError(f"{name} is {value}; it must be an integer from 0 to 2**{bits} - 1")
    counter = (position & _U32, position >> 32, sequence_index, PURPOSE_TOKEN)
    words = philox4x32(counter, (seed & _U32, seed >> 32))
    return ((words[0] | words[1] << 32) >> 11) * 2.0**-53


def philox4x32(counter: Words, key: tuple[int, int]) -> Words:
    """Four u32 from a counter of four u32 and a key of two."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        product_0, product_1 = c0 * _MULTIPLIER_0, c2 * _MULTIPLIER_1
        c0, c1, c2, c3 = (product_1 >> 32) ^ c1 ^ k0, product_1 & _U32, (product_0 >> 32) ^ c3 ^ k1, product_0 & _U32
        k0, k1 = (k0 + _KEY_STEP_0) & _U32, (k1 + _KEY_STEP_1) & _U32
    return c0, c1, c2, c3
