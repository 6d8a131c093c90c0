"""Machine files: units, the catalogue, transfers, and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner import units
from planner.errors import UserError
from planner.machine import Device, DeviceKind, Machine, Transport, catalogue, transfer_us
from planner.workflow import Arithmetic, Numerics

GPU = {
    "name": "gpu0",
    "kind": "gpu",
    "backend": "jax",
    "processor": "RTX 3090",
    "memory_bytes": "24 GiB",
    "bandwidth_bytes_per_s": "936 GB/s",
    "ops_per_s": {"float32": "35.6 TFLOP/s", "int8": 284e12},
    "active_w": "350 W",
    "idle_w": 25,
    "source": "data sheet",
}
FPGA = GPU | {"name": "fpga0", "kind": "fpga", "backend": "fpga", "transport": "emulate", "processor": "Alveo U280"}
FPGA |= {"ops_per_s": {"int8": "3.6 TOP/s"}}
LINK = {"a": "gpu0", "b": "fpga0", "bandwidth_bytes_per_s": "16 GB/s", "latency_us": "60 us", "source": "data sheet"}
MACHINE = {"name": "m", "source": "data sheets", "devices": [GPU, FPGA], "links": [LINK]}


def test_the_catalogue() -> None:
    names = "1x3090 2x3090 3x3090 a100 h100 kv260-core-l4 kv260-l4 this-computer this-computer-rtl u280-2x3090"
    names += " u280-core-l4 v80-2x3090 zcu104-core-l4"
    assert catalogue() == names.split()


@pytest.mark.parametrize("name", catalogue())
def test_each_machine_of_the_catalogue(name: str) -> None:
    machine = Machine.load(name)
    assert machine.name == name
    assert machine.description
    assert Machine.from_mapping(machine.to_mapping(), "again") == machine
    assert Machine.from_mapping(machine.to_mapping(), "again").hash == machine.hash
    transport = Transport.RTL if name.endswith("-rtl") else Transport.EMULATE
    assert all(d.transport == transport for d in machine.devices if d.kind == DeviceKind.FPGA)
    for arithmetic in (Arithmetic.INT8, Arithmetic.FLOAT32):
        assert machine.candidates(Numerics(arithmetic))


def test_this_computer_is_two_pinned_cores() -> None:
    assert [(d.kind, d.backend, d.core) for d in Machine.load("this-computer").devices] == [
        ("cpu", "jax", 0),
        ("cpu", "jax", 1),
    ]


def test_a_path_or_a_name(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        Machine.load("3x309")
    assert str(error.value) == "machine 3x309: is neither in the catalogue nor a file; did you mean 3x3090?"
    with pytest.raises(UserError, match="use one of 1x3090, 2x3090, "):
        Machine.load("zzz")
    with pytest.raises(UserError, match=r"none.yaml: there is no such file"):
        Machine.load(tmp_path / "none.yaml")
    with pytest.raises(UserError, match=r"^none.yaml: there is no such file"):
        Machine.load("none.yaml")
    path = tmp_path / "mine.yaml"
    path.write_text("name: mine\n")
    with pytest.raises(UserError, match=rf"{path}: devices is missing; add it"):
        Machine.load(str(path))


def test_units_become_base_units() -> None:
    gpu = Machine.from_mapping(MACHINE, "m.yaml").device("gpu0")
    assert gpu.memory_bytes == 24 * 2**30
    assert gpu.bandwidth_bytes_per_s == 936e9
    assert gpu.ops_per_s == {Arithmetic.FLOAT32: 35.6e12, Arithmetic.INT8: 284e12}
    assert (gpu.active_w, gpu.idle_w) == (350, 25)


@pytest.mark.parametrize(
    ("text", "table", "number"),
    [
        ("24 GiB", units.BYTES, 24 * 2**30),
        ("1.5kB", units.BYTES, 1500),
        ("1e3 B/s", units.BYTES_PER_S, 1000),
        ("2 TOP/s", units.OPS_PER_S, 2e12),
        ("2 PFLOP/s", units.OPS_PER_S, 2e15),
        (" 5 us ", units.MICROSECONDS, 5),
        ("2 ms", units.MICROSECONDS, 2000),
        ("250 ns", units.MICROSECONDS, 0.25),
        ("250 mW", units.WATTS, 0.25),
    ],
)
def test_quantities(text: str, table: dict[str, float], number: float) -> None:
    assert units.quantity(text, table, "x") == pytest.approx(number)


@pytest.mark.parametrize(
    "text", ["", "GB", "24", "24 GB x", "x GB", "nan GB", "inf GB", "1e999 GB", "24 gb", "24 W", "1 2 GB"]
)
def test_quantities_that_are_none(text: str) -> None:
    with pytest.raises(ValueError, match=r"such as 24 GiB|as in 24 GiB"):
        units.quantity(text, units.BYTES, "24 GiB")


@settings(deadline=None)
@given(st.integers(0, 10**15), st.sampled_from(list(units.BYTES)))
def test_whole_quantities_are_exact_to_a_float(number: int, unit: str) -> None:
    assert units.quantity(f"{number} {unit}", units.BYTES, "x") == float(number) * units.BYTES[unit]


def gpu(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    """An edit that sets a key of the GPU, or takes it out if the value is `...`."""

    def edit(raw: dict[str, Any]) -> None:
        if value is ...:
            del raw["devices"][0][key]
        else:
            raw["devices"][0][key] = value

    return edit


def fpga(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["devices"][1].update({key: value})


def link(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw["links"][0].update({key: value})


def top(key: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda raw: raw.update({key: value})


ABOVE_ZERO = "use a number above 0"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (top("name", ""), 'name is ""; use one line of 1 to 80 characters'),
        (top("source", " "), 'source is " "; say where the figures come from'),
        (top("devices", []), "devices is []; describe at least one device"),
        (top("devices", [GPU, GPU]), 'devices[1].name is "gpu0"; give each device its own name'),
        (top("devcies", []), "devcies is not a known key; did you mean devices?"),
        (top("links", []), "links has no way from gpu0 to fpga0; add a link between them, or one from each to host"),
        (top("links", [LINK | {"b": "host"}]), "links has no way from gpu0 to fpga0"),
        (top("links", [LINK, LINK | {"a": "fpga0", "b": "gpu0"}]), 'links[1] is "fpga0 to gpu0"; keep one link for ea'),
        (gpu("name", "host"), 'devices[0].name is "host"; use one line of 1 to 80 characters without +, and not host'),
        (gpu("name", " gpu0"), 'devices[0].name is " gpu0"; use one line'),
        (gpu("kind", "tpu"), 'devices[0].kind is "tpu"; use one of cpu, gpu, fpga'),
        (gpu("backend", ""), 'devices[0].backend is ""; name a backend, such as jax or fpga'),
        (gpu("source", ""), 'devices[0].source is ""; say where each figure comes from'),
        (gpu("source", ...), "devices[0].source is missing; add it"),
        (gpu("transport", "board"), 'devices[0].transport is "board"; leave it out: only an fpga has one'),
        (fpga("transport", None), "devices[1].transport is null; use one of emulate, rtl, board for an fpga"),
        (fpga("transport", "pcie"), 'devices[1].transport is "pcie"; use one of emulate, rtl, board'),
        (gpu("memory_bytes", 0), f"devices[0].memory_bytes is 0; {ABOVE_ZERO}"),
        (gpu("memory_bytes", "24"), 'devices[0].memory_bytes is "24"; use a number and a unit, such as 24 GiB'),
        (gpu("memory_bytes", "24 GiBi"), 'devices[0].memory_bytes is "24 GiBi"; use one of the units B, kB, MB,'),
        (gpu("memory_bytes", 2.5), "devices[0].memory_bytes is 2.5; use a whole number"),
        (gpu("memory_bytes", [1]), "devices[0].memory_bytes is [1]; use a whole number"),
        (gpu("bandwidth_bytes_per_s", -1), f"devices[0].bandwidth_bytes_per_s is -1.0; {ABOVE_ZERO}"),
        (
            gpu("bandwidth_bytes_per_s", "936 GB"),
            'devices[0].bandwidth_bytes_per_s is "936 GB"; use one of the units B/s',
        ),
        (gpu("bandwidth_bytes_per_s", float("inf")), "bandwidth_bytes_per_s is Infinity; use a finite number"),
        (gpu("ops_per_s", {}), "devices[0].ops_per_s is {}; name at least one of float32, bfloat16, int8"),
        (gpu("ops_per_s", {"int4": 1}), "devices[0].ops_per_s.int4 is not a known key; did you mean int8?"),
        (gpu("ops_per_s", {"int8": 0}), f"devices[0].ops_per_s.int8 is 0.0; {ABOVE_ZERO}"),
        (gpu("ops_per_s", {"int8": "1 TB/s"}), 'devices[0].ops_per_s.int8 is "1 TB/s"; use one of the units OP/s'),
        (gpu("memory_efficiency", 0), "devices[0].memory_efficiency is 0.0; use a number above 0, at most 1"),
        (gpu("compute_efficiency", 1.2), "devices[0].compute_efficiency is 1.2; use a number above 0, at most 1"),
        (gpu("overhead_us", "-1 us"), "devices[0].overhead_us is -1.0; use a number from 0"),
        (gpu("per_token_overhead_us", -1), "devices[0].per_token_overhead_us is -1.0; use a number from 0"),
        (gpu("active_w", 0), f"devices[0].active_w is 0.0; {ABOVE_ZERO}"),
        (gpu("idle_w", 400), "devices[0].idle_w is 400.0; use at most active_w, which is 350"),
        (gpu("core", -1), "devices[0].core is -1; use the index of a CPU core, from 0"),
        (gpu("processor", ""), 'devices[0].processor is ""; use one line of 1 to 80 characters or leave it out'),
        (link("a", "gpu9"), 'links[0].a is "gpu9"; use one of gpu0, fpga0, host'),
        (link("b", "gpu0"), 'links[0].b is "gpu0"; name two different ends'),
        (link("bandwidth_bytes_per_s", 0), f"links[0].bandwidth_bytes_per_s is 0.0; {ABOVE_ZERO}"),
        (link("latency_us", -1), "links[0].latency_us is -1.0; use a number from 0"),
        (link("latency_us", "soon"), 'links[0].latency_us is "soon"; use a number and a unit, such as 5 us'),
        (link("source", ""), 'links[0].source is ""; say where the figures come from'),
    ],
)
def test_a_wrong_key_is_named_with_value_and_mend(edit: Callable[[dict[str, Any]], None], text: str) -> None:
    raw = copy.deepcopy(MACHINE)
    edit(raw)
    with pytest.raises(UserError) as error:
        Machine.from_mapping(raw, "m.yaml")
    said = str(error.value)
    assert said.startswith("m.yaml: ")
    assert text in said
    assert "\n" not in said


def with_processors(*names: str | None) -> Machine:
    devices = [GPU | {"name": f"gpu{i}", "processor": name} for i, name in enumerate(names)]
    links = [LINK | {"a": device["name"], "b": "host"} for device in devices]
    return Machine.from_mapping({"name": "m", "source": "s", "devices": devices, "links": links}, "m.yaml")


def test_a_device_provides_what_its_file_lists() -> None:
    machine = Machine.from_mapping(MACHINE, "m.yaml")
    assert machine.provides("gpu0", Numerics(Arithmetic.FLOAT32))
    assert machine.provides("gpu0", Numerics(Arithmetic.INT8))
    assert machine.provides("fpga0", Numerics(Arithmetic.INT8))
    assert not machine.provides("fpga0", Numerics(Arithmetic.FLOAT32))
    assert not machine.provides("gpu0", Numerics(Arithmetic.BFLOAT16))
    assert machine.provides("gpu0", Numerics(Arithmetic.FLOAT32, processor="RTX 3090"))
    assert not machine.provides("gpu0", Numerics(Arithmetic.FLOAT32, processor="L4"))
    assert machine.provides("fpga0", Numerics(Arithmetic.INT8, processor="L4")), "integers are the same everywhere"
    with pytest.raises(UserError, match="there is no device gpu1; did you mean gpu0"):
        machine.provides("gpu1", Numerics())


def test_a_float_role_has_one_kind_of_processor() -> None:
    def names(machine: Machine, numerics: Numerics) -> list[str]:
        return [device.name for device in machine.candidates(numerics)]

    same, mixed = with_processors("L4", "L4"), with_processors("L4", None)
    assert names(same, Numerics()) == ["gpu0", "gpu1"]
    assert names(mixed, Numerics(Arithmetic.INT8)) == ["gpu0", "gpu1"]
    assert names(mixed, Numerics(processor="L4")) == ["gpu0"]
    assert names(mixed, Numerics(processor="gpu")) == ["gpu1"]
    with pytest.raises(UserError, match=r"float32 is provided by L4 and gpu, .*; name one of them in .*processor"):
        mixed.candidates(Numerics())
    with pytest.raises(UserError, match=r"^machine m: no device provides float32 on H100; "):
        mixed.candidates(Numerics(processor="H100"))
    with pytest.raises(UserError, match=r"^machine m: no device provides bfloat16; "):
        mixed.candidates(Numerics(Arithmetic.BFLOAT16))


def test_transfers_go_over_the_link_or_the_host() -> None:
    machine = Machine.from_mapping(MACHINE, "m.yaml")
    assert transfer_us(machine, "gpu0", "gpu0", 10**9) == 0
    assert transfer_us(machine, "gpu0", "fpga0", 16 * 10**6) == 1060
    assert transfer_us(machine, "fpga0", "gpu0", 16 * 10**6) == 1060
    over_host = with_processors("L4", "L4")
    assert transfer_us(over_host, "gpu0", "gpu1", 16 * 10**6) == 2 * 1060
    apart = Machine("m", tuple(d for d in over_host.devices), "s")
    with pytest.raises(UserError, match="links has no way from gpu0 to gpu1; add a link"):
        transfer_us(apart, "gpu0", "gpu1", 1)


def test_the_hash_is_of_the_content() -> None:
    one = Machine.from_mapping(MACHINE, "a.yaml")
    plain = copy.deepcopy(MACHINE)
    plain["devices"][0]["memory_bytes"] = 24 * 2**30  # type: ignore[index]
    assert Machine.from_mapping(plain, "b.yaml").hash == one.hash
    plain["devices"][0]["idle_w"] = 26  # type: ignore[index]
    assert Machine.from_mapping(plain, "b.yaml").hash != one.hash


def test_a_device_is_easily_built_by_hand() -> None:
    device = Device("cpu0", DeviceKind.CPU, "jax", 10**9, 1e10, {Arithmetic.FLOAT32: 1e9}, 15, 3, "assumption")
    assert Machine("m", (device,), "assumption").provides("cpu0", Numerics())
