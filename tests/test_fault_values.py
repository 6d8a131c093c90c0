"""What counts as a fault, and what a machine is after one."""

from __future__ import annotations

from dataclasses import replace

from planner_cases import THREE, LinearCosts

from planner.runtime.backend import Handed, Output, Sibling, Work
from planner.runtime.faults import DeviceFault, Fault, FaultKind, fault_of, with_device, without, wrong_output
from planner.runtime.worker import Patience, modelled


def test_what_an_output_may_be() -> None:
    write, read, score = (
        Work("draft", "0", 0, (1,), 4),
        Work("draft", "0", 0, (1,)),
        Work("prm", "0", 0, (1,), score=(0,)),
    )
    assert wrong_output(write, Output((0, 1, 2, 3)), 8) is None and wrong_output(write, Output((0,)), 8) is None
    assert wrong_output(read, Output(), 8) is None
    assert (
        wrong_output(score, Output(scores=(0.0,)), 8) is None and wrong_output(score, Output(scores=(1.0,)), 8) is None
    )
    for work in (write, read, score):
        for output in (Output((0,) * 5), Output(scores=(0.5, 0.5)), Output((0,), scores=(0.5,))):
            assert wrong_output(work, output, 8) is not None


def test_a_cache_on_its_way_is_that_of_what_was_read() -> None:
    work = Work("draft", "0", 0, (4, 5, 6), hand_over=True)
    assert wrong_output(work, Output(handed=Handed((4, 5, 6), b"8 bytes." * 3)), 8) is None
    for handed in (
        None,
        Handed((4, 5), b"8 bytes." * 2),
        Handed((4, 5, 6), b"8 bytes." * 2),
        Handed((4, 5, 7), b"8 bytes." * 3),
    ):
        found = wrong_output(work, Output(handed=handed), 8)
        assert found is not None and found.kind is FaultKind.BAD_OUTPUT


def test_exceptions_are_faults() -> None:
    assert fault_of(MemoryError()).kind is FaultKind.MEMORY
    assert fault_of(RuntimeError("RESOURCE_EXHAUSTED: 3 GB")).kind is FaultKind.MEMORY
    assert fault_of(ValueError("a\nb")).what == "ValueError: a b"
    died = Fault(FaultKind.DIED, "its process ended with exit code -9")
    assert fault_of(DeviceFault(died)) is died


def test_a_machine_loses_a_device_and_has_it_again() -> None:
    less = without(THREE, "b")
    assert [d.name for d in less.devices] == ["a", "c"]
    assert all("b" not in (link.a, link.b) for link in less.links)
    assert with_device(less, "b", THREE) == THREE
    assert with_device(without(less, "a"), "b", THREE) == without(THREE, "a")


def test_patience_follows_the_cost_model_above_a_floor() -> None:
    work = Work("draft", "0", 0, (1,) * 10, 100)
    assert Patience().limit_us("a", work) == 300_000_000
    calm = Patience(modelled(LinearCosts(otherwise_us=10)), factor=3, least_us=1000)
    assert calm.limit_us("a", work) == 3 * (10 + 1000)
    assert calm.limit_us("a", replace(work, max_new=1)) == 1000


def test_drafts_that_are_written_together_are_each_looked_at() -> None:
    work = Work("draft", "0", 0, (1,), 4, beside=(Sibling(7, (), 4), Sibling(8, (5, 6), 2)))
    one = Output((2, 3))
    assert wrong_output(work, Output((2,), beside=(one, one)), 8) is None
    for beside in ((), (one,), (one, one, one), (one, Output()), (one, Output((1, 2, 3))), (Output((-1,)), one)):
        found = wrong_output(work, Output((2,), beside=beside), 8)
        assert found is not None and found.kind is FaultKind.BAD_OUTPUT
