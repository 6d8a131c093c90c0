"""An integer model of one role, run by its JAX twin."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from models_jax.device import Device
from models_jax.integer.decode import FEED_ROWS, Sampler, advance, sampler
from models_jax.integer.files import FILE_NAME, IntegerModel, Shape, read
from models_jax.integer.twin import Cache, Parameters, empty_cache, parameters
from models_jax.sequences import Held, Sequences
from models_jax.stops import Stops
from models_jax.text_format import TextFormat
from models_jax.tokenizer import Tokenizer
from planner.checkpoint import model_hash
from planner.errors import UserError
from planner.runtime.backend import Handed, ModelInfo, Output, Work
from planner.workflow import Role


class IntegerRunner:
    """Weights on one JAX device, a cache a sequence, everything compiled before the first chunk."""

    def __init__(self, name: str, role: Role, folder: Path, delimiter: str, device: Device) -> None:
        """Load the integer model in `folder` for role `name` and compile; steps end at `delimiter`."""
        self._name, self._device = name, device
        model = read_beside(folder)
        self._shape = model.shape
        check_context(name, role, model.shape, folder)
        self._tokenizer = Tokenizer(folder)
        self._format = TextFormat(self._tokenizer, folder, delimiter)
        self._slots = role.numerics.cache_tokens + FEED_ROWS
        self._sequences = Sequences(name, role.numerics.cache_tokens, self._slots, model.shape.vocab_size)
        self._caches: dict[str, Cache] = {}
        self._tokenizer.check_size(model.shape.vocab_size)
        self._stops = Stops(self._tokenizer, model.shape.vocab_size, delimiter)
        self._stop_table = jax.device_put(self._stops.table, device)
        self._parameters: Parameters | None = jax.device_put(parameters(model), device)
        self.info = model_info(model, folder, self._tokenizer, role.numerics.cache_tokens)
        self.run(Work(role=name, sequence="", keep=0, feed=(0,)))
        self.rewind("", 0)

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
        """Do one chunk: read, then generate."""
        if self._parameters is None:
            raise RuntimeError(f"role {self._name!r} is closed")
        check_work(self._name, work)
        chosen_by = sampler(work.key, work.temperature, self._stop_table)
        held = self._sequences.open(work)
        chosen_by = chosen_by._replace(state=np.int32(self._stops.state(work.begun)))
        return self._write(self._parameters, work, held, chosen_by)

    def rewind(self, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens; with 0 the cache is freed."""
        self._sequences.rewind(sequence, tokens)
        if sequence not in self._sequences:
            self._caches.pop(sequence, None)

    def fork(self, sequence: str, new_sequence: str) -> None:
        """Make `new_sequence` a copy of a sequence, in place of what it was."""
        self._sequences.fork(sequence, new_sequence)
        self._caches.pop(new_sequence, None)
        if sequence in self._caches:
            self._caches[new_sequence] = jax.tree.map(jnp.copy, self._caches[sequence])

    def hand_over(self, sequence: str) -> Handed:
        """What a sequence holds: the bytes of any device of the integer model."""
        length = self._sequences.known(sequence).length
        self.run(Work(self._name, sequence, length, ()))
        both = [[np.asarray(part)[:length] for part in parts] for parts in self._caches[sequence]]
        return self._sequences.hand_over(sequence, np.asarray(both).swapaxes(0, 1))

    def take_over(self, sequence: str, handed: Handed) -> None:
        """Let a sequence hold what was handed over."""
        rows = self._sequences.take_over(sequence, handed, rows_shape(self._shape), np.int8)
        padded = np.pad(rows, ((0, 0), (0, 0), (0, self._slots - rows.shape[2]), (0, 0), (0, 0)))
        self._caches[sequence] = jax.device_put(Cache(tuple(padded[:, 0]), tuple(padded[:, 1])), self._device)

    def close(self) -> None:
        """Free weights and caches."""
        self._parameters = None
        self._caches.clear()

    def _write(self, p: Parameters, work: Work, held: Held, chosen_by: Sampler) -> Output:
        first, limit = held.length, self._sequences.limit(work, held)
        if limit == first and held.computed == first:
            return Output()
        cache = self._take_cache(work.sequence, held)
        # The logits of the last token are needed anew: it is read once more.
        computed = min(held.computed, first - 1) if limit > first else held.computed
        done = advance(
            p,
            cache,
            held.tokens,
            np.int32(computed),
            np.int32(first),
            np.int32(limit),
            chosen_by,
            shape=self._shape,
        )
        self._caches[work.sequence] = done.cache
        written = np.asarray(done.tokens)[first : int(done.length)]
        held.append(written)
        held.computed = int(done.computed)
        return self._output(tuple(int(token) for token in written), int(done.state))

    def _output(self, tokens: tuple[int, ...], state: int) -> Output:
        complete = bool(tokens) and state == self._stops.complete
        return Output(tokens, complete, ended=bool(tokens) and tokens[-1] in self._tokenizer.eos_ids)

    def _take_cache(self, sequence: str, held: Held) -> Cache:
        """The cache, which the device function consumes: if that fails, the sequence is read afresh."""
        cache = self._caches.pop(sequence, None)
        if cache is not None:
            return cache
        held.computed = 0
        return jax.device_put(empty_cache(self._shape, self._slots), self._device)


def read_beside(folder: Path) -> IntegerModel:
    """The integer model of a folder. Raises UserError with the command that makes it."""
    path = folder / FILE_NAME
    if not path.is_file():
        raise UserError(
            f"no {FILE_NAME}: the model is not quantised",
            where=str(folder),
            mend=f"run `python -m models_jax.integer.quantise {folder} --calibration TOKENS.jsonl`",
        )
    return read(path)


def check_context(name: str, role: Role, shape: Shape, folder: Path) -> None:
    """Raise UserError if the role wants a longer context than the model has."""
    wanted = role.numerics.cache_tokens
    if wanted > shape.context_tokens:
        raise UserError(
            f"numerics.cache_tokens of role {name!r} is {wanted}, the integer model reads {shape.context_tokens}",
            where=str(folder),
            mend=f"set it to {shape.context_tokens} or less",
        )


def rows_shape(shape: Shape) -> tuple[int, int, int]:
    """Layers, key heads and head_dim: what keys and values are handed over in."""
    return shape.num_hidden_layers, shape.num_key_value_heads, shape.head_dim


def check_work(name: str, work: Work) -> None:
    """Raise UserError for work of role `name` that no integer model does."""
    if work.score:
        raise UserError(
            f"role {name!r} has an integer model, which has no reward head",
            mend="score with a float reward model",
        )
    if work.top_k or work.top_p < 1 or work.min_p:
        raise UserError(
            f"role {name!r} has an integer model, which does not narrow its choice",
            mend="leave top_k, top_p and min_p out",
        )


def model_info(model: IntegerModel, folder: Path, tokenizer: Tokenizer, context_tokens: int) -> ModelInfo:
    """Sizes as an integer device stores them, whatever the twin takes up."""
    s = model.shape
    return ModelInfo(
        model_hash=model_hash(folder),
        tokenizer_hash=tokenizer.hash,
        weight_bytes=model.packed_bytes,
        kv_bytes_per_token=2 * s.num_hidden_layers * s.key_size,
        context_tokens=context_tokens,
    )
