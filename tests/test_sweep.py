"""Sweeps: every combination once, the front of what no other point beats, CSV and picture."""

from __future__ import annotations

import csv
import xml.etree.ElementTree as ET
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planner.api import as_workflow
from planner.cli import main
from planner.errors import UserError
from planner.export.svg_pareto import Dot, svg_pareto
from planner.sweep import Grid, Point, pareto, sweep, to_csv
from planner.workflow import RoleName

EXAMPLES = Path(__file__).parent.parent / "examples"
FLOW = as_workflow(EXAMPLES / "sums.yaml")
POINT = Point("m", "serial", "", None, 0.8, 0, 1.0, 0.0, 1.0, 1.0, 1.0, "")
VALUES = st.floats(0.1, 1e6)


def test_every_combination_is_there_once() -> None:
    models = {RoleName.TARGET: ("zoo/target", "shapes/qwen2.5-1.5b")}
    grid = Grid(("1x3090", "3x3090"), ("serial", "overlapped"), models, (), (0, 2))
    points = sweep(FLOW, grid, samples=3).points
    seen = [(p.machine, p.plan, p.models, p.depth) for p in points]
    assert len(set(seen)) == len(seen) == 2 * 2 * (1 + 2)
    assert {p.depth for p in points if p.plan == "serial"} == {0}


def test_what_fits_nowhere_is_left_out_and_named() -> None:
    grid = Grid(("1x3090", "3x3090"), ("serial",), {RoleName.TARGET: ("shapes/qwen2.5-7b",)})
    with pytest.raises(UserError, match=r"machine 1x3090: .*gpu0 has 24 GB and draft and prm and target need"):
        sweep(FLOW, grid, samples=3)
    grid = replace(grid, models={RoleName.TARGET: ("shapes/qwen2.5-1.5b", "shapes/qwen2.5-7b")})
    found = sweep(FLOW, grid, samples=3)
    assert len(found.points) == 2
    assert [why.split(";")[0] for why in found.left_out]


def test_a_threshold_accepts_the_share_of_scores_above_it() -> None:
    grid = Grid(("3x3090",), ("serial",), thresholds=(0.2, 0.5, 0.95))
    points = sweep(FLOW, grid, scores=(0.1, 0.5, 0.9, 0.9), samples=3).points
    assert [(p.threshold, p.acceptance) for p in points] == [(0.2, 0.75), (0.5, 0.75), (0.95, 0.0)]
    with pytest.raises(UserError, match="a threshold says nothing without scores"):
        sweep(FLOW, grid, samples=3)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=12))
def test_the_front_is_what_nothing_beats(values: list[tuple[float, float]]) -> None:
    points = pareto([replace(POINT, latency_us=l, energy_mj=e) for l, e in values])
    front = [p for p in points if p.pareto]
    assert front
    for p in points:
        better = [q for q in points if q.latency_us <= p.latency_us and q.energy_mj <= p.energy_mj and q is not p]
        beats = any((q.latency_us, q.energy_mj) != (p.latency_us, p.energy_mj) for q in better)
        assert p.pareto is not beats


def test_csv_reads_back() -> None:
    rows = list(csv.DictReader(StringIO(to_csv([POINT, replace(POINT, models="a, b", pareto=True)]))))
    assert [(r["models"], r["pareto"], float(r["latency_us"])) for r in rows] == [
        ("", "False", 1.0),
        ("a, b", "True", 1.0),
    ]


@given(st.lists(st.builds(Dot, st.sampled_from(["a", "<b>"]), st.text(max_size=5), VALUES, VALUES, st.booleans()),
                min_size=1, max_size=9))  # fmt: skip
def test_the_picture_holds_a_dot_a_point(dots: list[Dot]) -> None:
    dots = [replace(dots[0], pareto=True), *dots[1:]]
    root = ET.fromstring(svg_pareto(dots, "t", "modelled"))
    assert len(root.findall(".//{*}circle")) == len(dots)


def test_the_command_leaves_table_and_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [str(tmp_path / "p.csv"), str(tmp_path / "p.svg")]
    words = ["sweep", str(EXAMPLES / "sums.yaml"), "-m", "1x3090", "-m", "3x3090", "--kind", "serial", "-n", "3"]
    with pytest.raises(SystemExit) as end:
        main([*words, "--csv", files[0], "--svg", files[1]])
    assert end.value.code == 0
    assert "modelled" in capsys.readouterr().out
    assert len(Path(files[0]).read_text().splitlines()) == 3
    assert "<svg" in Path(files[1]).read_text()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--kind", "best"], "--kind is 'best'; use one of auto, solved, serial"),
        (["--model", "judge=zoo/prm"], "--model is 'judge=zoo/prm'; write ROLE=MODEL"),
        (["--threshold", "0.5"], "a threshold says nothing without scores; name a trace of a run with --trace"),
        (["-m", "9x3090"], "machine 9x3090"),
    ],
)
def test_what_a_user_can_get_wrong(more: list[str], sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["sweep", str(EXAMPLES / "sums.yaml"), "-m", "1x3090", *more, "-n", "2"])
    assert end.value.code == 2
    assert sentence in capsys.readouterr().err
