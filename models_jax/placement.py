"""Where the arrays of a model lie: on one device, or spread over several (tensor parallelism).

As in Shoeybi et al., Megatron-LM (2019): the matrices that lead into heads and inner units are cut by their outputs,
those that lead out of them by their inputs, the vocabulary by its tokens, and the cache by its heads. How sums over the
devices are rounded depends on their number, so the number belongs to the numerics class.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models_jax.config import ModelConfig
from models_jax.device import Device
from models_jax.generate import Weights
from models_jax.transformer import Decoder
from planner.errors import UserError

AXIS = "tensor"
BY_OUTPUTS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head")
BY_INPUTS = ("o_proj", "down_proj")


@dataclass(frozen=True)
class Placement:
    """One device, or a row of like devices that compute one model together."""

    devices: tuple[Device, ...]

    @property
    def spread(self) -> bool:
        """Whether there are several devices."""
        return len(self.devices) > 1

    @property
    def loading(self) -> Device:
        """Where weights are put as they are read: in the host's memory if no device holds all of them."""
        return jax.devices("cpu")[0] if self.spread else self.devices[0]

    @property
    def whole(self) -> Any:
        """For arrays that every device has. For `jax.device_put`, as are the others."""
        return self._named() if self.spread else self.devices[0]

    @property
    def cache(self) -> Any:
        """For keys and values (batch, kv_heads, slots, head_dim)."""
        return self._named(None, AXIS) if self.spread else self.devices[0]

    def weights(self, model: Decoder) -> Weights:
        """The parameters of a loaded model where they belong, in the order of `generate.weights_of`."""
        if not self.spread:
            return tuple(jax.tree.leaves(nnx.state(model)))
        state = nnx.to_flat_state(nnx.state(model))
        placed = [
            (path, leaf.replace(jax.device_put(leaf[...], self._weight(path, leaf.shape, leaf.dtype))))
            for path, leaf in state
        ]
        return tuple(jax.tree.leaves(nnx.from_flat_state(placed)))

    def check(self, config: ModelConfig, name: str) -> None:
        """Raise UserError if the model of role `name` cannot be cut into so many parts."""
        count = len(self.devices)
        for key in ("num_attention_heads", "num_key_value_heads", "intermediate_size"):
            if getattr(config, key) % count:
                raise UserError(
                    f"role {name!r} cannot be spread over {count} devices: its {key} is {getattr(config, key)}",
                    mend="set numerics.tensor_parallel to a number that divides it",
                )

    def _named(self, *axes: str | None) -> NamedSharding:
        return NamedSharding(Mesh(np.array(self.devices), (AXIS,)), PartitionSpec(*axes))

    def _weight(self, path: Sequence[Any], shape: tuple[int, ...], dtype: Any) -> NamedSharding:
        """Kernels are (inputs, outputs), or (outputs, inputs) in int8.

        Biases and scales are (outputs,), the embedding is (tokens, hidden).
        """
        module, kind = (str(part) for part in path[-2:])
        if kind in ("embedding", "scale") and module == "embed_tokens":
            axes = (AXIS, None)[: len(shape)]
        elif module in BY_OUTPUTS:
            axes = (None, AXIS)[-len(shape) :]
        elif module in BY_INPUTS and kind == "kernel":
            axes = (AXIS, None)
        else:
            axes = ()
        if kind == "kernel" and dtype == np.int8:
            axes = axes[::-1]
        even = all(axis is None or size % len(self.devices) == 0 for axis, size in zip(axes, shape, strict=False))
        return self._named(*axes) if even else self._named()
