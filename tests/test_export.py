"""Exports: golden files, well-formed output for hostile names, and layouts without overlaps.

HETEROREASON_UPDATE_GOLDEN=1 writes the golden files anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from dataclasses import replace
from itertools import combinations, pairwise
from pathlib import Path

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import UserError
from planner.export import FORMATS, export, planned_and_happened, svg_trace
from planner.export.layout import Sizes, layered
from planner.export.order import pictured
from planner.export.svg_graph import graph_layout
from planner.export.text import clean, fitted, width, xml
from planner.export.timeline import episodes, happened, planned
from planner.graph import Edge, EdgeKind, Literal, Op, Task, TaskGraph, Verdict, from_text, to_text
from planner.lower import lower
from planner.machine import Device, DeviceKind, Link, Machine, Transport
from planner.passes import DraftAhead, PrefetchRefine, run_passes
from planner.plan import Plan
from planner.schedule.instance import Slot
from planner.trace import (
    Chunk,
    ClockKind,
    Decided,
    Event,
    Faulted,
    ProblemEnded,
    ProblemStarted,
    Replanned,
    RunStarted,
)
from planner.workflow import Arithmetic, Numerics, Role, RoleName, Workflow

GOLDEN = Path(__file__).parent / "golden"

GRAPH = """window rounds=2
prefill.draft = PREFILL draft round=0 in=24 out=0 context=0
prefill.prm = PREFILL prm round=0 in=24 out=0 context=0
prefill.target = PREFILL target round=0 in=24 out=0 context=0
draft = DRAFT draft round=0 in=0 out=20 context=24 from prefill.draft
verify = VERIFY prm round=0 in=20 out=0 context=24 accept=0.8 from prefill.prm, draft
refine = REFINE target round=0 in=0 out=20 context=24 from prefill.target if ?!verify
sync = SYNC draft round=0 in=20 out=0 context=24 from prefill.draft, ~refine if !verify
draft.A = DRAFT draft round=1 in=0 out=20 context=44 from prefill.draft, draft if ?verify
verify.A = VERIFY prm round=1 in=20 out=0 context=44 accept=0.8 from prefill.prm, draft.A if ?verify
refine.A = REFINE target round=1 in=20 out=20 context=44 from prefill.target, draft if verify & ?!verify.A
draft.R = DRAFT draft round=1 in=0 out=20 context=44 from prefill.draft, sync if !verify
"""


def graph() -> TaskGraph:
    return from_text(GRAPH)


def machine() -> Machine:
    def device(name: str, kind: DeviceKind) -> Device:
        transport = Transport.EMULATE if kind is DeviceKind.FPGA else None
        able = Arithmetic.INT8 if kind is DeviceKind.FPGA else Arithmetic.FLOAT32
        return Device(name, kind, "jax", 10**9, 1e9, {able: 1e9}, 10.0, 1.0, "made up", transport)

    devices = [device("fpga0", DeviceKind.FPGA), device("gpu0", DeviceKind.GPU), device("gpu1", DeviceKind.GPU)]
    links = [Link(d.name, "host", 1e9, 5.0, "made up") for d in devices]
    return Machine("made-up", tuple(devices), "made up", tuple(links))


def numerics(role: RoleName) -> Numerics:
    return Numerics(Arithmetic.INT8 if role is RoleName.DRAFT else Arithmetic.FLOAT32)


def plan(timeline: bool = True) -> Plan:
    slots = [
        ("prefill.draft", "fpga0", 0, 20),
        ("prefill.prm", "gpu1", 0, 15),
        ("prefill.target", "gpu0", 0, 6),
        ("draft", "fpga0", 20, 130),
        ("verify", "gpu1", 130, 155),
        ("refine", "gpu0", 6, 390),
        ("draft.A", "fpga0", 130, 245),
        ("verify.A", "gpu1", 245, 272),
        ("refine.A", "gpu0", 310, 700),
        ("sync", "fpga0", 250, 395),
        ("draft.R", "fpga0", 395, 510),
    ]
    return Plan(
        name="by hand",
        workflow=Workflow("sums", "sums", {r: Role(f"zoo/{r}", numerics(r)) for r in RoleName}),
        machine=machine(),
        models=dict.fromkeys(RoleName, "0" * 16),
        placement={RoleName.DRAFT: "fpga0", RoleName.TARGET: "gpu0", RoleName.PRM: "gpu1"},
        draft_ahead=1,
        prefetch_refine=True,
        chunk_tokens=8,
        priorities={"fpga0": ("DRAFT@0", "DRAFT@1")},
        graph=GRAPH,
        timeline=tuple(Slot(t, d, a * 1000, b * 1000) for t, d, a, b in slots) if timeline else (),
        objective_us=151_250.0,
        lower_bound_us=148_000.0,
        status="feasible",
        cost_source="modelled (roofline)",
    )


def trace() -> list[Event]:
    def chunk(device: str, role: str, request: str, start: int, end: int, tokens: int, ahead: bool = False) -> Chunk:
        op = request.split(":")[0]
        written = 0 if op in ("VERIFY", "PREFILL") else tokens
        counts = (tokens - written, written, 24)
        return Chunk("p1", device, role, op, 0, request, 500 + start * 1000, 500 + end * 1000, *counts, ahead)

    first, check, again = "DRAFT:draft:p1:0", "VERIFY:prm:a1:0", "REFINE:target:p1:0"
    return [
        RunStarted("0123456789abcdef", "by hand", ClockKind.VIRTUAL),
        ProblemStarted("p1", 'What is\n3 < 4 & "so on"?', 500, 500),
        chunk("fpga0", "draft", "PREFILL:draft:p1:0", 0, 20, 24),
        chunk("gpu1", "prm", "PREFILL:prm:p1:0", 0, 15, 24, True),
        chunk("fpga0", "draft", first, 20, 65, 8),
        chunk("fpga0", "draft", first, 65, 110, 8),
        chunk("fpga0", "draft", "DRAFT:draft:a1:0", 110, 155, 8, True),
        chunk("gpu1", "prm", check, 110, 136, 20),
        chunk("gpu0", "target", again, 6, 160, 8, True),
        chunk("gpu0", "target", again, 160, 240, 4),
        Decided("p1", 240_500, "refined", 1, "target", "3 < 4\nis <true>", {"draft": 0.31}, 0),
        ProblemEnded("p1", 240_500, "answer", "true", True, ("3 < 4",), ("PREFILL:draft:p1:0", first, check, again)),
        ProblemStarted("p2", "2 + 2", 300_000, 300_000),
    ]


GOLDENS = {
    "graph.dot": lambda: export(graph(), "dot"),
    "graph.mmd": lambda: export(graph(), "mermaid"),
    "graph.json": lambda: export(graph(), "json"),
    "graph.svg": lambda: export(graph(), "svg"),
    "plan.mmd": lambda: export(plan(), "mermaid"),
    "plan.svg": lambda: export(plan(), "svg"),
    "plan.perfetto.json": lambda: export(plan(), "perfetto"),
    "trace.svg": lambda: export(trace(), "svg"),
    "both.perfetto.json": lambda: planned_and_happened(plan(), trace()),
}


@pytest.mark.parametrize("name", sorted(GOLDENS))
def test_golden(name: str):
    text, file = GOLDENS[name](), GOLDEN / name
    if os.environ.get("HETEROREASON_UPDATE_GOLDEN") == "1":
        file.parent.mkdir(exist_ok=True)
        file.write_text(text, encoding="utf-8", newline="\n")
    assert text == file.read_text(encoding="utf-8"), "run with HETEROREASON_UPDATE_GOLDEN=1 if the change was meant"


# --- which formats fit --------------------------------------------------------------------------------------------


def test_every_format_gives_text():
    things = {"graph": graph(), "plan": plan(), "trace": trace()}
    for kind, formats in FORMATS.items():
        for format in formats:
            text = export(things[kind], format)
            assert text.endswith("\n"), (kind, format)
            assert text == export(things[kind], format)


@pytest.mark.parametrize(
    ("thing", "format", "words"),
    [
        (graph(), "perfetto", ["graph", "perfetto", "dot, graphml, json, mermaid, svg"]),
        (plan(), "dot", ["plan", "json, mermaid, perfetto, svg"]),
        (trace(), "mermaid", ["trace", "json, perfetto, svg"]),
        ([], "json", ["empty"]),
        ("a plan", "json", ["str"]),
    ],
)
def test_a_format_that_does_not_fit_is_named(thing, format, words):
    with pytest.raises(UserError) as error:
        export(thing, format)
    assert all(word in str(error.value) for word in words)


def test_json_exports_hold_everything():
    assert export(plan(), "json") == plan().to_json()
    events = json.loads(export(trace(), "json"))
    assert [e["kind"] for e in events[:3]] == ["run", "problem", "chunk"]
    nodes = nx.node_link_graph(json.loads(export(graph(), "json")), edges="edges")
    assert list(nodes) == [t.id for t in graph().tasks]
    assert nodes.nodes["refine.A"]["guard"] == "verify & ?!verify.A"
    assert nodes.edges["refine", "sync"]["kind"] == "stream"
    assert nodes.edges["verify.A", "refine.A"] == {"kind": "guard", "verdict": "reject"}


# --- what is planned and what happened ----------------------------------------------------------------------------


def test_the_most_likely_outcome_is_drawn_with_what_it_cancels():
    boxes = {b.name: b for b in planned(plan()).boxes}
    assert "sync" not in boxes and "draft.R" not in boxes, "not begun if the draft is accepted"
    assert "refine.A" not in boxes, "begun after its verdict is known"
    # One chunk is 8 of 20 tokens of 384 ms; the verdict is known at 155 ms.
    assert boxes["refine"].wasted and boxes["refine"].speculative and boxes["refine"].end_us == 308_600
    assert boxes["draft.A"].speculative and not boxes["draft.A"].wasted
    assert not boxes["draft"].speculative
    assert [(m.at_us, m.label, m.good) for m in planned(plan()).marks] == [
        (155_000, "verify", True),
        (272_000, "verify.A", True),
    ]


def test_boxes_of_a_device_do_not_overlap():
    for timeline in (planned(plan()), happened(episodes(trace()))):
        for a, b in pairwise(timeline.boxes):
            assert a.device != b.device or a.end_us <= b.start_us


def test_a_cancelled_task_makes_way_for_the_next():
    late = replace(plan(), chunk_tokens=20)
    slots = tuple(replace(s, start_us=200_000) if s.task == "refine.A" else s for s in late.timeline)
    boxes = {b.name: b for b in planned(replace(late, timeline=slots)).boxes}
    assert boxes["refine"].end_us == 200_000 == boxes["refine.A"].start_us


def test_a_plan_without_a_timeline_says_so():
    assert "No timeline was predicted" in export(plan(timeline=False), "svg")
    assert json.loads(export(plan(timeline=False), "perfetto"))["traceEvents"]


def test_every_step_of_a_trace_leads_to_its_verification():
    timeline = happened(episodes(trace()))
    assert [(a.name, b.name) for a, b in timeline.arrows] == [("DRAFT:draft:p1:0", "VERIFY:prm:a1:0")]
    assert timeline.arrows[0][0].end_us == 110_000
    wasted = {b.name for b in timeline.boxes if b.wasted}
    assert wasted == {"DRAFT:draft:a1:0", "PREFILL:prm:p1:0"}


def test_a_trace_that_was_broken_off_wastes_nothing_yet():
    timeline = happened(episodes([e for e in trace() if not isinstance(e, ProblemEnded)]))
    assert not any(b.wasted for b in timeline.boxes)


def test_the_picture_of_a_trace_shows_one_problem():
    assert "problem 1 of 2" in svg_trace(trace())
    assert "Broken off" in svg_trace(trace(), "p2")
    with pytest.raises(UserError, match="holds no problem p3; name one of p1, p2"):
        svg_trace(trace(), "p3")
    with pytest.raises(UserError, match="holds no problem"):
        svg_trace(trace()[:1])


def test_a_problem_that_is_solved_twice_is_two_episodes():
    events = trace()[:-1]
    assert [len(e.chunks) for e in episodes([*events, *events[1:]])] == [8, 8]


def test_a_long_trace_is_wide_but_not_without_end():
    chunks = [
        Chunk("p", f"gpu{i % 2}", "draft", "DRAFT", 0, f"DRAFT:draft:{i}:0", i * 100, i * 100 + 90, 0, 8, 0, False)
        for i in range(2000)
    ]
    decided = [Decided("p", i * 2000, "accepted", i, "draft", "text", {}, 0) for i in range(100)]
    root = ET.fromstring(export([*chunks, *decided], "svg"))
    assert 1040 < float(root.attrib["width"]) <= 4000


# --- for machines -------------------------------------------------------------------------------------------------


def slices(text: str) -> list[dict]:
    return [e for e in json.loads(text)["traceEvents"] if e["ph"] == "X"]


def test_perfetto_puts_planned_and_happened_side_by_side():
    events = json.loads(planned_and_happened(plan(), trace()))["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {1: "planned: by hand (modelled (roofline))", 2: "happened: by hand (modelled (cost model))"}
    assert {e["pid"] for e in events if e["ph"] == "X"} == {1, 2}
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events if e["ph"] == "X")
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    for end in (e for e in events if e["ph"] == "f"):
        assert starts[end["id"]]["ts"] <= end["ts"] and end["bp"] == "e"
    assert min(e["ts"] for e in events if e["ph"] == "X" and e["pid"] == 2) == 0


def test_perfetto_marks_faults_on_their_device_and_plans_made_anew():
    moved = Replanned(50, "a device was lost", "abcd", "auto", {"draft": "gpu0"})
    happenings = [Faulted(40, "gpu0", "raised", "no", False), Faulted(45, "npu", "hung", "gone", True), moved]
    events = json.loads(export([*trace(), *happenings], "perfetto"))["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    marks = [e for e in events if e["ph"] == "i" and e["cat"] in ("fault", "replan")]
    assert [(e["name"], threads[e["tid"]]) for e in marks] == [
        ("gpu0 raised", "gpu0"),
        ("npu hung, taken out", "decisions"),
        ("plan auto (abcd)", "decisions"),
    ]
    assert [e["args"]["what"] for e in marks[:2]] == ["no", "gone"] and marks[2]["args"]["why"] == moved.why


times = st.integers(0, 10**9)


@given(st.lists(st.tuples(st.sampled_from("abc"), times, st.integers(0, 10**6), st.text(max_size=4)), max_size=8))
@settings(max_examples=40, deadline=None)
def test_perfetto_of_any_chunks_has_no_negative_times(rows):
    events: list[Event] = [ProblemStarted("p", "q\n<", 5, 5)]
    events += [Chunk("p", d, "prm", "VERIFY", 0, name, at, at + n, 1, 0, 0, False) for d, at, n, name in rows]
    assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in slices(export(events, "perfetto")))
    ET.fromstring(export(events, "svg"))


# --- any graph, any name ------------------------------------------------------------------------------------------

names = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=12) | st.sampled_from(
    ['"><script>', "a;b", "end", "x:y#z", "\x00", "]]>", "back\\slash", "two\nlines", "very long " * 9]
)


@st.composite
def graphs(draw) -> TaskGraph:
    """Tasks with any ids, edges that point forwards, guards that name earlier VERIFY tasks. Not all are legal."""
    ids = draw(st.lists(names, min_size=1, max_size=14, unique_by=clean))
    tasks, edges = [], []
    for i, id in enumerate(ids):
        op = draw(st.sampled_from(list(Op)))
        checks = [t.id for t in tasks if t.op is Op.VERIFY]
        guard = draw(st.lists(st.sampled_from(checks), max_size=2, unique=True)) if checks else []
        literals = tuple(Literal(v, draw(st.sampled_from(list(Verdict)))) for v in guard)
        ahead = draw(st.integers(0, len(guard)))
        tasks.append(Task(id, op, RoleName.PRM, 0, 7, 0, 3, literals, ahead, 0.5 if op is Op.VERIFY else None))
        for source in draw(st.sets(st.integers(0, i - 1), max_size=3)) if i else ():
            edges.append(Edge(ids[source], id, draw(st.sampled_from(list(EdgeKind)))))
    return TaskGraph(1, tuple(tasks), tuple(edges))


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_svg_of_any_graph_is_well_formed(graph):
    root = ET.fromstring(export(graph, "svg"))
    assert root.tag.endswith("svg")
    assert "script" not in {element.tag.split("}")[-1] for element in root.iter()}


@given(graphs())
@settings(max_examples=60, deadline=None)
def test_graphml_is_read_back_by_networkx(graph):
    read = nx.parse_graphml(export(graph, "graphml"))
    assert set(read) == {clean(t.id) for t in graph.tasks}
    for task in graph.tasks:
        attributes = read.nodes[clean(task.id)]
        assert attributes["op"] == task.op and attributes["tokens_in"] == 7
        assert attributes["speculative"] == task.speculative
    assert {(clean(e.source), clean(e.target)) for e in graph.edges} <= set(read.edges)


@given(graphs())
@settings(max_examples=40, deadline=None)
def test_text_formats_keep_names_inside_of_their_quotes(graph):
    for line in export(graph, "dot").split("\n"):
        assert line.replace("\\\\", "").replace('\\"', "").count('"') % 2 == 0
    mermaid = export(graph, "mermaid").split("\n")
    boxes = [line for line in mermaid if '["' in line]
    assert len(boxes) == len(graph.tasks)
    assert all(line.count('"') == 2 for line in boxes)
    json.loads(export(graph, "json"))


@given(st.integers(1, 22).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.tuples(*[st.integers(0, n - 1)] * 2)))))
@settings(max_examples=60, deadline=None)
def test_boxes_of_a_layout_do_not_overlap_and_edges_point_down(case):
    n, pairs = case
    dag = nx.DiGraph()
    dag.add_nodes_from(range(n))
    dag.add_edges_from((a, b) for a, b in sorted(pairs) if a < b)
    layout = layered(dag, Sizes(100.0, 40.0))
    for a, b in combinations(layout.boxes.values(), 2):
        apart = a.x + a.w <= b.x or b.x + b.w <= a.x or a.bottom <= b.y or b.bottom <= a.y
        assert apart, (a, b)
        assert min(a.x, b.x) >= 0 and max(a.x + a.w, b.x + b.w) <= layout.width + 1e-6
    for (source, target), route in layout.routes.items():
        assert [y for _, y in route] == sorted(y for _, y in route)
        assert abs(route[0][0] - layout.boxes[source].middle) < 50
        assert route[-1][1] == layout.boxes[target].y


def test_a_lowered_window_is_drawn_without_crossing_its_boxes():
    workflow = Workflow("sums", "sums", {r: Role(f"zoo/{r}") for r in RoleName})
    window = run_passes(lower(workflow, 3), [DraftAhead(2), PrefetchRefine()])
    layout = graph_layout(window)
    assert len(layout.boxes) == len(window.tasks)
    for route in layout.routes.values():
        for (x1, y1), (x2, y2) in zip(route[1:-1:2], route[2:-1:2], strict=True):
            assert x1 == x2, "through a row an edge goes straight down"
            for box in layout.boxes.values():
                assert not (box.x < x1 < box.x + box.w and y1 < box.bottom and box.y < y2)
    for format in FORMATS["graph"]:
        assert export(window, format)


def test_pictures_leave_out_what_follows_from_other_edges():
    edges = pictured(graph())
    assert not edges.has_edge("prefill.draft", "draft.A"), "through draft"
    assert not edges.has_edge("verify", "verify.A"), "through draft.A"
    assert edges.edges["verify", "draft.A"] == {"kind": "guard", "verdict": "accept"}
    assert nx.transitive_closure(edges).number_of_edges() > len(graph().edges)


# --- text ---------------------------------------------------------------------------------------------------------


@given(st.text())
def test_any_text_can_stand_in_xml(text):
    root = ET.fromstring(f'<a b="{xml(text)}">{xml(text)}</a>')
    assert root.text == root.attrib["b"] or (root.text or "") == root.attrib["b"]
    assert root.attrib["b"] == clean(text)


@given(st.text(), st.floats(0, 300))
def test_cut_text_fits(text, room):
    cut = fitted(text, 12, room)
    assert cut == "" or width(cut, 12) <= room
    assert "\n" not in cut


def test_the_plan_of_the_tests_is_a_plan():
    assert Plan.from_mapping(json.loads(plan().to_json()), "here") == plan()
    assert to_text(graph()) == GRAPH


def test_pictures_do_not_depend_on_the_seed_of_hashes() -> None:
    """Sets and views in their own order would make a picture differ from one process to the next."""
    here = Path(__file__).parent
    code = "import test_export as t; from planner.export import export; print(export(t.graph(), 'svg'))"
    texts = set()
    for seed in ("1", "2", "3"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(here)}
        command = [sys.executable, "-c", code]
        texts.add(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)
    assert len(texts) == 1


def test_faults_and_new_plans_do_not_disturb_a_picture():
    fault = Faulted(3, "gpu0", "raised", "ValueError: oh", True, "p", "r")
    moved = Replanned(5, "device gpu0 is lost", "01", "auto", {"draft": "gpu1"})
    assert export([*trace(), fault, moved], "svg") == export(trace(), "svg")
    assert "ValueError: oh" in export([*trace(), fault, moved], "json")
