"""The caches of a role: one a sequence, made once, lent to device functions that consume them, used again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

from models_jax.config import ModelConfig
from models_jax.transformer import Cache

SPARE = 2
"""Caches that are kept for the next sequences when nobody uses them."""


class Reaching(Protocol):
    """Whatever says how much of a sequence is in its cache."""

    computed: int


@dataclass
class Lent:
    """A cache in use. Whoever has it replaces it by the one that its function gave back."""

    cache: Cache


class CachePool:
    """Caches by sequence. A cache that comes back is not cleared: what is stale in it is never looked at."""

    def __init__(self, config: ModelConfig, slots: int, dtype: Any, placement: Any) -> None:
        """`placement` is what `jax.device_put` takes: a device, or the sharding of each array."""
        self._config, self._slots, self._dtype, self._placement = config, slots, dtype, placement
        self._used: dict[str, Cache] = {}
        self._spare: list[Cache] = []

    @contextmanager
    def use(self, sequence: str, held: Reaching) -> Iterator[Lent]:
        """The cache of a sequence. If the block fails, the cache is lost and the sequence is read afresh."""
        lent = Lent(self._used.pop(sequence, None) or self._take())
        try:
            yield lent
        except BaseException:
            held.computed = 0
            raise
        self._used[sequence] = lent.cache

    def peek(self, sequence: str) -> Cache:
        """The cache of a sequence that has one, to look at."""
        return self._used[sequence]

    def put(self, sequence: str, rows: np.ndarray) -> None:
        """Let a sequence have a cache of these keys and values, (layers, 2, tokens, key heads, head_dim)."""
        self.free(sequence)
        layers, _, tokens, heads, dim = rows.shape
        whole = np.zeros((2, layers, 1, heads, self._slots, dim), rows.dtype)
        whole[:, :, 0, :, :tokens] = rows.transpose(1, 0, 3, 2, 4)
        self._used[sequence] = jax.device_put(Cache(*(tuple(part) for part in whole)), self._placement)

    def rows(self, sequence: str, tokens: int) -> np.ndarray:
        """The keys and values of the first tokens of a sequence, as `put` takes them."""
        cache = self._used[sequence]
        parts = [[np.asarray(part)[0, :, :tokens] for part in parts] for parts in (cache.k, cache.v)]
        return np.asarray(parts).transpose(1, 0, 3, 2, 4)

    def fork(self, sequence: str, new_sequence: str) -> None:
        """Copy what one sequence has to another, in place of what that had."""
        self.free(new_sequence)
        if sequence in self._used:
            self._used[new_sequence] = _copy(self._used[sequence])

    def free(self, sequence: str) -> None:
        """Take back the cache of a sequence, if it has one."""
        cache = self._used.pop(sequence, None)
        if cache is not None and len(self._spare) < SPARE:
            self._spare.append(cache)

    def clear(self) -> None:
        """Free all memory."""
        self._used.clear()
        self._spare.clear()

    def _take(self) -> Cache:
        if self._spare:
            return self._spare.pop()
        return jax.device_put(Cache.empty(self._config, self._slots, dtype=self._dtype), self._placement)


@jax.jit
def _copy(cache: Cache) -> Cache:
    return jax.tree.map(jnp.copy, cache)
