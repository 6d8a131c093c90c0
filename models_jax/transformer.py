"""One decoder for Llama, Mistral, Qwen2 and Qwen3 shapes, as Flax NNX modules with an explicit cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from models_jax.attention_kernel import attend, fits
from models_jax.config import ModelConfig, RewardHead
from models_jax.int8_weights import Int8Embedding, Int8Linear
from models_jax.rope import inverse_frequencies


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Cache:
    """Keys and values of one model: for each layer two arrays (batch, kv_heads, slots, head_dim).

    It has no length of its own: a token at position p lives in slot p, whoever reads says up to which position,
    and a rewind is a smaller number. Stale slots behind it are masked. Layers are not stacked in one array, so
    that each is updated in place.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]

    @classmethod
    def empty(cls, config: ModelConfig, slots: int, batch: int = 1, dtype: jnp.dtype = jnp.float32) -> Cache:
        """A cache of zeros for `slots` tokens."""
        shape = (batch, config.num_key_value_heads, slots, config.head_dim)
        layers = range(config.num_hidden_layers)
        return cls(tuple(jnp.zeros(shape, dtype) for _ in layers), tuple(jnp.zeros(shape, dtype) for _ in layers))


def by_rows(rows: int | None, function: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """`function` of arrays (batch, tokens, ...), of `rows` tokens at a time where there are more of them.

    XLA for CPUs sums in another order where there are more rows, so a long block has the bits of short ones only if
    its norms and its attention are computed in their shape. Products with weights agree from 2 to 32 rows.
    """
    tokens = arrays[0].shape[1]
    if rows is None or tokens <= rows or tokens % rows:
        return function(*arrays)

    def cut(*arrays: jax.Array) -> jax.Array:
        parts = tuple(jnp.moveaxis(x.reshape(x.shape[0], -1, rows, *x.shape[2:]), 1, 0) for x in arrays)
        found = jnp.moveaxis(jax.lax.map(lambda part: function(*part), parts), 0, 1)
        return found.reshape(found.shape[0], tokens, *found.shape[3:])

    return jax.lax.platform_dependent(*arrays, cpu=cut, default=function)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, computed in float32."""

    def __init__(self, size: int, config: ModelConfig) -> None:
        """`size` is the width of the last axis."""
        self.weight = nnx.Param(jnp.ones((size,)))
        self.eps = config.rms_norm_eps
        self.rows = config.class_rows

    def __call__(self, x: jax.Array) -> jax.Array:
        """(batch, tokens, ..., size) -> the same shape and dtype."""
        return by_rows(self.rows, self._norm, x)

    def _norm(self, x: jax.Array) -> jax.Array:
        wide = x.astype(jnp.float32)
        wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + self.eps)
        return (wide * self.weight[...].astype(jnp.float32)).astype(x.dtype)


def linear(config: ModelConfig, rngs: nnx.Rngs, inner: int, outer: int, *, bias: bool = False, share: float = 1.0):
    """A linear layer as the configuration has its weights; the variance of its fan-in initialisation times `share`."""
    if config.int8_weights:
        return Int8Linear(inner, outer, bias)
    init = nnx.initializers.variance_scaling(share, "fan_in", "normal")
    return nnx.Linear(inner, outer, use_bias=bias, kernel_init=init, rngs=rngs)


def rope(x: jax.Array, positions: jax.Array, inverse: jax.Array) -> jax.Array:
    """Rotate (batch, tokens, heads, head_dim) by position, halves paired as in transformers.

    `inverse` (head_dim / 2,) is radians a position.
    """
    angle = positions[..., None].astype(jnp.float32) * inverse
    cos, sin = jnp.cos(angle)[:, :, None, :], jnp.sin(angle)[:, :, None, :]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with RoPE, optional biases (Qwen2) and q/k norm (Qwen3)."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Fan-in initialisation; the output projection is scaled down by depth."""
        c = config
        self.config = c
        wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = linear(c, rngs, c.hidden_size, wide, bias=c.attention_bias)
        self.k_proj = linear(c, rngs, c.hidden_size, narrow, bias=c.attention_bias)
        self.v_proj = linear(c, rngs, c.hidden_size, narrow, bias=c.attention_bias)
        self.o_proj = linear(c, rngs, wide, c.hidden_size, bias=c.output_bias, share=0.5 / c.num_hidden_layers)
        self.q_norm = RMSNorm(c.head_dim, c) if c.qk_norm else None
        self.k_norm = RMSNorm(c.head_dim, c) if c.qk_norm else None

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cached: tuple[jax.Array, jax.Array] | None,
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """(batch, tokens, hidden) -> the same, and the keys and values attended to.

        `mask` (batch, tokens, keys) is true where a query may look. With `cached` keys and values
        (batch, kv_heads, slots, head_dim) the new ones are written from slot `positions[0, 0]` on. A batch of 1 with
        several cached sequences is a block whose tokens are each of another one.
        """
        q, k, v = self._heads(x, positions)
        if cached is None:
            return self.o_proj(self._look(q, k, v, positions, mask)), (k, v)
        if cached[0].shape[0] > x.shape[0]:
            seen, kept = self._apart(q, k, v, positions, mask, cached)
            return self.o_proj(seen), kept
        at = (0, 0, positions[0, 0], 0)
        k = jax.lax.dynamic_update_slice(cached[0], k.astype(cached[0].dtype), at)
        v = jax.lax.dynamic_update_slice(cached[1], v.astype(cached[1].dtype), at)
        kernel = x.shape[0] == 1
        return self.o_proj(self._look(q, k, v, positions, mask, kernel=kernel)), (k, v)

    def _apart(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        positions: jax.Array,
        mask: jax.Array,
        cached: tuple[jax.Array, jax.Array],
    ) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        """What the tokens of one block see of n caches, the first of the first, the second of the second and so on.

        Each product has the shape that it has for one sequence: the whole block looks at each cache, and one row of
        what it sees is taken.
        """
        keys, values = cached
        count, tokens = keys.shape[0], q.shape[1]
        # One array for all caches: XLA for CPUs would copy arrays of their own at each turn of a loop.
        for i in range(count):
            at = (i, 0, positions[0, i], 0)
            keys = jax.lax.dynamic_update_slice(keys, k[:, :, i : i + 1].astype(keys.dtype), at)
            values = jax.lax.dynamic_update_slice(values, v[:, :, i : i + 1].astype(values.dtype), at)
        rows = []
        for i in range(count):
            place, seen = (jnp.broadcast_to(of[:, i : i + 1], of.shape) for of in (positions, mask))
            own = self._look(q, keys[i : i + 1], values[i : i + 1], place, seen, kernel=True)
            rows.append(own[:, i : i + 1])
        found = jnp.concatenate(rows, axis=1)
        return jnp.pad(found, ((0, 0), (0, tokens - count), (0, 0))), (keys, values)

    def _heads(self, x: jax.Array, positions: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries (batch, tokens, heads, head_dim), keys and values (batch, kv_heads, tokens, head_dim)."""
        c = self.config
        batch, tokens, _ = x.shape
        q = self.q_proj(x).reshape(batch, tokens, c.num_attention_heads, c.head_dim)
        k = self.k_proj(x).reshape(batch, tokens, c.num_key_value_heads, c.head_dim)
        v = self.v_proj(x).reshape(batch, tokens, c.num_key_value_heads, c.head_dim)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        inverse = jnp.asarray(inverse_frequencies(c.head_dim, c.rope_theta, c.rope_scaling))
        q, k = rope(q, positions, inverse), rope(k, positions, inverse)
        return q, k.swapaxes(1, 2), v.swapaxes(1, 2)

    def _look(
        self, q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array, mask: jax.Array, *, kernel: bool = False
    ) -> jax.Array:
        """What the queries see, (batch, tokens, heads * head_dim); with `kernel` a GPU may use its own."""
        c = self.config
        batch = q.shape[0]
        group = c.num_attention_heads // c.num_key_value_heads
        scale = c.head_dim**-0.5

        def by_heads(q: jax.Array) -> jax.Array:
            q = q.reshape(batch, -1, c.num_key_value_heads, group, c.head_dim).transpose(0, 2, 3, 1, 4)
            return q.reshape(batch, c.num_key_value_heads, -1, c.head_dim)

        def by_tokens(out: jax.Array) -> jax.Array:
            out = out.reshape(batch, c.num_key_value_heads, group, -1, c.head_dim).transpose(0, 3, 1, 2, 4)
            return out.reshape(batch, out.shape[1], -1)

        def look(q: jax.Array, mask: jax.Array) -> jax.Array:
            q = by_heads(q)
            scores = jnp.einsum("bkqd,bksd->bkqs", q, k, preferred_element_type=jnp.float32) * scale
            scores = jnp.where(jnp.tile(mask, (1, group, 1))[:, None], scores, -1e30)
            weights = jax.nn.softmax(scores, axis=-1).astype(q.dtype)
            return by_tokens(jnp.einsum("bkqs,bksd->bkqd", weights, v))

        def plain() -> jax.Array:
            return by_rows(c.class_rows, look, q, mask)

        def one(q: jax.Array, k: jax.Array, v: jax.Array, positions: jax.Array) -> jax.Array:
            return attend(q, k, v, jnp.tile(positions.astype(jnp.int32), group), scale=scale)

        def by_kernel() -> jax.Array:
            return by_tokens(jnp.stack([one(*each) for each in zip(by_heads(q), k, v, positions, strict=True)]))

        if kernel and not c.sharded and fits(c.head_dim, k.shape[2]):
            return jax.lax.platform_dependent(cuda=by_kernel, default=plain)
        return plain()


class MLP(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Fan-in initialisation; the output projection is scaled down by depth."""
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = linear(config, rngs, hidden, inner)
        self.up_proj = linear(config, rngs, hidden, inner)
        self.down_proj = linear(config, rngs, inner, hidden, share=0.5 / config.num_hidden_layers)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Same shape as `x`."""
        return self.down_proj(jax.nn.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nnx.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Build the two halves."""
        self.input_layernorm = RMSNorm(config.hidden_size, config)
        self.self_attn = Attention(config, rngs)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config)
        self.mlp = MLP(config, rngs)

    def __call__(self, x, positions, mask, cached):
        """See `Attention`."""
        attended, kv = self.self_attn(self.input_layernorm(x), positions, mask, cached)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), kv


