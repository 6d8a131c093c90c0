"""A float model of one role, in JAX."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from models_jax.device import Device
from models_jax.generate import Sampler, advance, rewards, weights_of
from models_jax.loading import load_checkpoint
from models_jax.self_score import SelfScorer
from models_jax.sequences import Held, Sequences
from models_jax.text_format import TextFormat
from models_jax.tokenizer import Tokenizer
from models_jax.transformer import Cache
from planner.checkpoint import model_hash
from planner.errors import UserError
from planner.runtime.backend import ModelInfo, Output, Work
from planner.workflow import Arithmetic, Role, RoleName, WeightKind

DTYPES = {Arithmetic.FLOAT32: jnp.float32, Arithmetic.BFLOAT16: jnp.bfloat16}


class FloatRunner:
    """Weights on one device, a cache a sequence, everything compiled before the first chunk."""

    def __init__(self, name: str, role: Role, folder: Path, delimiter: str, device: Device) -> None:
        """Load the model in `folder` for role `name` and compile; steps end at `delimiter`."""
        self._name, self._device = name, device
        self._dtype = DTYPES[role.numerics.arithmetic]
        self._row_block = role.numerics.row_block
        with enough_memory(name):
            int8_weights = role.numerics.weights is WeightKind.INT8
            config, model = load_checkpoint(folder, self._dtype, device, int8_weights=int8_weights)
            self._weights = weights_of(model)
        self._tokenizer = Tokenizer(folder)
        self.config = replace(config, known_tokens=self._tokenizer.size)
        self._format = TextFormat(self._tokenizer, folder, delimiter, self.config)
        self._check(role, folder)
        self._self_scorer = SelfScorer(name, folder, self.config, self._tokenizer, self._row_block, device)
        # Padding of the last block is written behind the last token.
        self._slots = role.numerics.cache_tokens + self._row_block
        context = role.numerics.cache_tokens
        self._sequences = Sequences(name, context, self._slots, self.config.vocab_size)
        self._caches: dict[str, Cache] = {}
        vocab_size = self.config.vocab_size
        # A reward model writes nothing, so nothing can stop it.
        no_stops = np.zeros(vocab_size, np.bool_)
        self._stops = no_stops if self.config.reward_head else self._tokenizer.stop_mask(vocab_size, delimiter)
        c = self.config
        self.info = ModelInfo(
            model_hash=model_hash(folder),
            tokenizer_hash=self._format.hash,
            weight_bytes=sum(weight.nbytes for weight in self._weights),
            kv_bytes_per_token=2 * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * self._dtype(0).nbytes,
            context_tokens=context,
        )
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
        if work.max_new and self.config.reward_head:
            raise UserError(f"role {self._name!r} has a reward model, which cannot write", mend="give it another")
        held = self._sequences.open(work)
        with enough_memory(self._name):
            if self.config.reward_head:
                return self._score(work, held)
            return self._self_score(work, held) if work.score else self._write(work, held)

    def rewind(self, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens; with 0 the cache is freed."""
        self._sequences.rewind(sequence, tokens)
        if sequence not in self._sequences:
            self._caches.pop(sequence, None)

    def close(self) -> None:
        """Free weights and caches."""
        self._weights = ()
        self._caches.clear()

    def _write(self, work: Work, held: Held) -> Output:
        first, limit = held.length, self._sequences.limit(work, held)
        if limit == first and held.computed == held.length:
            return Output()
        cache = self._take_cache(work.sequence, held)
        # The logits of the last token are needed anew: it is read once more.
        computed = min(held.computed, first - 1) if limit > first else held.computed
        done = advance(
            self._weights,
            cache,
            held.tokens,
            np.int32(computed),
            np.int32(first),
            np.int32(limit),
            Sampler(_key(work.key), np.float32(work.temperature), self._stops),
            config=self.config,
            row_block=self._row_block,
        )
        self._caches[work.sequence] = done.cache
        written = np.asarray(done.tokens)[first : int(done.length)]
        held.append(written)
        held.computed = int(done.computed)
        return self._output(tuple(int(token) for token in written))

    def _output(self, tokens: tuple[int, ...]) -> Output:
        complete = bool(tokens) and bool(self._stops[tokens[-1]])
        ended = bool(tokens) and tokens[-1] in self._tokenizer.eos_ids
        return Output(tokens, complete, ended)

    def _score(self, work: Work, held: Held) -> Output:
        if held.computed < held.length:
            cache, first = self._take_cache(work.sequence, held), held.computed
            cache, found = rewards(
                self._weights,
                cache,
                held.tokens,
                np.int32(first),
                np.int32(held.length),
                config=self.config,
                row_block=self._row_block,
            )
            self._caches[work.sequence] = cache
            held.rewards[first : held.length] = np.asarray(found)[first : held.length]
            held.computed = held.length
        return Output(scores=tuple(float(held.rewards[position]) for position in work.score))

    def _self_score(self, work: Work, held: Held) -> Output:
        cache = self._take_cache(work.sequence, held)
        cache, scores = self._self_scorer.scores(self._weights, cache, held, self._stops, work)
        self._caches[work.sequence] = cache
        return Output(scores=scores)

    def _take_cache(self, sequence: str, held: Held) -> Cache:
        """The cache, which the device function consumes: if that fails, the sequence is read afresh."""
        cache = self._caches.pop(sequence, None)
        if cache is not None:
            return cache
        held.computed = 0
        with jax.default_device(self._device):
            return Cache.empty(self.config, self._slots, dtype=self._dtype)

    def _warm_up(self) -> None:
        """Compile, and prove that the numerics class holds here: a token's bits do not depend on its row.

        Tokens are read in one block and again one by one, each then in the first row.
        """
        tokens = [i % self.config.vocab_size for i in range(min(self._row_block, self.info.context_tokens))]
        last = (len(tokens) - 1,) if self.config.reward_head else ()
        whole = self.run(Work(self._name, "whole", 0, tuple(tokens), score=last))
        for i, token in enumerate(tokens):
            self.run(Work(self._name, "single", i, (token,)))
        single = self.run(Work(self._name, "single", len(tokens), (), score=last))
        if whole != single or self._bits("whole") != self._bits("single"):
            raise UserError(
                f"on this processor the rows of a block of {self._row_block} tokens are not computed alike, "
                f"so role {self._name!r} would answer differently with every plan",
                mend="use another numerics.row_block; 1 always works",
            )
        self.rewind("whole", 0)
        self.rewind("single", 0)

    def _bits(self, sequence: str) -> list[bytes]:
        """What the cache of `sequence` holds for the tokens that are computed."""
        cache, computed = self._caches[sequence], self._sequences[sequence].computed
        return [np.asarray(part)[:, :, :computed].tobytes() for part in (*cache.k, *cache.v)]

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
