"""An integer model of one role, run by the core: what is behind the transports `rtl` and `board`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from fpga_backend.driver import Device, Driver
from fpga_backend.driver import Sequence as DeviceSequence
from models_jax.integer import gumbel
from models_jax.integer.runner import check_context, check_work, model_info, read_beside, rows_shape
from models_jax.sequences import Held, Sequences
from models_jax.stops import Stops
from models_jax.text_format import TextFormat
from models_jax.tokenizer import Tokenizer
from planner.runtime.backend import Handed, Output, Work
from planner.workflow import Role


class CoreRunner:
    """Weights in the memory of a device; for each sequence a cache there and its tokens here."""

    def __init__(self, name: str, role: Role, folder: Path, delimiter: str, make_device: Callable[[], Device]) -> None:
        """Transfer the integer model in `folder` for role `name`; steps end at `delimiter`."""
        self._name = name
        model = read_beside(folder)
        check_context(name, role, model.shape, folder)
        context = role.numerics.cache_tokens
        self._tokenizer = Tokenizer(folder)
        self._tokenizer.check_size(model.shape.vocab_size)
        self._format = TextFormat(self._tokenizer, folder, delimiter)
        self._stops = Stops(self._tokenizer, model.shape.vocab_size, delimiter)
        # A token that may complete the delimiter stops the core; whether it has is told here.
        mask = (self._stops.table == self._stops.complete).any(axis=1)
        self._sequences = Sequences(name, context, context, model.shape.vocab_size)
        self._caches: dict[str, DeviceSequence] = {}
        device = make_device()
        try:
            self._driver: Driver | None = Driver(device, model, mask, context)
        except BaseException:
            device.close()
            raise
        self._rows_shape = rows_shape(model.shape)
        self.info = model_info(model, folder, self._tokenizer, context)

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
        """Do one chunk with one doorbell: read, then generate."""
        if self._driver is None:
            raise RuntimeError(f"role {self._name!r} is closed")
        check_work(self._name, work)
        gumbel.temperature_units(work.temperature)
        held = self._sequences.open(work)
        first, limit = held.length, self._sequences.limit(work, held)
        if limit == first and held.computed == first:
            return Output()
        return self._write(self._driver, work, held, limit)

    def rewind(self, sequence: str, tokens: int) -> None:
        """Forget all but the first `tokens` tokens; with 0 the cache is freed."""
        self._sequences.rewind(sequence, tokens)
        if sequence not in self._sequences and sequence in self._caches:
            self._caches.pop(sequence).free()

    def fork(self, sequence: str, new_sequence: str) -> None:
        """Make `new_sequence` a copy of a sequence, in place of what it was."""
        self._sequences.fork(sequence, new_sequence)
        if self._driver is not None and sequence in self._caches:
            self._driver.copy_cache(self._caches[sequence], self._cache(self._driver, new_sequence))

    def hand_over(self, sequence: str) -> Handed:
        """What a sequence holds: the bytes of any device of the integer model."""
        length = self._sequences.known(sequence).length
        self.run(Work(self._name, sequence, length, ()))
        assert self._driver is not None, "a role that is closed does not run"
        return self._sequences.hand_over(sequence, self._driver.cache_rows(self._caches[sequence], length))

    def take_over(self, sequence: str, handed: Handed) -> None:
        """Let a sequence hold what was handed over."""
        if self._driver is None:
            raise RuntimeError(f"role {self._name!r} is closed")
        rows = self._sequences.take_over(sequence, handed, self._rows_shape, np.int8)
        self._driver.fill_cache(self._cache(self._driver, sequence), rows)

    def close(self) -> None:
        """Free weights and caches; calling it twice is harmless."""
        while self._caches:
            self._caches.popitem()[1].free()
        if self._driver is not None:
            self._driver.close()
        self._driver = None

    def _write(self, driver: Driver, work: Work, held: Held, limit: int) -> Output:
        cache = self._cache(driver, work.sequence)
        cycles, written = 0, ()
        while True:
            # The logits of the last token are needed anew: it is read once more.
            start = min(held.computed, held.length - 1) if limit > held.length else held.computed
            held.computed = start
            tokens = held.tokens[: held.length]
            done = driver.run(cache, tokens, start, limit, work.key, work.temperature)
            cycles += done.counters["CYCLES"]
            held.append(done.tokens)
            held.computed = done.computed
            written += done.tokens
            complete = self._stops.completes(work.begun, written)
            if complete or not done.stopped or held.length >= limit:
                break
        ended = bool(written) and written[-1] in self._tokenizer.eos_ids
        return Output(written, complete=complete, ended=ended, cycles=cycles)

    def _cache(self, driver: Driver, sequence: str) -> DeviceSequence:
        if sequence not in self._caches:
            self._caches[sequence] = driver.sequence()
        return self._caches[sequence]
