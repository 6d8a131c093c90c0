"""Journal and resume: what was committed stays, and a run that was stopped anywhere ends as an undisturbed one."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from planner_cases import (
    SEEDS,
    LetterBackend,
    Letters,
    LinearCosts,
    committed,
    quick_plan,
    random_plan,
    run_letters,
    workflow,
    workflows,
)

from planner import batch
from planner.cli import main
from planner.errors import UserError
from planner.plan import Plan
from planner.runtime.engine import Engine, Load
from planner.runtime.host import Solved
from planner.runtime.journal import Head, JournalFile, asked_of
from planner.runtime.worker import VirtualWorkers, modelled
from planner.trace import Chunk, Event
from planner.workflow import Budget, Sampling, Statistics, Workflow

ROOT = Path(__file__).parents[1]
QUESTIONS = ("a", "bc", "a", "cab")
FLOW = workflow(accept=0.6, accept_refined=0.5, budget=Budget(6, 60, 12))


def head_of(plan: Plan) -> Head:
    return Head(asked_of(plan), plan.hash, tuple(Letters().parse(q).key for q in QUESTIONS))


def run_journal(plan: Plan, journal: JournalFile, concurrency: int) -> tuple[list[Solved], list[Event]]:
    events: list[Event] = []
    workers = VirtualWorkers(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
    engine = Engine(plan, workers, Letters(), events.append, journal=journal)
    found = list(engine.solve_all([Letters().parse(q) for q in QUESTIONS], Load(concurrency)))
    journal.close()
    return found, events


def ends(journal: JournalFile) -> dict[str, Any]:
    return {label: replace(end, latency_us=0) for label, end in journal.ends.items()}


@given(workflows(), SEEDS)
@settings(max_examples=20, deadline=None)
def test_a_journal_that_was_cut_anywhere_leads_to_the_same_end(
    tmp_path_factory: pytest.TempPathFactory, flow: Workflow, seed: int
) -> None:
    random = Random(seed)
    path = tmp_path_factory.getbasetemp() / "journal.jsonl"
    plan = random_plan(random, flow)
    journal = JournalFile(path, head_of(plan))
    run_journal(plan, journal, random.randint(1, 4))
    whole, text = ends(journal), path.read_bytes()
    assert len(whole) == len(QUESTIONS)
    first = text.index(b"\n") + 1
    for cut in {first, len(text) - 1, *(random.randint(first, len(text)) for _ in range(3))}:
        path.write_bytes(text[:cut])
        again = JournalFile.resume(path)
        before, had = set(again.ends), {label: set(again.results(label)) for label in whole}
        # By another plan, too: a plan never changes an answer.
        solved, events = run_journal(random_plan(random, flow), again, random.randint(1, 4))
        assert ends(again) == whole
        assert {s.label for s in solved} == set(whole) - before
        # Nothing that a policy had been given is worked out again.
        assert not [e for e in events if isinstance(e, Chunk) and e.tokens_out and e.request in had[e.problem]]
        last = JournalFile.resume(path)
        last.close()
        assert last.ends.keys() == whole.keys()


def test_what_is_in_the_journal_is_what_an_undisturbed_run_commits(tmp_path: Path) -> None:
    plan = quick_plan(FLOW, "overlapped")
    solved, _ = run_journal(plan, JournalFile(tmp_path / "j", head_of(plan)), 2)
    found = {s.label: s for s in solved}
    labels = batch.labels([Letters().parse(q) for q in QUESTIONS])
    assert committed([found[label] for label in labels]) == committed(run_letters(plan, QUESTIONS)[0])
    journal = JournalFile.resume(tmp_path / "j")
    assert [journal.ends[s.label].steps for s in solved] == [s.steps for s in solved]
    journal.close()


def test_a_result_is_in_the_file_before_the_policy_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "j"
    plan = quick_plan(FLOW)
    written: list[int] = []

    def count(event: Event) -> None:
        if event.kind == "decision":
            written.append(path.read_text().count('"kind": "result"'))

    workers = VirtualWorkers(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
    journal = JournalFile(path, head_of(plan), sync=True)
    Engine(plan, workers, Letters(), count, journal=journal).solve(Letters().parse("bc"))
    journal.close()
    assert written and all(b > a for a, b in zip([0, *written], written, strict=False))


def test_what_answers_depend_on() -> None:
    plan = quick_plan(FLOW)
    assert asked_of(plan) == asked_of(random_plan(Random(1), FLOW))
    assert asked_of(plan) == asked_of(replace(plan, workflow=replace(FLOW, statistics=Statistics(accept=0.1))))
    assert asked_of(plan) != asked_of(replace(plan, workflow=replace(FLOW, sampling=Sampling(1.0, 9))))
    assert asked_of(plan) != asked_of(replace(plan, models=dict.fromkeys(plan.models, "11")))


HEAD = json.dumps({"asked": "0", "plan": "0", "problems": [], "kind": "head"}) + "\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "does not begin with a head; run anew"),
        ('{"kind": "head"}\n', "is missing"),
        (HEAD.replace('"kind"', '"schema": "x", "kind"'), "schema is 'x' and this version reads"),
        (HEAD + "{\n", "line 2: not JSON"),
        (HEAD + '{"kind": "party"}\n', "line 2: is no line of a journal; cut the journal before this line, and resume"),
        (HEAD + '{"kind": "result", "problem": "p", "request": "r"}\n', "line 2: holds neither a step nor a score"),
    ],
)
def test_what_is_wrong_with_a_journal_is_said_in_one_sentence(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "j").write_text(text)
    with pytest.raises(UserError) as error:
        JournalFile.resume(tmp_path / "j")
    assert says in str(error.value) and "\n" not in str(error.value)


# --- in a folder ---


def begin(folder: Path, plan: Plan, questions: Sequence[str] = QUESTIONS) -> batch.Batch:
    return batch.begin(folder, plan, [Letters().parse(q) for q in questions])


def finish(found: batch.Batch) -> None:
    workers = VirtualWorkers(modelled(LinearCosts()), {d: LetterBackend() for d in "abc"})
    engine = Engine(found.plan, workers, Letters(), lambda event: None, journal=found.journal)
    for solved in engine.solve_all(found.problems, Load(2)):
        found.append_answer(solved.label)
    found.close()


def test_a_folder_holds_plan_problems_and_journal_from_the_start(tmp_path: Path) -> None:
    plan = quick_plan(FLOW)
    begin(tmp_path / "new" / "out", plan).close()
    found = batch.resume(tmp_path / "new" / "out")
    assert (found.plan, [p.question for p in found.problems]) == (plan, list(QUESTIONS))
    assert not found.over and found.rows() == []
    finish(found)
    rows = [json.loads(line) for line in (tmp_path / "new" / "out" / "answers.jsonl").read_text().splitlines()]
    assert sorted(r["number"] for r in rows) == [1, 2, 3, 4]
    assert [r["question"] for r in found.rows()] == list(QUESTIONS)
    again = batch.resume(tmp_path / "new" / "out")
    assert again.over and again.rows() == found.rows()
    again.close()


def test_a_run_that_is_not_over_is_not_wiped_out(tmp_path: Path) -> None:
    begin(tmp_path, quick_plan(FLOW)).close()
    with pytest.raises(UserError, match=r"holds a run of which 4 problems are not over; go on with `heteroreason run"):
        begin(tmp_path, quick_plan(FLOW))
    finish(batch.resume(tmp_path))
    begin(tmp_path, quick_plan(FLOW)).close()
    assert (tmp_path / "answers.jsonl").read_text() == ""


def test_a_journal_that_cannot_be_read_is_not_wiped_out(tmp_path: Path) -> None:
    found = begin(tmp_path, quick_plan(FLOW))
    finish(found)
    path = tmp_path / "journal.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:2], "no JSON\n", *lines[2:]]))
    with pytest.raises(
        UserError, match=r"holds a run that cannot go on: .*journal.jsonl, line 3: .*; .*or name another"
    ):
        begin(tmp_path, quick_plan(FLOW))
    assert len(path.read_text().splitlines()) == len(lines) + 1


def test_a_folder_whose_files_do_not_belong_together_is_refused(tmp_path: Path) -> None:
    begin(tmp_path, quick_plan(FLOW)).close()
    quick_plan(replace(FLOW, sampling=Sampling(1.0, 4))).save(tmp_path / "plan.json")
    with pytest.raises(UserError, match="it is the journal of another workflow, other models or another seed"):
        batch.resume(tmp_path)
    # Another plan of the same workflow does no harm.
    random_plan(Random(3), FLOW).save(tmp_path / "plan.json")
    batch.resume(tmp_path).close()
    text = (tmp_path / "problems.jsonl").read_text()
    (tmp_path / "problems.jsonl").write_text(text.partition("\n")[2])
    with pytest.raises(UserError, match="it is the journal of other problems"):
        batch.resume(tmp_path)
    with pytest.raises(UserError, match="no such file; name the folder that `heteroreason run --out` was given"):
        batch.resume(tmp_path / "nowhere")


# --- kill -9 ---

SCRIPT = """
import sys, time
from pathlib import Path
sys.path.insert(0, {tests!r})
from planner_cases import LetterBackend, Letters, LinearCosts
from planner import batch
from planner.runtime.engine import Engine, Load
from planner.runtime.worker import VirtualWorkers, modelled


