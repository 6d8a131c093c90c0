from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from planner.errors import UserError
from planner.problems import countdown as cd
from planner.problems import names, problem_set, read_jsonl
from planner.problems import sums as sm
from planner.problems.vocabulary import ID, TOKENS, decode, encode, held_out

SUMS, COUNTDOWN, TEXT = sm.Sums(), cd.Countdown(), problem_set("text")
BOTH = pytest.mark.parametrize("problems", [SUMS, COUNTDOWN], ids=["sums", "countdown"])


def solve(problems, problem):
    steps = []
    while options := problems.right_steps(problem, steps):
        steps.append(options[0])
    return steps


# every set


@BOTH
def test_generation_is_seeded_and_held_out(problems):
    first = problems.generate(30, 7)
    assert first == problems.generate(30, 7)
    assert first != problems.generate(30, 8)
    assert first[:10] == problems.generate(10, 7)
    assert all(held_out(problems.prompt(problem)) for problem in first)


@BOTH
def test_right_steps_solve_the_problem(problems):
    for problem in problems.generate(50, 1):
        steps = solve(problems, problem)
        assert problems.grade(problem, steps)
        assert all(problems.label(problem, steps))
        assert [problems.answer(step) for step in steps] == [None] * (len(steps) - 1) + [problem.answer]
        assert not problems.grade(problem, steps[:-1])
        assert not problems.grade(problem, [])


@BOTH
def test_parse_reads_what_generate_writes(problems):
    for problem in problems.generate(50, 2):
        assert problems.parse(problem.question) == problem


@BOTH
def test_texts_fit_the_vocabulary_and_the_context(problems):
    for problem in problems.generate(50, 3):
        text = problems.prompt(problem) + "".join(step + problems.delimiter for step in solve(problems, problem))
        assert decode(encode(text)) == text
        assert len(text) < 144


@BOTH
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_after_a_wrong_step_all_labels_are_false(problems, data):
    problem = problems.generate(1, data.draw(st.integers(0, 1000)))[0]
    steps = solve(problems, problem)
    at = data.draw(st.integers(0, len(steps) - 1))
    place = data.draw(st.integers(0, len(steps[at]) - 1))
    digit = data.draw(st.sampled_from("0123456789+-*=> "))
    steps[at] = steps[at][:place] + digit + steps[at][place + 1 :]
    labels = problems.label(problem, steps)
    assert len(labels) == len(steps)
    assert all(labels[:at])
    assert labels == sorted(labels, reverse=True)


@BOTH
@given(text=st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_step_is_taken_without_a_crash(problems, text):
    problem = problems.generate(1, 0)[0]
    assert isinstance(problems.readable(text), str)
    problems.answer(text)
    problems.grade(problem, [text])
    assert len(problems.label(problem, [text, text])) == 2


@BOTH
@given(text=st.text(max_size=40))
@settings(max_examples=100, deadline=None)
def test_any_question_is_a_problem_or_one_sentence(problems, text):
    try:
        problem = problems.parse(text)
    except UserError as bad:
        assert "\n" not in bad.what
        assert bad.mend
    else:
        encode(problems.prompt(problem))


def test_the_vocabulary_has_32_different_tokens():
    assert len(set(TOKENS)) == len(TOKENS) == len(ID) == 32


def test_unknown_set_lists_the_known_ones():
    with pytest.raises(UserError, match="sums, countdown, text"):
        problem_set("chess")
    assert [problem_set(name).name for name in names()] == list(names())


# sums


@given(st.lists(st.integers(-99999, 99999), min_size=1, max_size=7))
def test_sums_model_form_round_trips(terms):
    assert sm.read(sm.write(terms)) == terms


def test_sums_forms():
    problem = SUMS.parse(" 4123 - 871 + 90 = ")
    assert problem.question == "4123-871+90"
    assert problem.answer == "3342"
    assert SUMS.prompt(problem) == "S+32140-17800+09000\n"
    assert solve(SUMS, problem) == ["+25230+09000", "+24330"]
    assert SUMS.readable("+25230+09000") == "3252+90"
    assert SUMS.readable("-25230") == "-3252"
    assert SUMS.readable("nonsense") == "nonsense"


def test_sums_labels_know_the_whole_prefix():
    problem = SUMS.parse("10+20+30+40")
    right = solve(SUMS, problem)
    assert SUMS.label(problem, right) == [True, True, True]
    slip = sm.write([31, 30, 40])
    assert SUMS.label(problem, [slip, sm.write([61, 40]), sm.write([101])]) == [False, False, False]
    assert SUMS.label(problem, [*right, right[-1]]) == [True, True, True, False]
    assert SUMS.label(problem, [right[0], right[2]]) == [True, False]
    assert SUMS.label(SUMS.parse("1-1"), ["-00000"]) == [False]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("", "empty"),
        ("  ", "empty"),
        ("two plus two", "not a sum"),
        ("1*2", "not a sum"),
        ("1++2", "not a sum"),
        ("٣+٤", "not a sum"),
        ("5", "1 terms"),
        ("1+1+1+1+1+1+1+1", "8 terms"),
        ("123456+1", "123456 is too long"),
        ("99999+1-5", "passes 100000"),
        ("9" * 5000 + "+1", r"^question '9{40}\.\.\.9{34}\+1': 9{40}\.\.\.9{36} is too long"),
        ("12 3+4", "not a sum"),
        ("1+2\n3", "not a sum"),
    ],
)
def test_sums_errors(question, message):
    with pytest.raises(UserError, match=message):
        SUMS.parse(question)


