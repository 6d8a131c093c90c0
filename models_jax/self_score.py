"""The target judges a step itself: SpecReason's self-score, a digit from 0 to 9 (arXiv 2504.07891).

Two ways to the digit. A model as it is reads the score prompt after the step, and its next token is read at the ten
digits alone. A model that comes with `self_score.safetensors` has a head for this prompt, in place of the vocabulary's:
it looks at the step token by token, at what the model expected there and at what came, and answers 9 or 0.

Neither leaves anything in the cache: the prompt is written behind the text and forgotten, and a step that is read again
gives the bits that it gave before.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file

from models_jax.config import ModelConfig
from models_jax.device import Device
from models_jax.generate import Weights, decoder, read_block
from models_jax.sequences import Held
from models_jax.stops import Stops
from models_jax.tokenizer import Tokenizer
from models_jax.transformer import Cache, Decoder
from planner.errors import UserError
from planner.runtime.backend import Work

FILE_NAME = "self_score.safetensors"
DIGITS = "0123456789"


class Head(NamedTuple):
    """A two-layer network over what is known of each token of a step, float32."""

    inner: jax.Array
    """(3 * hidden + 2, width)."""
    inner_bias: jax.Array
    """(width,)."""
    outer: jax.Array
    """(width,)."""
    outer_bias: jax.Array
    """()."""
    slope: jax.Array
    """(): log-odds for each nat of the token's log-probability."""


def shapes(config: ModelConfig, width: int) -> dict[str, tuple[int, ...]]:
    """The head's tensors as they are in the file."""
    features = 3 * config.hidden_size + 2
    return {"inner": (features, width), "inner_bias": (width,), "outer": (width,), "outer_bias": (), "slope": ()}


def load_head(folder: Path, config: ModelConfig, device: Device = None) -> Head | None:
    """The head that lies beside a model; None if there is none. Raises UserError if it does not belong to it."""
    path = folder / FILE_NAME
    if not path.is_file():
        return None
    mend = "copy the file that belongs to the model, or take it away: the model then answers in digits"
    try:
        found = load_file(path)
    except Exception as bad:  # the library raises nothing narrower
        raise UserError(f"the file is damaged ({bad})", where=str(path), mend=mend) from None
    wanted = shapes(config, found["inner_bias"].size if "inner_bias" in found else 0)
    if {name: value.shape for name, value in found.items()} != wanted:
        raise UserError("the self-score head does not fit the model's config.json", where=str(path), mend=mend)
    return Head(**{name: jax.device_put(value.astype(np.float32), device) for name, value in found.items()})


def log_odds(head: Head, model: Decoder, before: jax.Array, hidden: jax.Array, tokens: jax.Array) -> jax.Array:
    """Log-odds that a token is no mistake.

    `before` (..., hidden) are the final hidden states one token earlier, from which the model expects `tokens` (...);
    `hidden` (..., hidden) are those of the tokens themselves.
    """
    expected = jax.nn.log_softmax(model.logits(before), axis=-1)
    chance = jnp.take_along_axis(expected, tokens[..., None], axis=-1)
    gap = jnp.max(expected, axis=-1, keepdims=True) - chance
    before, hidden = before.astype(jnp.float32), hidden.astype(jnp.float32)
    came = model.embed_tokens(tokens).astype(jnp.float32)
    features = jnp.concatenate([before, hidden, before * came, chance, gap], axis=-1)
    inner = jax.nn.relu(features @ head.inner + head.inner_bias)
    return inner @ head.outer + head.outer_bias + head.slope * chance[..., 0]


