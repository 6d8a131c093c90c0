"""From a float checkpoint and calibration sequences to a file of the integer model.

    python -m models_jax.integer.quantise FOLDER --calibration tokens.jsonl

Each line of the calibration file is a JSON array of token ids. The file is written to FOLDER/integer.safetensors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from models_jax.integer import ops
from models_jax.integer.checkpoint import Checkpoint, Floats, angles
from models_jax.integer.files import (
    FILE_NAME,
    MAX_CONTEXT,
    MAX_EXPONENT,
    VERSIONS,
    IntegerModel,
    Shape,
    headroom,
    read,
    write,
)
from models_jax.integer.reference import LOGIT_BITS
from models_jax.integer.scales import (
    QuantisedLinear,
    Tensors,
    gains,
    int8,
    pair_scales,
    quantise_linear,
    requantisers,
    scalar,
)
from planner.errors import UserError

DESCRIPTION = "Make the integer model of a float checkpoint."
STREAM_MARGIN = 1.5
"""Room in the residual stream above the largest value seen."""
ALL = slice(None)
MOST_ROWS = 4096
"""Tokens that scales are chosen from, drawn evenly from the calibration sequences."""

Sequences = Sequence[NDArray[np.integer]]


def quantise(model: Checkpoint, sequences: Sequences, weight_bits: int = 8) -> tuple[Shape, Tensors]:
    """Shape and tensors of the integer model, its scales chosen from the activations of `sequences`."""
    seen = activations(model, sequences)
    shape = shape_of(model, weight_bits)
    stream = float(np.abs(seen["stream"]).max()) * STREAM_MARGIN / 32767
    tensors: Tensors = {}
    quantise_ends(model, seen, stream, tensors)
    for i in range(shape.num_hidden_layers):
        quantise_attention(model, seen, stream, f"layers.{i}", weight_bits, tensors)
        quantise_mlp(model, seen, stream, f"layers.{i}", weight_bits, tensors)
    return shape, tensors


def shape_of(model: Checkpoint, weight_bits: int) -> Shape:
    """The integer model's shape; the context is cut to what integer models can hold."""
    c = model.config
    return Shape(
        c.vocab_size,
        c.hidden_size,
        c.intermediate_size,
        c.num_hidden_layers,
        c.num_attention_heads,
        c.num_key_value_heads,
        c.head_dim,
        min(c.max_position_embeddings, MAX_CONTEXT),
        c.tie_word_embeddings,
        weight_bits,
    )


def activations(model: Checkpoint, sequences: Sequences) -> dict[str, Floats]:
    """Every recorded intermediate result over the calibration tokens, at most MOST_ROWS rows of each."""
    found: dict[str, list[Floats]] = {}
    check_tokens(sequences, model.config.vocab_size)
    for tokens in sequences:
        if len(tokens):
            model(tokens, lambda name, value: found.setdefault(name, []).append(value))
    if not found:
        raise UserError("no calibration tokens", mend="give sequences that the model would read and write")
    joined = {name: np.concatenate(values) for name, values in found.items()}
    return {name: x if name == "stream" else thin(x) for name, x in joined.items()}


def check_tokens(sequences: Sequences, vocab_size: int) -> None:
    """Raise UserError for a token that the model does not know."""
    for number, tokens in enumerate(sequences, 1):
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < vocab_size:
            raise UserError(
                f"calibration sequence {number} spans tokens {tokens.min()} .. {tokens.max()}, "
                f"the model knows 0 .. {vocab_size - 1}",
                mend="use token ids of this model's tokenizer",
            )


def thin(x: Floats) -> Floats:
    """At most MOST_ROWS rows, evenly spaced; the rows of the extremes of every channel stay."""
    if len(x) <= MOST_ROWS:
        return x
    even = np.linspace(0, len(x) - 1, MOST_ROWS).astype(np.int64)
    return x[np.union1d(even, np.abs(x).argmax(axis=0))]


def quantise_ends(model: Checkpoint, seen: dict[str, Floats], stream: float, out: Tensors) -> None:
    """Embedding, last norm, vocabulary head and RoPE."""
    c, w = model.config, model.weights
    embed_scale = np.maximum(np.abs(w["embed"]).max(axis=1), 1e-9) / 127
    embed = int8(w["embed"] / embed_scale[:, None])
    out["embed.weight"] = embed.astype(np.int8)
    out["embed.multiplier"], out["embed.shift"] = requantisers(embed_scale / stream, headroom(1), "the embedding")
    if c.tie_word_embeddings:
        input_scale = np.full(c.hidden_size, best_input_scale(seen["norm"], w["embed"], embed, embed_scale))
        scales = embed_scale * input_scale[0]
    else:
        head = quantise_linear(w["head"], seen["norm"])
        out["head.weight"], scales, input_scale = head.weight, head.output_scale, head.input_scale
    free = headroom(c.hidden_size)
    out["head.multiplier"], out["head.shift"] = requantisers(scales * (1 << LOGIT_BITS), free, "the logits")
    quantise_norm(model, "norm", input_scale, stream, out)
    angle = angles(c, min(c.max_position_embeddings, MAX_CONTEXT))
    for name, function in (("cosine", np.cos), ("sine", np.sin)):
        out[f"rope.{name}"] = np.floor(function(angle) * (1 << ops.ROPE_BITS) + 0.5).astype(np.int16)