# countdown


def brute_force(numbers):
    if len(numbers) == 1:
        return set(numbers)
    found = set()
    for a, b, *rest in itertools.permutations(numbers):
        for value in (a + b, a - b, a * b):
            if 0 <= value <= 99:
                found |= brute_force([*rest, value])
    return found


@given(st.lists(st.integers(0, 30), min_size=1, max_size=4))
@settings(max_examples=40, deadline=None)
def test_reachable_against_brute_force(numbers):
    assert {n for n in range(100) if cd.reachable(numbers) >> n & 1} == brute_force(numbers)


@given(st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_countdown_labels_against_brute_force(seed):
    import random

    rng = random.Random(seed)
    problem = COUNTDOWN.generate(1, seed)[0]
    target = int(problem.answer)
    numbers = tuple(sorted(int(n) for n in problem.question.split("->")[0].split()))
    steps, expected, right = [], [], True
    while len(numbers) > 1:
        left, op, other, result, numbers = rng.choice(list(cd.moves(numbers)))
        steps.append(cd.write(cd.Move(left, op, other, result, numbers, target if len(numbers) > 1 else None)))
        right = right and target in brute_force(numbers)
        expected.append(right)
    assert COUNTDOWN.label(problem, steps) == expected
    assert COUNTDOWN.grade(problem, steps) == expected[-1]


@given(
    st.integers(0, 99),
    st.sampled_from("+-*"),
    st.integers(0, 99),
    st.integers(0, 99),
    st.lists(st.integers(0, 99), min_size=2, max_size=3),
    st.integers(0, 99),
)
def test_countdown_model_form_round_trips(left, op, right, result, rest, target):
    move = cd.Move(left, op, right, result, tuple(rest), target)
    assert cd.read(cd.write(move)) == move
    last = cd.Move(left, op, right, result, (result,), None)
    assert cd.read(cd.write(last)) == last


def test_countdown_forms():
    problem = COUNTDOWN.parse("3, 7 25 4 = 50")
    assert problem.question == "3 7 25 4 -> 50"
    assert COUNTDOWN.prompt(problem) == "C 30 40 70 52>05\n"
    steps = ["70*30=12 40 52 12>05", "52+12=64 40 64>05", "64+40=05"]
    assert COUNTDOWN.grade(problem, steps)
    assert [COUNTDOWN.readable(step) for step in steps] == ["7*3=21 (4 25 21 left)", "25+21=46 (4 46 left)", "46+4=50"]
    assert COUNTDOWN.readable("5 0") == "5 0"


def test_countdown_takes_any_order_of_operands_and_of_the_rest():
    problem = COUNTDOWN.parse("3 7 25 4 -> 50")
    assert COUNTDOWN.label(problem, ["30*70=12 12 52 40>05"]) == [True]


@pytest.mark.parametrize(
    "step",
    [
        "70*30=22 40 52 22>05",  # wrong product
        "70*30=12 40 52 22>05",  # rest does not carry the result
        "70*30=12 40 52 12>15",  # another target
        "70*30=12 52 12>05",  # a number lost
        "80*30=42 40 52 42>05",  # a number that is not there
        "30-70=40 40 52 40>05",  # below 0
        "70*30=12",  # an answer too early
        "52-40=12 30 70 12>05",  # legal, leads nowhere
    ],
)
def test_countdown_wrong_steps(step):
    problem = COUNTDOWN.parse("3 7 25 4 -> 50")
    assert COUNTDOWN.label(problem, [step]) == [False]
    assert not COUNTDOWN.grade(problem, [step])


def test_countdown_equal_numbers_are_two_numbers():
    problem = COUNTDOWN.parse("5 5 5 -> 30")
    assert COUNTDOWN.label(problem, ["50*50=52 50 52>03", "52+50=03"]) == [True, True]
    assert COUNTDOWN.label(COUNTDOWN.parse("5 4 3 -> 12"), ["50+50=01 30 01>21"]) == [False]


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ("", "empty"),
        ("3 7 25 4", "not a countdown problem"),
        ("three 7 -> 4", "not a countdown problem"),
        ("3 7 -> 10", "2 numbers"),
        ("1 2 3 4 5 -> 15", "5 numbers"),
        ("100 2 3 -> 5", "100 is too long"),
        ("1 2 3 -> 123", "123 is too long"),
        ("1 1 1 -> 99", "cannot be reached"),
        ("1 2 3 -> " + "9" * 5000, "is too long"),
        ("9" * 5000 + " 2 3 -> 1", "is too long"),
    ],
)
def test_countdown_errors(question, message):
    with pytest.raises(UserError, match=message):
        COUNTDOWN.parse(question)


