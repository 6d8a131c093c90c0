"""The first weights of the reward model: the draft below, and on top a comparison of what came with what should come.

A writer knows at each token what should come next; a verifier must compare that with the token that came. Gradient
descent finds this slowly, so it is built in: layers 0 and 1 are the draft's, in the first dimensions of a wider stream;
heads of layer 2 fetch the draft's last state from the token before; the MLP of layer 2 takes the product with the
token that came, which is the draft's logit of it. Layer 3, which must look for the worst token so far, and the reward
head are left to training. It may change all the rest as well.
"""

from __future__ import annotations

import numpy as np
from flax import nnx

from models_jax.config import ModelConfig
from models_jax.training.export import assign, tensors
from models_jax.transformer import Decoder
from planner.problems.vocabulary import ID, TOKENS

Tensors = dict[str, np.ndarray]

CODED = (*"0123456789", "+", "-", "*")
"""Tokens that can be wrong in ways that matter; all others share one code."""


LIFT = 5.0
"""The writer's stream has grown about this much by its end: norms bring the constant and the codes back to one."""


class Plan:
    """Which dimension of the stream holds what."""

    def __init__(self, writer: ModelConfig) -> None:
        """The writer's stream, a copy of the state before, a constant, token codes and what is found out."""
        self.width = writer.hidden_size
        self.copy = slice(self.width, 2 * self.width)
        self.constant = 2 * self.width
        self.codes = self.constant + 1
        self.other = self.codes + len(CODED)
        self.match = self.other + 1


def on_top_of(writer: Decoder, config: ModelConfig, seed: int) -> Decoder:
    """A reward model of shape `config` that begins with the layers of `writer`."""
    model = Decoder(config, nnx.Rngs(seed))
    plan, old = Plan(writer.config), tensors(writer)
    new = {name: value.copy() for name, value in tensors(model).items()}
    _widen_embedding(old, new, plan)
    for layer in range(writer.config.num_hidden_layers):
        _widen_layer(old, new, f"model.layers.{layer}.", plan)
    compare = f"model.layers.{writer.config.num_hidden_layers}."
    _fetch_state_before(old, new, compare, plan, config)
    _multiply_with_token(old, new, compare, plan)
    assign(model, new)
    return model


def _shrink(plan: Plan, width: int) -> float:
    """What a norm over the wider stream must be multiplied by to equal the narrow one; the rest of it is small."""
    return float(np.sqrt(plan.width / width)) * 1.02


def _widen_embedding(old: Tensors, new: Tensors, plan: Plan) -> None:
    table = np.zeros_like(new["model.embed_tokens.weight"])
    table[:, : plan.width] = old["model.embed_tokens.weight"]
    table[:, plan.constant] = 1.0
    for token in TOKENS:
        dimension = plan.codes + CODED.index(token) if token in CODED else plan.other
        table[ID[token], dimension] = 1.0
    new["model.embed_tokens.weight"] = table
    new["model.norm.weight"][: plan.width] = old["model.norm.weight"] * _shrink(plan, table.shape[1])


def _widen_layer(old: Tensors, new: Tensors, layer: str, plan: Plan) -> None:
    """The old layer in one corner. New heads and units read at random and write nothing yet."""
    width = new["model.norm.weight"].size
    for name in ("input_layernorm", "post_attention_layernorm"):
        new[f"{layer}{name}.weight"][: plan.width] = old[f"{layer}{name}.weight"] * _shrink(plan, width)
    for name in ("q_proj", "k_proj", "v_proj"):
        _corner(old, new, f"{layer}self_attn.{name}.weight", keep_other_rows=True)
    for name in ("gate_proj", "up_proj"):
        _corner(old, new, f"{layer}mlp.{name}.weight", keep_other_rows=True)
    _corner(old, new, f"{layer}self_attn.o_proj.weight", keep_other_rows=False)
    _corner(old, new, f"{layer}mlp.down_proj.weight", keep_other_rows=False)


def _corner(old: Tensors, new: Tensors, name: str, keep_other_rows: bool) -> None:
    rows, columns = old[name].shape
    new[name][:rows] = 0.0
    if not keep_other_rows:
        new[name][:] = 0.0
    new[name][:rows, :columns] = old[name]


def _fetch_state_before(old: Tensors, new: Tensors, layer: str, plan: Plan, config: ModelConfig) -> None:
    """Heads that look one token back and copy the writer's normed state.

    The three fastest rotations agree at that distance alone; the slowest, taken off, leaves all others below zero.
    """
    q, k, v, o = (new[f"{layer}self_attn.{name}_proj.weight"] for name in "qkvo")
    half, strength = config.head_dim // 2, 10.0
    new[f"{layer}input_layernorm.weight"][plan.constant] = LIFT
    q[: plan.width], k[: plan.width], v[: plan.width], o[:, : plan.width] = 0.0, 0.0, 0.0, 0.0
    o[plan.copy.start : plan.match + 1] = 0.0
    for head in range(plan.width // config.head_dim):
        begin = head * config.head_dim
        for pair, weight in ((0, 1.0), (1, 1.0), (2, 1.0), (half - 1, -2.4)):
            angle = config.rope_theta ** (-pair / half)
            k[begin + pair, plan.constant] = strength
            q[begin + pair, plan.constant] = strength * weight * np.cos(angle)
            q[begin + pair + half, plan.constant] = -strength * weight * np.sin(angle)
    scale = old["model.norm.weight"] * _shrink(plan, o.shape[0])
    for i in range(plan.width):
        v[i, i] = scale[i]
        o[plan.copy.start + i, i] = 1.0


def _multiply_with_token(old: Tensors, new: Tensors, layer: str, plan: Plan) -> None:
    """One gated unit for each coded token: open if it came, it passes on the writer's logit of it."""
    gate, up, down = (new[f"{layer}mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    units = len(CODED) + 1
    new[f"{layer}post_attention_layernorm.weight"][plan.width :] = LIFT
    gate[:units], up[:units], down[:, :units] = 0.0, 0.0, 0.0
    down[plan.copy.start : plan.match + 1] = 0.0
    for unit, token in enumerate(CODED):
        gate[unit, plan.codes + unit] = 4.0
        up[unit, plan.copy] = old["model.embed_tokens.weight"][ID[token]]
        down[plan.match, unit] = 0.1
    gate[units - 1, plan.other] = 4.0
    up[units - 1, plan.constant] = 10.0
    down[plan.match, units - 1] = 0.1
