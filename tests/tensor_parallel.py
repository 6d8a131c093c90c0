"""Run by test_tensor_parallel.py in a process that sees several devices: `python tensor_parallel.py COUNT FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path

import backend_contract as contract
import jax
import numpy as np
import tiny_models

from models_jax.backend import JaxBackend
from planner.workflow import Numerics, Role, Speculate, WeightKind

COMPILED = []
TEXT = "12 + 30 = 42\n4 2 = 6"


def subject(name, folder, count, speculate=None, weights=WeightKind.SAME):
    role = Role(str(folder), Numerics(cache_tokens=96, weights=weights, tensor_parallel=count), speculate)
    listed = ",".join(map(str, range(count)))
    return contract.Subject(lambda: JaxBackend({"devices": listed}), name, role, "\n", TEXT, "x 1")


def cache_of(s, sequence):
    return s.backend._runner(s.name)._caches.peek(sequence)


def values(s, sequence, length):
    cache = cache_of(s, sequence)
    return [np.asarray(part)[:, :, :length] for part in (*cache.k, *cache.v)]


def check(count: int, folder: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 18}
    tiny_models.write(folder / "writer", tiny_models.config("qwen2", **heads))
    tiny_models.write(folder / "scorer", tiny_models.config("qwen3", reward=True, **heads))
    one, several = (subject("target", folder / "writer", n) for n in (1, count))

    runner = several.backend._runner("target")
    whole = sum(w.nbytes for w in runner._weights)
    here = [
        sum(s.data.nbytes for w in runner._weights for s in w.addressable_shards if s.device == d)
        for d in jax.devices()[:count]
    ]
    assert max(here) < 0.75 * whole and min(here) > 0, (here, whole)

    for s in (one, several):
        s.run("a", 0, s.prompt)
    for a, b in zip(*(values(s, "a", len(one.prompt)) for s in (one, several)), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    rounded = [subject("target", folder / "writer", n, weights=WeightKind.INT8) for n in (1, count)]
    for s in rounded:
        s.run("a", 0, s.prompt)
    for a, b in zip(*(values(s, "a", len(one.prompt)) for s in rounded), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-5)
    shards = cache_of(several, "a").k[0].addressable_shards
    assert {s.data.shape[1] for s in shards} == {4 // count}, "the cache is cut by its heads"

    before = len(COMPILED)
    for check in (contract.chunks_do_not_matter, contract.pieces_of_the_feed_do_not_matter,
                  contract.fed_tokens_count_as_generated_ones, contract.rewound_sequence_goes_on_as_before,
                  contract.steps_end_alike_in_chunks, contract.fork_is_a_copy):  # fmt: skip
        check(several)
    assert len(COMPILED) == before, COMPILED[before:]

    helped = subject("target", folder / "writer", count, Speculate(str(folder / "writer"), 3))
    for more in ({}, contract.SAMPLED):
        assert helped.write("x", 40, **more) == several.write("x", 40, **more)
    drafter = helped.backend._runner("target")._drafter
    assert drafter.passes < drafter.written

    scores = []
    for n in (1, count):
        s = subject("prm", folder / "scorer", n)
        contract.scores_do_not_depend_on_the_cut(s)
        scores.append(s.run("b", 0, s.prompt, score=tuple(range(len(s.prompt)))).scores)
    np.testing.assert_allclose(*scores, atol=1e-5)


if __name__ == "__main__":
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: COMPILED.append(event) if "backend_compile" in event else None
    )
    check(int(sys.argv[1]), Path(sys.argv[2]))
    print("all is well")
