"""Token-level speculation: a small model proposes tokens, the role's own model keeps those that it would have taken.

Leviathan et al., Fast Inference from Transformers via Speculative Decoding (2023) accept a proposal by chance, so that
the distribution stays. Here the choice of a token is fixed by logits, key and position, so a proposal is kept exactly
when it is that choice: the tokens are those of the model alone, bit for bit. Both models draw with the same noise,
which makes them agree more often. All of it is one loop on the device: propose, read one block, keep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models_jax.cache_pool import CachePool
from models_jax.config import ModelConfig
from models_jax.generate import Progress, Sampler, Weights, choose, decoder, read_block, weights_of, write
from models_jax.loading import load_checkpoint
from models_jax.placement import Placement
from models_jax.tokenizer import Tokenizer
from models_jax.transformer import Cache
from planner.checkpoint import model_folder
from planner.errors import UserError
from planner.workflow import Speculate

DRAFT_ROWS = 2
"""Rows of a pass of the draft: after a round it has at most two tokens to read. Its bits change no token."""


class Round(NamedTuple):
    """What the loop carries: `Progress` of the role's model, and the draft's."""

    at: Progress
    draft_cache: Cache
    drafted: jax.Array
    """int32: so many tokens are in the draft's cache."""
    passes: jax.Array
    """int32: passes of the role's model."""


def propose(draft: Any, round: Round, count: int, limit: jax.Array, sampler: Sampler) -> tuple[jax.Array, Cache]:
    """Up to `count` tokens (slots,) behind the sequence, as the draft would write them, and its cache."""
    quiet = sampler._replace(stops=jnp.zeros((draft.config.vocab_size, 1), jnp.int8), state=jnp.int32(0))
    at = Progress(round.draft_cache, round.at.tokens, round.drafted, round.at.length, jnp.int32(0))
    done = write(draft, at, jnp.minimum(round.at.length + count, limit), quiet, DRAFT_ROWS)
    return done.tokens, done.cache


def keep(model: Any, hidden: jax.Array, at: Progress, limit: jax.Array, sampler: Sampler, count: int) -> Progress:
    """Choose from the rows of `hidden` (row_block, hidden) one after another, while the row before was proposed right.

    Row i holds the state after token `at.length - 1 + i` of `at.tokens`, proposals included.
    """
    first, complete = at.length, sampler.stops.shape[1]

    def body(carry: tuple[Progress, jax.Array]) -> tuple[Progress, jax.Array]:
        at, _ = carry
        row = jax.lax.dynamic_index_in_dim(hidden, at.length - first, keepdims=False)
        token = choose(model.logits(row), at.length, sampler)
        right = (token == at.tokens[at.length]) & (at.length < first + count)
        state = sampler.stops[token, at.state].astype(jnp.int32)
        tokens = at.tokens.at[at.length].set(token)
        at = at._replace(tokens=tokens, computed=at.length, length=at.length + 1, state=state)
        return at, right & (state < complete) & (at.length < limit)

    return jax.lax.while_loop(lambda carry: carry[1], body, (at, jnp.bool_(True)))[0]