def best_input_scale(x: Floats, weight: Floats, rows: Floats, scales: Floats) -> float:
    """The scale of the last norm's int8 output that gives the best logits with the embedding's int8 rows."""
    wanted, largest = x @ weight.T, float(np.abs(x).max()) / 127
    tried = [largest * clip for clip in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5)]

    def loss(scale: float) -> float:
        taken = int8(x / scale) * scale
        return float(np.mean((taken @ (rows * scales[:, None]).T - wanted) ** 2))

    return min(tried, key=loss)


def quantise_norm(model: Checkpoint, name: str, input_scale: Floats, stream: float, out: Tensors) -> None:
    """A norm whose int8 output has this scale for each channel."""
    c = model.config
    gain = np.sqrt(c.hidden_size) * model.weights[name] / input_scale / (1 << 15)
    out[f"{name}.gain"], out[f"{name}.shift"] = gains(gain, 30)
    epsilon = c.rms_norm_eps * c.hidden_size / stream**2
    out[f"{name}.epsilon"] = scalar(int(np.clip(np.floor(epsilon + 0.5), 4, 2**31 - 1)))


def put_linear(out: Tensors, name: str, layer: QuantisedLinear, rows: slice, ratio: Floats) -> None:
    """Rows of a quantised layer as a layer of its own, whose sums are multiplied by `ratio`."""
    weight = out[f"{name}.weight"] = layer.weight[rows]
    if layer.group_scale is not None:
        out[f"{name}.scale"] = layer.group_scale[rows]
    free = headroom(weight.shape[1], 8 if layer.group_scale is None else 4)
    spare = MAX_EXPONENT if name.endswith("down") else 0
    out[f"{name}.multiplier"], out[f"{name}.shift"] = requantisers(ratio, free, name, spare)


