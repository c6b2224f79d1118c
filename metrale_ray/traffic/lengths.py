# SPDX-License-Identifier: MIT OR Apache-2.0
"""`Lengths`: how many tokens prompts or answers have: always the same, or drawn from a distribution.

Texts: "128"; "uniform:16:512", both ends included; "lognormal:200:0.8", of which the mean is 200 tokens and sigma is
the standard deviation of the logarithm. What is drawn is rounded, and is never below 1 nor above `MAX_LENGTH`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from random import Random

from metrale_ray.errors import UserError

MAX_LENGTH = 2**20
FORMS = '"128", "uniform:16:512" or "lognormal:200:0.8"'


@dataclass(frozen=True, slots=True)
class Lengths:
    """A distribution of lengths in tokens: `kind` and its two numbers, as in the text it was read from."""

    kind: str
    first: float
    second: float = 0.0

    def draw(self, random: Random) -> int:
        """One length."""
        if self.kind == "fixed":
            return int(self.first)
        if self.kind == "uniform":
            return random.randint(int(self.first), int(self.second))
        # The mean of a lognormal distribution is exp(mu + sigma^2 / 2).
        mu = math.log(self.first) - self.second**2 / 2
        return min(max(1, round(random.lognormvariate(mu, self.second))), MAX_LENGTH)


def read_lengths(text: str) -> Lengths:
    """The lengths that `text` means. Raises UserError."""
    kind, *numbers = text.split(":")
    if not numbers:
        return Lengths("fixed", _length(kind, text))
    if kind == "uniform" and len(numbers) == 2:
        low, high = (_length(number, text) for number in numbers)
        if low > high:
            raise UserError(f"{text!r} has no lengths: {low} is above {high}; write the smaller number first")
        return Lengths("uniform", low, high)
    if kind == "lognormal" and len(numbers) == 2:
        return Lengths("lognormal", _length(numbers[0], text), _sigma(numbers[1], text))
    raise UserError(f"{text!r} is no length; write {FORMS}")


def _length(number: str, text: str) -> int:
    if not (number.isascii() and number.isdigit() and len(number) < 9 and 0 < int(number) <= MAX_LENGTH):
        raise UserError(f"{text!r} is no length: {number!r} must be an integer from 1 to {MAX_LENGTH}; write {FORMS}")
    return int(number)


def _sigma(number: str, text: str) -> float:
    try:
        sigma = float(number)
    except ValueError:
        sigma = math.nan
    if not 0 <= sigma <= 10:  # exp(10) is already 22,000 times the median
        raise UserError(f"{text!r} is no length: sigma is {number!r}; it must be a number from 0 to 10")
    return sigma