# text


@pytest.mark.parametrize(
    ("step", "answer"),
    [
        (r"so it is \boxed{42}", "42"),
        (r"\boxed{1} no, \boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        ("because\nAnswer: 42 ", "42"),
        ("final answer: x = 3", "x = 3"),
        (r"\boxed{open", None),
        ("the answer is 42", None),
        ("", None),
    ],
)
def test_text_answer(step, answer):
    assert TEXT.answer(step) == answer


def test_text_prompt_and_grade(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "1+1?", "answer": "2"}\n\n{"question": "2+2?", "answer": 4}\n')
    first, second = read_jsonl(path)
    assert TEXT.prompt(first) == "1+1?\n\n"
    assert TEXT.grade(first, ["hm", "answer: 2"])
    assert not TEXT.grade(first, ["answer: 2", "hm"])
    assert second.answer == "4"
    assert not TEXT.grade(TEXT.parse("what?"), ["answer: 2"])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"p.jsonl:2: not valid JSON"),
        ("[1]", r"p.jsonl:2: not a JSON object"),
        ('{"question": "a"}', r"p.jsonl:2: key 'answer' is missing"),
        ('{"question": "", "answer": "b"}', r"p.jsonl:2: key 'question' holds ''"),
        ('{"question": "a", "answer": true}', r"p.jsonl:2: key 'answer' holds True"),
    ],
)
def test_jsonl_bad_lines(tmp_path, line, message):
    path = tmp_path / "p.jsonl"
    path.write_text('{"question": "a", "answer": "b"}\n' + line + "\n")
    with pytest.raises(UserError, match=message):
        read_jsonl(path)


def test_jsonl_lines_end_with_a_line_feed_and_nothing_else(tmp_path):
    """JSON lets a text hold any other separator as it is; files of other editors begin with a mark or end with CR."""
    text = "a\u2028b\u2029c\x85d"
    rows = [json.dumps({"question": text, "answer": "1"}, ensure_ascii=False)] * 2
    for data in ("\n".join(rows), "\ufeff" + "\r\n".join(rows) + "\r\n"):
        (tmp_path / "p.jsonl").write_bytes(data.encode())
        assert [p.question for p in read_jsonl(tmp_path / "p.jsonl")] == [text] * 2


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"question": "a\\ud800", "answer": "b"}', "half of a character"),
        ('{"question": "a", "answer": "b\\udfff"}', "half of a character"),
        ('{"question": "a", "answer": ' + "9" * 5000 + "}", "not JSON that can be read"),
        ("[" * 100_000, "not JSON that can be read"),
    ],
)
def test_jsonl_lines_that_are_meant_to_break_it(line, message, tmp_path):
    (tmp_path / "p.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=message):
        read_jsonl(tmp_path / "p.jsonl")


def test_a_question_of_half_characters_is_refused():
    with pytest.raises(UserError, match="half of a character"):
        TEXT.parse("what\udc80?")


def test_jsonl_tells_of_the_first_bad_lines(tmp_path):
    (tmp_path / "p.jsonl").write_text("{\n" * 1000)
    with pytest.raises(UserError, match=r"and 980 more lines like these$"):
        read_jsonl(tmp_path / "p.jsonl")


def test_jsonl_names_every_bad_line(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text("{\n[]\n")
    with pytest.raises(UserError) as caught:
        read_jsonl(path)
    assert [line.split(": ")[0] for line in str(caught.value).splitlines()] == [f"{path}:1", f"{path}:2"]


def test_jsonl_file_errors(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        read_jsonl(tmp_path / "none.jsonl")
    (tmp_path / "empty.jsonl").write_text("\n")
    with pytest.raises(UserError, match="no problems"):
        read_jsonl(tmp_path / "empty.jsonl")
    (tmp_path / "latin.jsonl").write_bytes(b"\xe9")
    with pytest.raises(UserError, match="UTF-8"):
        read_jsonl(tmp_path / "latin.jsonl")


def test_text_generates_nothing():
    with pytest.raises(UserError, match="JSONL"):
        TEXT.generate(1, 0)
    with pytest.raises(UserError, match="empty"):
        TEXT.parse(" ")