class SelfScorer:
    """Scores steps for one model on one device."""

    def __init__(
        self, name: str, folder: Path, config: ModelConfig, tokenizer: Tokenizer, row_block: int, device: Device
    ) -> None:
        """Read the head if the folder has one; nothing is compiled before the first score."""
        self._name, self._config, self._tokenizer, self._row_block = name, config, tokenizer, row_block
        self._head = load_head(folder, config, device)

    def scores(
        self, weights: Weights, cache: Cache, held: Held, stops: Stops, work: Work
    ) -> tuple[Cache, tuple[float, ...]]:
        """The score at each position of `work`, 0 to 1, and the cache, which is used up.

        `held` is the sequence with the tokens of `work` in it; afterwards its cache covers at least the last position.
        """
        if self._head is not None:
            return self._from_head(self._head, weights, cache, held, stops, work)
        return self._from_digits(weights, cache, held, work)

    def _from_head(
        self, head: Head, weights: Weights, cache: Cache, held: Held, stops: Stops, work: Work
    ) -> tuple[Cache, tuple[float, ...]]:
        ends = stops.ends(held.tokens[: held.length])
        begins = [max((end for end in ends if end < position), default=0) for position in work.score]
        # The token before a step is read again too: what is expected first in the step comes from it.
        first = min(held.computed, *begins)
        cache, found = token_log_odds(
            weights,
            head,
            cache,
            held.tokens,
            np.int32(first),
            np.int32(held.length),
            config=self._config,
            row_block=self._row_block,
        )
        held.computed = held.length
        odds = np.asarray(found).astype(np.float64)
        chances = [
            np.exp(-np.logaddexp(0.0, -odds[begin + 1 : position + 1]).sum())
            for begin, position in zip(begins, work.score, strict=True)
        ]
        return cache, tuple(float(c) if work.expectation else float(c >= 0.5) for c in chances)

    def _from_digits(self, weights: Weights, cache: Cache, held: Held, work: Work) -> tuple[Cache, tuple[float, ...]]:
        digits = self._digits()
        scores = {}
        for position in sorted(set(work.score)):
            end = position + 1
            asked = held.tokens.copy()
            asked[end : end + len(work.ask)] = work.ask
            cache, logits = next_logits(
                weights,
                cache,
                asked,
                np.int32(min(held.computed, position)),
                np.int32(end + len(work.ask)),
                config=self._config,
                row_block=self._row_block,
            )
            # What lay behind the step is overwritten by the prompt, and is read again when it is needed.
            held.computed = end
            scores[position] = _digit_score(np.asarray(logits)[digits], work.expectation)
        return cache, tuple(scores[position] for position in work.score)

    def _digits(self) -> list[int]:
        """Ids of the ten digits. UserError if one is no single token."""
        found = [self._tokenizer.encode(digit) for digit in DIGITS]
        if any(len(ids) != 1 for ids in found):
            raise UserError(
                f"role {self._name!r} cannot score its own reading: its tokenizer writes a digit with several tokens",
                mend="use a model whose digits are single tokens, or a policy that scores with a reward model",
            )
        return [ids[0] for ids in found]


def _digit_score(logits: np.ndarray, expectation: bool) -> float:
    """Digit / 9 from the ten digits' logits: the likeliest, or the mean."""
    if not expectation:
        return float(np.argmax(logits)) / 9
    chance = np.exp(logits.astype(np.float64) - logits.max())
    return float(chance @ np.arange(10) / chance.sum() / 9)


@partial(jax.jit, static_argnames=("config", "row_block"), donate_argnames=("cache",))
def next_logits(
    weights: Weights,
    cache: Cache,
    tokens: jax.Array,
    computed: jax.Array,
    length: jax.Array,
    *,
    config: ModelConfig,
    row_block: int,
) -> tuple[Cache, jax.Array]:
    """Feed `tokens` (slots,) from `computed` up to `length`; the logits (vocabulary,) of the token after them."""
    model = decoder(config, weights)

    def body(at: tuple[Cache, jax.Array, jax.Array]) -> tuple[Cache, jax.Array, jax.Array]:
        cache, _, start = at
        hidden, cache = read_block(model, cache, tokens, start, row_block)
        after = jnp.minimum(start + row_block, length)
        return cache, jax.lax.dynamic_index_in_dim(hidden, after - 1 - start, keepdims=False), start + row_block

    with jax.default_matmul_precision("highest"):
        none = jnp.zeros(config.hidden_size, weights[0].dtype)
        cache, last, _ = jax.lax.while_loop(lambda at: at[2] < length, body, (cache, none, computed))
        return cache, model.logits(last)


@partial(jax.jit, static_argnames=("config", "row_block"), donate_argnames=("cache",))
def token_log_odds(
    weights: Weights,
    head: Head,
    cache: Cache,
    tokens: jax.Array,
    first: jax.Array,
    length: jax.Array,
    *,
    config: ModelConfig,
    row_block: int,
) -> tuple[Cache, jax.Array]:
    """Feed `tokens` (slots,) from `first` up to `length`; log-odds (slots,) float32 of those after `first`."""
    model = decoder(config, weights)

    def body(at: tuple[Cache, jax.Array, jax.Array, jax.Array]) -> tuple[Cache, jax.Array, jax.Array, jax.Array]:
        cache, found, last, start = at
        hidden, cache = read_block(model, cache, tokens, start, row_block)
        before = jnp.concatenate([last[None], hidden[:-1]])
        block = jax.lax.dynamic_slice(tokens, (start,), (row_block,))
        found = jax.lax.dynamic_update_slice(found, log_odds(head, model, before, hidden, block), (start,))
        return cache, found, hidden[-1], start + row_block

    with jax.default_matmul_precision("highest"):
        none = jnp.zeros(config.hidden_size, weights[0].dtype)
        begin = (cache, jnp.zeros(tokens.shape, jnp.float32), none, first)
        cache, found, _, _ = jax.lax.while_loop(lambda at: at[3] < length, body, begin)
    return cache, found