def quantise_attention(
    model: Checkpoint, seen: dict[str, Floats], stream: float, name: str, bits: int, out: Tensors
) -> None:
    """Norm, projections, softmax and mean of one layer."""
    c, w = model.config, model.weights
    heads, dim = c.num_key_value_heads, c.head_dim
    group = c.num_attention_heads // heads
    weights = np.concatenate([w[f"{name}.{part}"] for part in "qkv"])
    joined = quantise_linear(weights, seen[f"{name}.attention_norm"], bits)
    quantise_norm(model, f"{name}.attention_norm", joined.input_scale, stream, out)
    q = seen[f"{name}.q"].reshape(-1, heads, group, 2, dim // 2)
    k = seen[f"{name}.k"].reshape(-1, heads, 2, dim // 2)
    q_scale, k_scale, product = pair_scales(q, k)
    v_scale = np.maximum(np.abs(seen[f"{name}.v"]).max(axis=0), 1e-9) / 127
    units = {
        "q": np.repeat(np.tile(q_scale, 2), group, axis=0).reshape(-1) / (1 << ops.ROTATED_BITS),
        "k": np.tile(k_scale, 2).reshape(-1) / (1 << ops.ROTATED_BITS),
        "v": v_scale,
    }
    start = 0
    for part, unit in units.items():
        rows = slice(start, start := start + unit.size)
        put_linear(out, f"{name}.{part}", joined, rows, joined.output_scale[rows] / unit)
    octaves = product / np.sqrt(dim) * np.log2(np.e) * (1 << ops.DISTANCE_BITS)
    softmax = requantisers(np.asarray(octaves), headroom(2 * dim), f"{name}.softmax")
    out[f"{name}.softmax.multiplier"], out[f"{name}.softmax.shift"] = map(np.asarray, softmax)
    o = quantise_linear(w[f"{name}.o"], seen[f"{name}.mean"], bits)
    per_query = np.repeat(v_scale.reshape(heads, dim), group, axis=0).reshape(-1)
    out[f"{name}.mean.gain"], out[f"{name}.mean.shift"] = gains(per_query / o.input_scale / (1 << ops.VALUE_BITS), 30)
    put_linear(out, f"{name}.o", o, ALL, o.output_scale / stream)


def quantise_mlp(model: Checkpoint, seen: dict[str, Floats], stream: float, name: str, bits: int, out: Tensors) -> None:
    """Norm, gate, up and down of one layer."""
    w = model.weights
    inner = model.config.intermediate_size
    joined = quantise_linear(np.concatenate([w[f"{name}.gate"], w[f"{name}.up"]]), seen[f"{name}.mlp_norm"], bits)
    quantise_norm(model, f"{name}.mlp_norm", joined.input_scale, stream, out)
    gate, up = joined.output_scale[:inner], joined.output_scale[inner:]
    put_linear(out, f"{name}.gate", joined, slice(inner), gate * (1 << ops.GATE_BITS))
    down = quantise_linear(w[f"{name}.down"], seen[f"{name}.product"], bits, exponent=True)
    # up16 = up / up_unit / 2^-shift; the largest seen fills half of int16.
    unit = down.input_scale * (1 << ops.GATE_BITS)
    largest = float((np.abs(seen[f"{name}.up"]).max(axis=0) / unit).max())
    shift = int(np.clip(np.floor(np.log2(16383 / max(largest, 1e-9))), 1, 30))
    out[f"{name}.gated.shift"] = scalar(shift)
    put_linear(out, f"{name}.up", joined, slice(inner, None), up / unit * 2.0**shift)
    put_linear(out, f"{name}.down", down, ALL, down.output_scale / stream)


@dataclass(frozen=True)
class Agreement:
    """How near the integer model is to the float model on some sequences."""

    tokens: int
    argmax: float
    """Share of positions where both choose the same token."""
    logit_error: float
    """Root mean square difference of logits, after the mean of each position is taken off."""
    logit_spread: float
    """Root mean square of the float logits, taken the same way."""

    def __str__(self) -> str:
        """One line."""
        return (
            f"{self.tokens} tokens: argmax agrees {100 * self.argmax:.2f} %, "
            f"logits differ by {self.logit_error:.4f} (spread {self.logit_spread:.3f})"
        )


def agreement(model: Checkpoint, integer: IntegerModel, sequences: Sequences) -> Agreement:
    """Compare on whole sequences, as they stand."""
    from models_jax.integer.decode import sequence_logits

    same = tokens = 0
    error = spread = 0.0
    for sequence in sequences:
        wanted, got = model(sequence), sequence_logits(integer, sequence) / (1 << LOGIT_BITS)
        same += int((wanted.argmax(-1) == got.argmax(-1)).sum())
        tokens += len(sequence)
        wanted, got = (x - x.mean(-1, keepdims=True) for x in (wanted, got))
        error += float(((wanted - got) ** 2).mean(-1).sum())
        spread += float((wanted**2).mean(-1).sum())
    return Agreement(tokens, same / tokens, float(np.sqrt(error / tokens)), float(np.sqrt(spread / tokens)))


def quantise_folder(folder: Path, sequences: Sequences, to: Path | None = None, weight_bits: int = 8) -> Path:
    """Quantise the checkpoint in `folder` and write its integer model beside it, or to `to`."""
    path = to or folder / FILE_NAME
    write(path, *quantise(Checkpoint.read(folder), sequences, weight_bits))
    return path


def read_calibration(path: Path) -> list[NDArray[np.integer]]:
    """Sequences of token ids, one JSON array a line."""
    sequences = []
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as bad:
        raise UserError(f"cannot be read ({bad})", where=str(path), mend="name a file of JSON lines") from None
    for number, line in enumerate(lines, 1):
        try:
            tokens = np.array(json.loads(line))
        except ValueError:
            tokens = np.array("")
        if tokens.ndim != 1 or tokens.dtype.kind != "i":
            raise UserError("not a JSON array of token ids", where=f"{path}:{number}", mend="write it as [1, 2, 3]")
        sequences.append(tokens)
    return sequences


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    import argparse
    import sys

    parser = argparse.ArgumentParser(prog="python -m models_jax.integer.quantise", description=DESCRIPTION)
    parser.add_argument("folder", type=Path, help="checkpoint in Hugging Face layout")
    parser.add_argument("--calibration", type=Path, required=True, help="JSON lines of token id arrays")
    parser.add_argument("-o", "--output", type=Path, help=f"file to write (default: FOLDER/{FILE_NAME})")
    parser.add_argument("--weight-bits", type=int, choices=VERSIONS, default=8, help="of the linear layers")
    chosen = parser.parse_args(arguments)
    try:
        sequences = read_calibration(chosen.calibration)
        held_out = sequences[9::10]
        used = [tokens for i, tokens in enumerate(sequences) if i % 10 != 9]
        path = quantise_folder(chosen.folder, used, chosen.output, chosen.weight_bits)
        model, integer = Checkpoint.read(chosen.folder), read(path)
        print(f"wrote {path} ({path.stat().st_size} bytes)")
        print(f"calibration: {agreement(model, integer, used)}")
        if held_out:
            print(f"held out:    {agreement(model, integer, held_out)}")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