class TwoClassHead(nnx.Module):
    """Two layers to two classes, as in Qwen2.5-Math-PRM; class 1 is "the prefix is right so far"."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Both layers have a bias, as there."""
        self.inner = nnx.Linear(config.hidden_size, config.hidden_size, rngs=rngs)
        self.outer = nnx.Linear(config.hidden_size, 2, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., hidden) -> (..., 2) logits."""
        return self.outer(jax.nn.relu(self.inner(x)))


class ScalarHead(nnx.Module):
    """One layer to one number, as in Skywork-o1-Open-PRM."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """With a bias, as there."""
        self.summary = nnx.Linear(config.hidden_size, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """(..., hidden) -> (..., 2) logits: the number against zero, whose softmax is the sigmoid."""
        value = self.summary(x)
        return jnp.concatenate([jnp.zeros_like(value), value], axis=-1)


HEADS = {RewardHead.TWO_CLASS: TwoClassHead, RewardHead.SCALAR: ScalarHead}
"""Reward heads with weights of their own, which such a model has in place of the vocabulary head."""


class Decoder(nnx.Module):
    """The whole model. `hidden` runs the trunk; `logits` and `reward` are its heads."""

    def __init__(self, config: ModelConfig, rngs: nnx.Rngs) -> None:
        """Random weights from `rngs`; a checkpoint is loaded over them."""
        self.config = config
        self.embed_tokens = (
            Int8Embedding(config.vocab_size, config.hidden_size)
            if config.int8_weights
            else nnx.Embed(
                config.vocab_size, config.hidden_size, embedding_init=nnx.initializers.normal(1.0), rngs=rngs
            )
        )
        self.layers = nnx.List([Layer(config, rngs) for _ in range(config.num_hidden_layers)])
        self.norm = RMSNorm(config.hidden_size, config)
        own_head = HEADS.get(config.reward_head) if config.reward_head else None
        untied = not (config.tie_word_embeddings or own_head)
        self.lm_head = linear(config, rngs, config.hidden_size, config.vocab_size) if untied else None
        self.score = own_head(config, rngs) if own_head else None

    def hidden(
        self, tokens: jax.Array, positions: jax.Array, mask: jax.Array, cache: Cache | None = None
    ) -> tuple[jax.Array, Cache | None]:
        """Final hidden states (batch, tokens, hidden), after the last norm, and the cache written to."""
        x = self.embed_tokens(tokens).astype(self.norm.weight[...].dtype)
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            x, (k, v) = layer(x, positions, mask, None if cache is None else (cache.k[i], cache.v[i]))
            keys.append(k)
            values.append(v)
        written = None if cache is None else Cache(tuple(keys), tuple(values))
        return self.norm(x), written

    def logits(self, hidden: jax.Array) -> jax.Array:
        """(..., hidden) -> (..., vocabulary), accumulated and returned in float32; padding is minus infinity."""
        found = self._all_logits(hidden)
        known = self.config.known_tokens
        if known is None or known >= self.config.vocab_size:
            return found
        return jnp.where(jnp.arange(self.config.vocab_size) < known, found, -jnp.inf)

    def _all_logits(self, hidden: jax.Array) -> jax.Array:
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        if isinstance(head, Int8Embedding | Int8Linear):
            return head.product(hidden)
        matrix = head.embedding[...].T if isinstance(head, nnx.Embed) else head.kernel[...]
        return jnp.matmul(hidden, matrix, preferred_element_type=jnp.float32)

    def reward(self, hidden: jax.Array) -> jax.Array:
        """Probability of "right so far" at each position: (..., hidden) -> (...) float32."""
        if self.score is not None:
            pair = self.score(hidden).astype(jnp.float32)
        elif self.config.reward_tokens is not None:
            right, wrong = self.config.reward_tokens
            pair = self._all_logits(hidden)[..., jnp.array([wrong, right])]
        else:
            raise ValueError("this model has no reward head")
        return jax.nn.softmax(pair, axis=-1)[..., 1]
