"""Noise: the random numbers of one answer, a pure function of (seed, stream, position, token id).
It must never hold a state: a draw must not depend on how often, or in whose company, it is asked for."""

from __future__ import annotations

import secrets
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
_MIX_1 = 0xBF58476D1CE4E5B9
_MIX_2 = 0x94D049BB133111EB
_UNIT = 2.0**-53

RACE_BLOCK = 16384
"""Ids hashed at a time in a coupled draw."""

STREAM_DRAW = 0
"""The verifier's draws from the target's law or from a residual."""
STREAM_FLIP = 1
"""The verifier's decisions to accept."""
STREAM_DRAFT = 2
"""First of the drafters' streams; drafting number n uses STREAM_DRAFT + n."""


def _mix(value: int) -> int:
    """The finaliser of SplitMix64 (Steele, Lea, Flood 2014): a bijection of 64-bit words in which every input bit
    changes every output bit with probability near one half."""
    value &= _MASK
    value = ((value ^ (value >> 30)) * _MIX_1) & _MASK
    value = ((value ^ (value >> 27)) * _MIX_2) & _MASK
    return value ^ (value >> 31)


def _absorb(key: int, word: int) -> int:
    """`key` with one more whole number (any sign or size) mixed in."""
    key = _mix(key + _GOLDEN * (1 if word >= 0 else 2))
    word = abs(word)
    while True:
        key = _mix(key ^ _mix((word & _MASK) + _GOLDEN))
        word >>= 64
        if not word:
            return key


def _signed(word: int) -> int:
    """The same 64 bits as the int64 that torch knows."""
    return word - (1 << 64) if word >> 63 else word


def _xor_shift(value: Tensor, bits: int) -> Tensor:
    """value ^= value >>> bits, in place; torch shifts arithmetically, so the sign's copies are masked off."""
    shifted = value >> bits
    shifted &= (1 << (64 - bits)) - 1
    value ^= shifted
    return value


def hash_ids(ids: Tensor, *, key: int) -> Tensor:
    """Output number `ids` of the SplitMix64 generator seeded with `key`: int64 words, one for each id."""
    words = ids * _signed(_GOLDEN)
    words += _signed((key + _GOLDEN) & _MASK)
    _xor_shift(words, 30)
    words *= _signed(_MIX_1)
    _xor_shift(words, 27)
    words *= _signed(_MIX_2)
    return _xor_shift(words, 31)


@dataclass(frozen=True)
class Noise:
    """Counter-based random numbers of one answer.

    `coupled` chooses how a token is drawn (docs/losslessness.md):
    True (seeded requests): Gumbel-max with noise keyed by position and token id, one and the same for whoever draws at
    the position. Drafter and target then meet often, and the target's token depends on nothing but (seed, position,
    target's law): the drafter-invariant coupling of Daliri, Musco and Suresh (2025).
    False: inverse transform with one uniform number keyed by position and stream. Here streams must never be shared
    between drafter and verifier, nor used twice; `RowSampler.draw_draft` sees to it and says why.
    """

    seed: int
    coupled: bool

    @classmethod
    def for_answer(cls, seed: int | None, *, index: int = 0) -> Noise:
        """Of answer `index` (of n) to a request with this seed; fresh entropy, uncoupled, when the seed is None."""
        if seed is None:
            return cls(seed=secrets.randbits(64), coupled=False)
        return cls(seed=_absorb(_absorb(0, seed), index), coupled=True)

    def _key(self, *, stream: int, position: int) -> int:
        return _absorb(_absorb(_absorb(0, self.seed), stream), position)

    def uniform(self, position: int, stream: int) -> float:
        """A number in [0, 1) with 53 random bits."""
        return (self._key(stream=stream, position=position) >> 11) * _UNIT

    def exponential(self, position: int, ids: Tensor) -> Tensor:
        """Unit exponentials keyed by token id: float64, the shape of `ids` (int64). Independent of company."""
        words = hash_ids(ids, key=self._key(stream=STREAM_DRAW, position=position))
        words >>= 11
        words &= (1 << 53) - 1
        # The half keeps the uniform number off 0, whose logarithm is infinite. Near 1 it rounds to 1: then the
        # exponential is 0, which has probability 2**-54 and does no harm.
        return words.to(torch.float64).add_(0.5).mul_(_UNIT).log_().neg_()

    def gumbel(self, position: int, ids: Tensor) -> Tensor:
        """Standard Gumbel noise keyed by token id: float64, the shape of `ids` (int64)."""
        return self.exponential(position, ids).log_().neg_()

    def flip(self, numerator: float, denominator: float, *, position: int) -> bool:
        """True with probability min(1, numerator / denominator)."""
        return self.uniform(position, STREAM_FLIP) * denominator < numerator

    def draw(self, weights_V: Tensor, position: int, stream: int = STREAM_DRAW) -> int:
        """A token with probability proportional to its weight; a weight of 0 is never drawn.

        `weights_V`: (V,) float, finite, non-negative, not all 0. Coupled noise ignores `stream` and takes
        argmax(log w + Gumbel), written as the race argmin(Exponential / w): the same with a logarithm less.
        """
        if self.coupled:
            return self._race(weights_V, position)
        cdf = weights_V.cumsum(0, dtype=torch.float64)
        mass = float(cdf[-1])
        assert 0 < mass < float("inf"), f"a law must have finite mass: {mass}"
        # The first entry above the threshold has risen above the one before it, so its weight is not 0.
        found = int(torch.searchsorted(cdf, self.uniform(position, stream) * mass, right=True))
        return found if found < cdf.numel() else int(weights_V.nonzero()[-1])

    def _race(self, weights_V: Tensor, position: int) -> int:
        """The id whose exponential divided by its weight is least. In blocks that fit the cache: a whole vocabulary
        makes a dozen passes over its words."""
        ids = weights_V.nonzero().squeeze(1)
        assert ids.numel() > 0, "a law without mass cannot be drawn from"
        if ids.numel() == 1:
            return int(ids[0])
        best = (float("inf"), -1)
        for some in ids.split(RACE_BLOCK):
            time, winner = (self.exponential(position, some) / weights_V[some].double()).min(0)
            best = min(best, (float(time), int(some[winner])))
        assert best[1] >= 0, "a law must be finite"
        return best[1]