class Slow(LetterBackend):
    def run(self, work):
        time.sleep(0.002)
        return super().run(work)


found = batch.resume(Path(sys.argv[1]))
workers = VirtualWorkers(modelled(LinearCosts()), dict((d, Slow()) for d in "abc"))
engine = Engine(found.plan, workers, Letters(), lambda event: None, journal=found.journal)
print("begun", flush=True)
for solved in engine.solve_all(found.problems, Load(3)):
    found.append_answer(solved.label)
"""


def killed(folder: Path, after_s: float | None) -> None:
    """Go on with the run in a process of its own, and kill it after a time."""
    script = SCRIPT.format(tests=str(Path(__file__).parent))
    process = subprocess.Popen([sys.executable, "-c", script, str(folder)], stdout=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None
    with process.stdout as stdout:
        assert stdout.readline() == b"begun\n"
        if after_s is not None:
            time.sleep(after_s)
            process.kill()
        assert process.wait(120) in (0, -signal.SIGKILL)


def kill_often(folder: Path, times: int, seed: int) -> None:
    """Kill a run at random times: nothing that the journal had is lost, and the end is that of an undisturbed run."""
    random = Random(seed)
    questions = tuple("abc"[n % 3] * (1 + n // 3) for n in range(24))
    plan = random_plan(random, FLOW)
    begin(folder, plan, questions).close()
    lines = 1
    for _ in range(times):
        killed(folder, random.uniform(0.0, 0.4))
        text = (folder / "journal.jsonl").read_bytes()
        assert text.count(b"\n") >= lines
        lines = text.count(b"\n")
    killed(folder, None)
    found = batch.resume(folder)
    found.close()
    whole = run_letters(plan, questions)[0]
    assert [(r["status"], r["answer"], tuple(r["steps"])) for r in found.rows()] == [
        (s.outcome.status.value, s.answer, s.steps) for s in whole
    ]
    numbers = [json.loads(line)["number"] for line in (folder / "answers.jsonl").read_text().splitlines()]
    assert sorted(numbers) == list(range(1, len(questions) + 1))
    # Each result is in the journal once: nothing that was committed was worked out again.
    records = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    names = [(r["problem"], r["request"]) for r in records if r["kind"] == "result"]
    assert len(names) == len(set(names))


def test_kill_9_at_random_times(tmp_path: Path) -> None:
    kill_often(tmp_path, 3, seed=1)


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(5))
def test_kill_9_at_fifty_random_times(tmp_path: Path, seed: int) -> None:
    kill_often(tmp_path, 10, seed + 2)


# --- the command ---


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as stop:
        main([str(word) for word in words])
    assert isinstance(stop.value.code, int)
    return stop.value.code


def test_the_command_goes_on_after_sigterm(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums, folder = ROOT / "examples" / "sums.yaml", tmp_path / "out"
    words = [sums, "-n", 20, "--plan", "serial", "--clock", "virtual", "--concurrency", 2, "--shown", 0]
    process = subprocess.Popen(
        [sys.executable, "-m", "planner.cli", "run", *map(str, words), "--out", str(folder)],
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT,
    )  # fmt: skip
    assert process.stderr is not None
    journal, until = folder / "journal.jsonl", time.monotonic() + 240
    while (not journal.exists() or journal.read_bytes().count(b"\n") < 4) and time.monotonic() < until:
        time.sleep(0.01)
    process.terminate()
    _, told = process.communicate(timeout=120)
    assert process.returncode == 143, told
    assert told.strip() == f"stopped; go on with `heteroreason run --resume {folder}`"
    had = journal.read_bytes()
    assert command("run", "--resume", folder, "--json") == 0
    after = json.loads(capsys.readouterr().out)
    assert journal.read_bytes().startswith(had)
    assert command("run", *words, "--json") == 0
    whole = json.loads(capsys.readouterr().out)
    assert [(a["question"], a["steps"]) for a in after["answers"]] == [
        (a["question"], a["steps"]) for a in whole["answers"]
    ]
    assert (folder / "trace.jsonl").exists() and (folder / "trace-2.jsonl").exists()
    assert command("run", "--resume", folder) == 0
    assert "all 20 problems are over" in capsys.readouterr().out
    report = (folder / "report.json").read_bytes()
    killed_before_it_left_them = [folder / name for name in ("report.json", "report.md", "perfetto.json")]
    for path in killed_before_it_left_them:
        path.unlink()
    assert command("run", "--resume", folder, "--json") == 0
    assert set(map(str, killed_before_it_left_them)) < set(json.loads(capsys.readouterr().out)["files"])
    assert (folder / "report.json").read_bytes() == report
    assert command("run", *words, "--out", folder) == 0
    assert not (folder / "trace-2.jsonl").exists(), "the trace of a run that is over stands beside that of the next"


def test_the_report_for_people_tells_each_of_two_equal_problems(tmp_path: Path) -> None:
    words = [ROOT / "examples" / "sums.yaml", "1+2+3", "1+2+3", "--plan", "serial", "--clock", "virtual"]
    assert command("run", *words, "--out", tmp_path / "out") == 0
    parts = (tmp_path / "out" / "report.md").read_text("utf-8").split("- `1+2+3`: ")
    assert len(parts) == 3 and all("  - accepted: " in part or "  - refined: " in part for part in parts[1:])


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["run"], "what to run is not named; name a workflow or a plan, or a folder with --resume"),
        (["run", "--resume", "{tmp}"], "journal.jsonl: no such file"),
        (["run", "{sums}", "--resume", "{tmp}"], "WHAT is given together with --resume"),
        (["run", "--resume", "{tmp}", "--out", "{tmp}"], "--out is given together with --resume"),
        (["run", "{sums}", "--concurrency", "0"], "--concurrency"),
        (["run", "--resume", "{tmp}", "--seed", "0"], "--seed is given together with --resume"),
        (["run", "--resume", "{tmp}", "--clock", "wall"], "--clock is given together with --resume"),
        (["run", "--resume", "{tmp}", "--costs", "x.json"], "--costs is given together with --resume"),
        (["run", "--resume", "{tmp}", "--deadline", "3"], "--deadline is given together with --resume"),
        (["run", "--resume", "{tmp}", "-n", "3"], "is given together with --resume"),
        (["run", "{sums}", "--deadline", "0"], "--deadline"),
        (["run", "{sums}", "--deadline", "inf"], "--deadline is inf; give seconds, or leave it out"),
        (["run", "{sums}", "--deadline", "nan"], "--deadline"),
    ],
)
def test_bad_words(words: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = ROOT / "examples" / "sums.yaml"
    assert command(*(word.format(tmp=tmp_path, sums=sums) for word in words)) == 2
    assert says in capsys.readouterr().err


def test_a_deadline_reaches_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sums = ROOT / "examples" / "sums.yaml"
    words = ["run", sums, "-n", 2, "--plan", "serial", "--clock", "virtual", "--json"]
    assert command(*words, "--deadline", 0.03, "--out", tmp_path) == 0
    answers = json.loads(capsys.readouterr().out)["answers"]
    assert [a["status"] for a in answers] == ["deadline"] * 2
    assert all(a["steps"] for a in answers) and all(a["latency_us"] <= 45_000 for a in answers)
