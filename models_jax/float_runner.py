"""A float model of one role, in JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from models_jax.cache_pool import CachePool
from models_jax.generate import Progress, Sampler, advance, advance_together, feed, rewards
from models_jax.loading import load_checkpoint
from models_jax.placement import Placement
from models_jax.self_score import SelfScorer
from models_jax.sequences import Held, Sequences
from models_jax.siblings import Siblings
from models_jax.speculate import Drafter
from models_jax.stops import Stops
from models_jax.text_format import TextFormat
from models_jax.tokenizer import Tokenizer
from models_jax.transformer import Cache
from planner.checkpoint import model_hash
from planner.errors import UserError
from planner.runtime.backend import Handed, ModelInfo, Output, Work
from planner.workflow import Arithmetic, Role, RoleName, WeightKind

DTYPES = {Arithmetic.FLOAT32: jnp.float32, Arithmetic.BFLOAT16: jnp.bfloat16}


LONG_BLOCKS = (128, 32)
"""Rows of a pass over many tokens, where they give the bits of the class's own block."""


class FloatRunner:
    """Weights on one device or several, a cache a sequence, everything compiled before the first chunk.

    But for passes of several drafts: they are compiled, and proven, when so many are written for the first time.
    """

    def __init__(self, name: str, role: Role, folder: Path, delimiter: str, placement: Placement) -> None:
        """Load the model in `folder` for role `name` and compile; steps end at `delimiter`."""
        self._name = name
        self._dtype = DTYPES[role.numerics.arithmetic]
        self._row_block = role.numerics.row_block
        with enough_memory(name):
            int8_weights = role.numerics.weights is WeightKind.INT8
            config, model = load_checkpoint(folder, self._dtype, placement.loading, int8_weights=int8_weights)
            placement.check(config, name)
            self._weights = placement.weights(model)
            del model
        self._tokenizer = Tokenizer(folder)
        self.config = replace(
            config, known_tokens=self._tokenizer.size, sharded=placement.spread, class_rows=self._row_block
        )
        self._format = TextFormat(self._tokenizer, folder, delimiter, self.config)
        self._check(role, folder)
        self._self_scorer = SelfScorer(name, folder, self.config, self._tokenizer, self._row_block, placement.whole)
        # Padding of the last block is written behind the last token.
        self._slots = role.numerics.cache_tokens + self._row_block
        context = role.numerics.cache_tokens
        self._sequences = Sequences(name, context, self._slots, self.config.vocab_size)
        self._caches = CachePool(self.config, self._slots, self._dtype, placement.cache)
        # A reward model writes nothing, so nothing can stop it.
        self._stops = None if self.config.reward_head else Stops(self._tokenizer, self.config.vocab_size, delimiter)
        self._stop_table = None if self._stops is None else jax.device_put(self._stops.table, placement.whole)
        self._drafter = None
        if role.speculate is not None:
            with enough_memory(name):
                self._drafter = Drafter(name, role.speculate, self._tokenizer, self._dtype, self._slots, placement)
        c = self.config
        # A draft of tokens takes another way, and devices that compute together add in another order.
        tries = self._row_block > 1 and not (c.reward_head or self._drafter or placement.spread)
        self.info = ModelInfo(
            model_hash=model_hash(folder),
            tokenizer_hash=self._format.hash,
            weight_bytes=sum(w.nbytes for w in self._weights) + (self._drafter.weight_bytes if self._drafter else 0),
            kv_bytes_per_token=2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * self._dtype(0).nbytes,
            context_tokens=context,
            batches=tries,
        )
        self._siblings = Siblings(self, self._row_block, c.vocab_size, tries=tries)
        self._blocks: tuple[int, ...] = (self._row_block,)
        with enough_memory(name):
            self._warm_up()

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of `text`."""
        return self._format.step(text)

    def encode_prompt(self, text: str) -> tuple[int, ...]:
        """Token ids of the prompt `text`."""
        return self._format.prompt(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Text of `tokens`."""
        return self._tokenizer.decode(tokens)

    def run(self, work: Work) -> Output:
        """Do one chunk: score with a reward head or by the model's own reading, else read and generate."""
        if not self._weights:
            raise RuntimeError(f"role {self._name!r} is closed")
        if work.score and not (self.config.reward_head or work.ask):
            raise UserError(f"role {self._name!r} has no reward head to score with", mend="give it a reward model")
        if work.max_new or work.beside:
            self._must_write()
        if work.beside:
            self._sequences.check_beside(work)
            return self._siblings.run(work)
        held = self._sequences.open(work)
        if self._drafter:
            self._drafter.cut(work.sequence, work.keep)
        with enough_memory(self._name):
            if self.config.reward_head:
                return self._score(work, held)
            if work.score:
                return self._self_score(work, held)
            return self._write(work, held) if work.max_new else self._read(work, held)

    def read(self, work: Work) -> None:
        """Let a sequence hold what it is to hold before anything is generated, and read it but for its last token."""
        held = self._sequences.open(work)
        with enough_memory(self._name):
            self._feed(work.sequence, held, held.length - 1)

    def together(self, works: Sequence[Work]) -> list[Output]:
        """Write in as many sequences at once, each as `run` would."""
        with enough_memory(self._name), ExitStack() as stack:
            held = [self._sequences.open(work) for work in works]
            limits = [self._sequences.limit(work, each) for work, each in zip(works, held, strict=True)]
            first = [each.length for each in held]
            for work, each in zip(works, held, strict=True):
                self._feed(work.sequence, each, each.length - 1)
            lent = [stack.enter_context(self._caches.use(w.sequence, h)) for w, h in zip(works, held, strict=True)]
            caches, done = advance_together(
                self._weights,
                tuple(each.cache for each in lent),
                np.stack([each.tokens for each in held]),
                *(np.array(numbers, np.int32) for numbers in (first, limits)),
                self._samplers(works),
                config=self.config,
                row_block=self._row_block,
            )
            for each, cache in zip(lent, caches, strict=True):
                each.cache = cache
            rows, lengths, states = (np.asarray(part) for part in done)
        found = []
        for each, row, start, length, state in zip(held, rows, first, lengths, states, strict=True):
            each.append(row[start:length])
            # The last token is left unread, as when one sequence is written.
            each.computed = each.length - 1
            found.append(self._output(tuple(row[start:length].tolist()), int(state)))
        return found

    def cache(self, sequence: str) -> Cache:
        """The cache of a sequence that has one, to look at."""
        return self._caches.peek(sequence)

    def rewind(self, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens; with 0 the cache is freed."""
        self._sequences.rewind(sequence, tokens)
        known = sequence in self._sequences
        if not known:
            self._caches.free(sequence)
        if self._drafter:
            self._drafter.cut(sequence, tokens) if known else self._drafter.free(sequence)

    def fork(self, sequence: str, new_sequence: str) -> None:
        """Make `new_sequence` a copy of a sequence, in place of what it was."""
        self._sequences.fork(sequence, new_sequence)
        with enough_memory(self._name):
            self._caches.fork(sequence, new_sequence)
            if self._drafter:
                self._drafter.fork(sequence, new_sequence)

    def hand_over(self, sequence: str) -> Handed:
        """What a sequence holds. A reward model cannot: its rewards are no part of it."""
        self._must_write()
        held = self._sequences.known(sequence)
        with enough_memory(self._name):
            self._feed(sequence, held, held.length)
        return self._sequences.hand_over(sequence, self._caches.rows(sequence, held.length))

    def take_over(self, sequence: str, handed: Handed) -> None:
        """Let a sequence hold what was handed over. The draft of its tokens, if there is one, reads them itself."""
        self._must_write()
        c = self.config
        shape = (c.num_hidden_layers, c.num_key_value_heads, c.head_dim)
        rows = self._sequences.take_over(sequence, handed, shape, self._dtype)
        with enough_memory(self._name):
            self._caches.put(sequence, rows)
        if self._drafter:
            self._drafter.cut(sequence, 0)

    def close(self) -> None:
        """Free weights and caches."""
        self._weights = ()
        self._caches.clear()
        if self._drafter:
            self._drafter.clear()

    def _must_write(self) -> None:
        if self.config.reward_head:
            raise UserError(f"role {self._name!r} has a reward model, which cannot write", mend="give it another")

    def _read(self, work: Work, held: Held) -> Output:
        """Read what the cache does not cover, and wait until it is done: a chunk takes as long as its work."""
        self._feed(work.sequence, held, held.length)
        with self._caches.use(work.sequence, held) as lent:
            jax.block_until_ready(lent.cache)
        return Output()

    def _write(self, work: Work, held: Held) -> Output:
        """Read, then generate."""
        first, limit = held.length, self._sequences.limit(work, held)
        # The logits of the last token are needed anew: it is read once more.
        held.computed = min(held.computed, first - 1)
        if self._drafter or first - held.computed > self._row_block:
            self._feed(work.sequence, held, first - 1)
        with self._caches.use(work.sequence, held) as lent:
            done = self._advance(work, held, lent.cache, limit)
            lent.cache = done.cache
            written = np.asarray(done.tokens)[first : int(done.length)]
        held.append(written)
        held.computed = int(done.computed)
        return self._output(tuple(int(token) for token in written), int(done.state))

    def _advance(self, work: Work, held: Held, cache: Cache, limit: int) -> Progress:
        how: dict[str, Any] = {"config": self.config, "row_block": self._row_block}
        sampler = self._sampler(work)
        if self._drafter:
            numbers = (held.length, limit)
            return self._drafter.advance(work.sequence, self._weights, cache, held.tokens, *numbers, sampler, **how)
        numbers = (np.int32(n) for n in (held.computed, held.length, limit))
        return advance(self._weights, cache, held.tokens, *numbers, sampler, **how)

    def _output(self, tokens: tuple[int, ...], state: int) -> Output:
        assert self._stops is not None, "a reward model writes nothing"
        ended = bool(tokens) and tokens[-1] in self._tokenizer.eos_ids
        return Output(tokens, bool(tokens) and state == self._stops.complete, ended)

    def _sampler(self, work: Work) -> Sampler:
        assert self._stops is not None and self._stop_table is not None, "a reward model writes nothing"
        return Sampler(
            key=_key(work.key),
            temperature=np.float32(work.temperature),
            stops=self._stop_table,
            state=np.int32(self._stops.state(work.begun)),
            top_k=np.int32(work.top_k),
            top_p=np.float32(work.top_p),
            min_p=np.float32(work.min_p),
        )

    def _samplers(self, works: Sequence[Work]) -> Sampler:
        """The sampler of works that sample alike, with a key (n, 2) and a state (n,) for each."""
        each = [self._sampler(work) for work in works]
        keys, states = np.stack([one.key for one in each]), np.stack([one.state for one in each])
        return each[0]._replace(key=keys, state=states)

    def _score(self, work: Work, held: Held) -> Output:
        self._feed(work.sequence, held, held.length)
        return Output(scores=tuple(float(held.rewards[position]) for position in work.score))

    def _self_score(self, work: Work, held: Held) -> Output:
        assert self._stops is not None, "a reward model has a head of its own"
        with self._caches.use(work.sequence, held) as lent:
            lent.cache, scores = self._self_scorer.scores(self._weights, lent.cache, held, self._stops, work)
        return Output(scores=scores)

    def _feed(self, sequence: str, held: Held, until: int) -> None:
        """Read up to `until` tokens: long blocks as long as they are full, then what fits the rest best."""
        while held.computed < until:
            rows, end = self._next_pass(held.computed, until)
            with self._caches.use(sequence, held) as lent:
                first = np.int32(held.computed)
                args = (self._weights, lent.cache, held.tokens, first, np.int32(end))
                if self.config.reward_head:
                    lent.cache, found = rewards(*args, config=self.config, row_block=rows)
                    held.rewards[first:end] = np.asarray(found)[first:end]
                else:
                    lent.cache = feed(*args, config=self.config, row_block=rows)
            held.computed = end

    def _next_pass(self, start: int, until: int) -> tuple[int, int]:
        """The rows of the next blocks to read, and up to where they read."""
        wanted = until - start
        for rows in self._blocks:
            if wanted >= rows:
                return rows, start + wanted // rows * rows
        padded = [rows for rows in self._blocks if wanted <= rows and start + rows <= self._slots]
        return min(padded, default=self._row_block), until

    def _warm_up(self) -> None:
        """Compile, and prove that the numerics class holds here: a token's bits do not depend on its row.

        Tokens are read in one block and again one by one, each then in the first row. Longer blocks are used
        where they give the same bits as well.
        """
        tokens = [i % self.config.vocab_size for i in range(min(self._row_block, self.info.context_tokens))]
        if self._bits(self._row_block, tokens, 1) != self._bits(self._row_block, tokens, len(tokens)):
            raise UserError(
                f"on this processor the rows of a block of {self._row_block} tokens are not computed alike, "
                f"so role {self._name!r} would answer differently with every plan",
                mend="use another numerics.row_block; 1 always works",
            )
        for rows in sorted(LONG_BLOCKS):
            if self._row_block < rows <= self.info.context_tokens // 4:
                tokens = [i * 7 % self.config.vocab_size for i in range(rows)]
                if self._bits(rows, tokens, rows) == self._bits(self._row_block, tokens, rows):
                    self._blocks = (rows, *self._blocks)
        if not self.config.reward_head:
            self.run(Work(self._name, "first", 0, (0,), 1))
            self.fork("first", "second")
            self.rewind("first", 0)
            self.rewind("second", 0)

    def _bits(self, rows: int, tokens: list[int], piece: int) -> list[bytes]:
        """What cache and rewards hold after `tokens` were read in pieces, each in blocks of `rows`."""
        before, self._blocks = self._blocks, (rows,)
        for at in range(0, len(tokens), piece):
            self.run(Work(self._name, "bits", at, tuple(tokens[at : at + piece])))
        self._blocks = before
        cache, held = self._caches.peek("bits"), self._sequences["bits"]
        found = [np.asarray(part)[:, :, : held.computed].tobytes() for part in (*cache.k, *cache.v)]
        found.append(held.rewards[: held.computed].tobytes())
        self.rewind("bits", 0)
        return found

    def _check(self, role: Role, folder: Path) -> None:
        numerics, config = role.numerics, self.config
        if numerics.cache_tokens > config.max_position_embeddings:
            raise UserError(
                f"numerics.cache_tokens of role {self._name!r} is {numerics.cache_tokens}, "
                f"the model reads {config.max_position_embeddings}",
                where=str(folder),
                mend=f"set it to {config.max_position_embeddings} or less",
            )
        if self._name == RoleName.PRM and not config.reward_head:
            raise UserError("the model of role 'prm' has no reward head", where=str(folder), mend="use a reward model")
        self._tokenizer.check_size(config.vocab_size)


def _key(key: int) -> np.ndarray:
    """64-bit key as two uint32, the high half first."""
    return np.array([(key >> 32) & 0xFFFFFFFF, key & 0xFFFFFFFF], np.uint32)


@contextmanager
def enough_memory(name: str) -> Iterator[None]:
    """Turn the device's running out of memory into a UserError."""
    try:
        yield
    except jax.errors.JaxRuntimeError as bad:
        if "RESOURCE_EXHAUSTED" not in str(bad):
            raise
        raise UserError(
            f"the device has not enough memory for role {name!r}",
            mend="place the role elsewhere, or lower numerics.cache_tokens",
        ) from bad