@partial(
    jax.jit,
    static_argnames=("config", "draft_config", "row_block", "count"),
    donate_argnames=("cache", "draft_cache"),
)
def advance_with_draft(
    weights: Weights,
    cache: Cache,
    draft_weights: Weights,
    draft_cache: Cache,
    tokens: jax.Array,
    drafted: jax.Array,
    length: jax.Array,
    limit: jax.Array,
    sampler: Sampler,
    *,
    config: ModelConfig,
    draft_config: ModelConfig,
    row_block: int,
    count: int,
) -> Round:
    """Generate behind `tokens` (slots,) until a step's end or `limit` tokens, `count` proposals a round.

    All but the last of the `length` tokens must be in the cache, `drafted` of them (fewer than `length`) in the
    draft's. `count < row_block`, so that a round is one block of the class. Caches as in `generate.advance`.
    """
    model, draft = decoder(config, weights), decoder(draft_config, draft_weights)

    def body(round: Round) -> Round:
        tokens, draft_cache = propose(draft, round, count, limit, sampler)
        at = round.at
        hidden, cache = read_block(model, at.cache, tokens, at.length - 1, row_block)
        at = keep(model, hidden, at._replace(tokens=tokens, cache=cache), limit, sampler, count)
        # The draft read all its proposals but the last.
        drafted = jnp.minimum(round.at.length + count - 1, at.length - 1)
        return Round(at, draft_cache, drafted, round.passes + 1)

    at = Progress(cache, tokens, length - 1, length, jnp.asarray(sampler.state))
    with jax.default_matmul_precision("highest"):
        return jax.lax.while_loop(
            lambda round: (round.at.length < limit) & (round.at.state < sampler.stops.shape[1]),
            body,
            Round(at, draft_cache, drafted, jnp.int32(0)),
        )


@dataclass
class Reach:
    """How far the draft's cache of a sequence goes."""

    computed: int = 0


class Drafter:
    """The draft of one role: its weights, and a cache for each sequence of the role."""

    def __init__(
        self, name: str, speculate: Speculate, tokenizer: Tokenizer, dtype: Any, slots: int, placement: Placement
    ):
        """Load the draft of role `name`. UserError if it writes other tokens, or cannot read as many."""
        folder = model_folder(speculate.model)
        self.count = speculate.tokens
        config, model = load_checkpoint(folder, dtype, placement.loading)
        own = Tokenizer(folder)
        self.config = replace(config, known_tokens=own.size, sharded=placement.spread)
        # Small, so that every device has all of it.
        self.weights = jax.device_put(weights_of(model), placement.whole)
        self.passes = self.written = 0
        self._caches = CachePool(self.config, slots, dtype, placement.whole)
        self._reach: dict[str, Reach] = {}
        if own.hash != tokenizer.hash:
            raise UserError(
                f"the draft of role {name!r} has another tokenizer",
                where=str(folder),
                mend="let speculate.model be a model of the same family, with the same tokenizer.json",
            )
        if self.config.reward_head:
            raise UserError("a reward model writes no tokens", where=str(folder), mend="name another speculate.model")

    @property
    def weight_bytes(self) -> int:
        """Memory of the weights."""
        return sum(weight.nbytes for weight in self.weights)

    def cut(self, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens of a sequence."""
        reach = self._reach.setdefault(sequence, Reach())
        reach.computed = min(reach.computed, tokens)

    def free(self, sequence: str) -> None:
        """Forget a sequence."""
        self._reach.pop(sequence, None)
        self._caches.free(sequence)

    def fork(self, sequence: str, new_sequence: str) -> None:
        """Copy a sequence."""
        self._caches.fork(sequence, new_sequence)
        self._reach[new_sequence] = Reach(self._reach.setdefault(sequence, Reach()).computed)

    def clear(self) -> None:
        """Free all."""
        self.weights = ()
        self._caches.clear()

    def advance(
        self,
        sequence: str,
        weights: Weights,
        cache: Cache,
        tokens: np.ndarray,
        length: int,
        limit: int,
        sampler: Sampler,
        *,
        config: ModelConfig,
        row_block: int,
    ) -> Progress:
        """`advance_with_draft` with the draft's part filled in."""
        reach = self._reach[sequence]
        with self._caches.use(sequence, reach) as lent:
            done = advance_with_draft(
                weights,
                cache,
                self.weights,
                lent.cache,
                tokens,
                np.int32(min(reach.computed, length - 1)),
                np.int32(length),
                np.int32(limit),
                sampler,
                config=config,
                draft_config=self.config,
                row_block=row_block,
                count=self.count,
            )
            lent.cache = done.draft_cache
        reach.computed = int(done.drafted)
        self.passes += int(done.passes)
        self.written += int(done.at.length) - length
        return done.at
