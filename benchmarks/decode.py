"""Writing and reading tokens against transformers with torch, and against the memory's limit, in one run.

    HETEROREASON_SMOLLM2=SmolLM2-135M-Instruct.Q4_1.gguf python benchmarks/decode.py

All contenders take turns, so that whatever else the computer does slows all of them. A ratio is the median over the
turns of ours over the better of torch's two dtypes in the same turn. The limit is the time to read the weights once,
at the rate at which torch sums an array of that size in the same turn. Greedy, one sequence; torch runs its plain
forward pass with a cache, which is faster than `generate`.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM

from models_jax.device import choose_devices
from models_jax.float_runner import FloatRunner
from models_jax.loading import load_checkpoint, save_checkpoint
from models_jax.placement import Placement
from planner.checkpoint import model_folder
from planner.runtime.backend import Work
from planner.workflow import Numerics, Role, WeightKind

clock = time.perf_counter
"""Replaced by the process's own time for `--cpu-time`: on one core that does not see what else the computer does."""
PROMPT, WRITTEN = 128, 32
"""Tokens that are read, and then written."""
CLASSES = {
    "float32, block of 8": Numerics(row_block=8, cache_tokens=256),
    "float32, block of 2": Numerics(row_block=2, cache_tokens=256),
    "float32, int8 weights, block of 1": Numerics(row_block=1, cache_tokens=256, weights=WeightKind.INT8),
}


@dataclass
class Contender:
    """Something that reads and writes. Both give seconds."""

    name: str
    bytes: int
    ready: float
    """Seconds to load it, and for ours to compile and prove it."""
    read: Callable[[], float]
    write: Callable[[], float]


def tokens(vocab_size: int) -> tuple[int, ...]:
    """A prompt that means nothing."""
    return tuple(2 + i * 7919 % (vocab_size - 3) for i in range(PROMPT))


def ours(name: str, folder: Path, numerics: Numerics) -> Contender:
    """A role as it runs."""
    start = time.perf_counter()
    runner = FloatRunner(
        "target", Role(str(folder), numerics), folder, "\n", Placement(choose_devices({"platform": "cpu"}))
    )
    ready = time.perf_counter() - start
    prompt = tokens(runner.config.known_tokens or runner.config.vocab_size)

    def read() -> float:
        start = clock()
        runner.run(Work("target", "0", 0, prompt))
        return clock() - start

    def write() -> float:
        """Over the ends of steps: each chunk begins where the last one stopped."""
        start, length, calls = clock(), PROMPT, 0
        while length < PROMPT + WRITTEN:
            length += len(runner.run(Work("target", "0", length, (), PROMPT + WRITTEN - length)).tokens)
            calls += 1
        return clock() - start

    blocks = "+".join(map(str, runner._blocks))
    return Contender(f"ours, {name} (reads {blocks})", runner.info.weight_bytes, ready, read, write)


def torchs(folder: Path, dtype: torch.dtype) -> Contender:
    """transformers' model of the same weights."""
    start = time.perf_counter()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    ready = time.perf_counter() - start
    prompt = torch.tensor([tokens(model.config.vocab_size)])
    state: dict[str, object] = {}

    @torch.no_grad()
    def read() -> float:
        start = clock()
        out = model(prompt, use_cache=True, logits_to_keep=1)
        state["past"], state["next"] = out.past_key_values, out.logits[:, -1:].argmax(-1)
        return clock() - start

    @torch.no_grad()
    def write() -> float:
        start = clock()
        for _ in range(WRITTEN):
            out = model(state["next"], past_key_values=state["past"], use_cache=True)
            state["past"], state["next"] = out.past_key_values, out.logits[:, -1:].argmax(-1)
        return clock() - start

    size = sum(p.numel() * p.element_size() for p in model.parameters())
    return Contender(f"torch {str(dtype).removeprefix('torch.')}", size, ready, read, write)


def in_safetensors(folder: Path, scratch: Path) -> Path:
    """The folder itself, or a copy with float32 weights of one that links to a GGUF file, so that all load alike."""
    if not (folder / "model.gguf").exists():
        return folder
    save_checkpoint(scratch, *load_checkpoint(folder))
    for path in folder.iterdir():
        if path.name not in ("model.gguf", "config.json"):
            shutil.copy(path, scratch)
    return scratch


def bytes_a_second(array: torch.Tensor) -> float:
    """The rate at which the memory is read."""
    start = clock()
    array.sum()
    return array.numel() * array.element_size() / (clock() - start)


def measure(contenders: list[Contender], turns: int) -> tuple[dict[str, list[tuple[float, float]]], list[float]]:
    """(reading, writing) in seconds of each contender and turn, and the memory's rate in each turn."""
    array = torch.ones(max(c.bytes for c in contenders) // 4)
    times: dict[str, list[tuple[float, float]]] = {c.name: [] for c in contenders}
    rates = []
    for turn in range(turns + 1):
        found = max(bytes_a_second(array) for _ in range(3))
        for contender in contenders:
            pair = contender.read(), contender.write()
            if turn:  # the first warms up
                times[contender.name].append(pair)
        if turn:
            rates.append(found)
    return times, rates


def show(
    title: str, contenders: list[Contender], times: dict[str, list[tuple[float, float]]], rates: list[float]
) -> None:
    """One table, as Markdown would have it."""
    table = Table(title=title, title_justify="left")
    columns = ("", "MB", "ready s", "reads tok/s", "x torch", "writes tok/s", "x torch", "share of memory limit")
    for column in columns:
        table.add_column(column)
    best = [
        [min(times[c.name][t][k] for c in contenders if c.name.startswith("torch")) for t in range(len(rates))]
        for k in (0, 1)
    ]
    for c in contenders:
        row = [c.name, f"{c.bytes / 1e6:.1f}", f"{c.ready:.0f}"]
        for k, count in ((0, PROMPT), (1, WRITTEN)):
            own = [pair[k] for pair in times[c.name]]
            row.append(f"{count / statistics.median(own):.0f}")
            row.append(f"{statistics.median(b / o for b, o in zip(best[k], own, strict=True)):.2f}")
        limits = [c.bytes / rate * WRITTEN / pair[1] for rate, pair in zip(rates, times[c.name], strict=True)]
        table.add_row(*row, f"{statistics.median(limits):.0%}")
    Console(width=150).print(table, f"memory: {statistics.median(rates) / 1e9:.1f} GB/s, {len(rates)} turns")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--classes", nargs="*", default=list(CLASSES))
    parser.add_argument("--skip-shipped", action="store_true")
    parser.add_argument("--cpu-time", action="store_true", help="for one thread each: see the notes on the clock")
    arguments = parser.parse_args()
    if arguments.cpu_time:
        globals()["clock"] = time.process_time
        torch.set_num_threads(1)
    models = {} if arguments.skip_shipped else {"the shipped target": "zoo/target"}
    if gguf := os.environ.get("HETEROREASON_SMOLLM2"):
        models["SmolLM2-135M-Instruct"] = gguf
    for title, model in models.items():
        with TemporaryDirectory() as scratch:
            folder = in_safetensors(model_folder(model), Path(scratch))
            contenders = [torchs(folder, dtype) for dtype in (torch.float32, torch.bfloat16)]
            contenders += [ours(name, folder, CLASSES[name]) for name in arguments.classes]
        show(title, contenders, *measure(contenders, arguments.turns))


if __name__ == "__main__":
    main()
