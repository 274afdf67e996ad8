"""Laws of the tasks: answers are right, and unique where they must be; no side leaks to the other."""

import itertools
import re

import numpy as np
import pytest

from mercury_jax import tasks
from mercury_jax.tasks import TASKS, Task, countdown, draw, sudoku
from mercury_jax.tasks.arithmetic import columns
from mercury_jax.tasks.task import hashed_split

EVERY = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)
SUDOKUS = pytest.mark.parametrize("task", [TASKS["sudoku4"], TASKS["sudoku9"]], ids=lambda g: g.name)
COUNTDOWNS = pytest.mark.parametrize("count", [3, 4])


def _problems(task: Task, n: int, seed: int = 0) -> list[tasks.Problem]:
    rng = np.random.default_rng(seed)
    return [task.generate(rng) for _ in range(n)]


def _n(task: Task) -> int:
    return 12 if task.name == "sudoku9" else 100


@EVERY
def test_own_answers_are_right_and_corrupted_ones_wrong(task: Task):
    for problem in _problems(task, _n(task)):
        assert task.check(problem.input, problem.output)
        assert task.check(problem.input, problem.output + "\n")
        for i, char in enumerate(problem.output):
            if char.isdigit():
                wrong = f"{problem.output[:i]}{(int(char) + 1) % 10}{problem.output[i + 1 :]}"
                assert not task.check(problem.input, wrong)
        for wrong in ("", problem.output[:-1], problem.input, problem.output * 2, "９", "9" * 5_000):
            assert not task.check(problem.input, wrong)


@EVERY
def test_the_seed_decides_and_both_sides_exist(task: Task):
    assert _problems(task, 5, seed=1) == _problems(task, 5, seed=1)
    assert _problems(task, 5, seed=1) != _problems(task, 5, seed=2)
    rng = np.random.default_rng(0)
    for side in ("train", "validation", "test"):
        assert task.split(draw(task, rng, side).input) == side


@EVERY
def test_bad_input_is_refused_in_words(task: Task):
    for call in (task.canonical, task.split, lambda text: task.check(text, "1")):
        with pytest.raises(ValueError, match=r"input: 'one\+two'; must"):
            call("one+two")


def test_the_hash_is_stable_for_ever():
    sides = [hashed_split("x", str(i)) for i in range(4_000)]
    assert 150 < sides.count("test") < 230 and 40 < sides.count("validation") < 85  # 188 and 62 expected
    assert [i for i in range(40) if sides[i] != "train"] == [17, 30]


def _moved(text: str, rng: np.random.Generator) -> str:
    """A random symmetric image of a sudoku, by other means than the library's."""
    rows = [[int(char) for char in row] for row in text.split("\n")]
    size = len(rows)
    box = int(size**0.5)
    names = [0, *(rng.permutation(size) + 1)]

    def shuffled(lines: list) -> list:
        bands = [lines[i : i + box] for i in range(0, size, box)]
        return [bands[b][k] for b in rng.permutation(box) for k in rng.permutation(box)]

    if rng.random() < 0.5:
        rows = [list(column) for column in zip(*rows)]
    rows = shuffled(rows)
    rows = list(zip(*shuffled(list(zip(*rows)))))
    return "\n".join("".join(str(names[digit]) for digit in row) for row in rows)


@SUDOKUS
def test_symmetric_sudokus_share_the_canonical_form(task: Task):
    rng = np.random.default_rng(3)
    problems = _problems(task, _n(task))
    for problem in problems:
        assert len({task.canonical(_moved(problem.input, rng)) for _ in range(5)}) == 1
        assert task.canonical(_moved(problem.input, rng)) == task.canonical(problem.input)
    if task.name == "sudoku9":  # the classes are too many to meet twice
        assert len({task.canonical(problem.input) for problem in problems}) == len(problems)


def test_the_canonical_form_of_sudoku4_is_exact():
    """There are 13 classes of 4x4 sudokus with four givens, and 2 of solved grids."""
    rng = np.random.default_rng(0)
    four = {p.input for p in _problems(TASKS["sudoku4"], 4_000) if p.input.count("0") == 12}
    assert len({TASKS["sudoku4"].canonical(text) for text in four}) == 13
    grids = [sudoku.write_grid(grid.reshape(4, 4)) for grid in sudoku.solved_4x4()]
    assert len({TASKS["sudoku4"].canonical(grid) for grid in grids}) == 2
    assert len(grids) == 12
    assert TASKS["sudoku4"].canonical(_moved(grids[0], rng)) == TASKS["sudoku4"].canonical(grids[0])


def _solutions(cells: list[int], size: int) -> int:
    """How many solutions, up to 2: plain backtracking, first blank first, on sets."""
    if 0 not in cells:
        return 1
    i = min((k for k in range(size**2) if not cells[k]), key=lambda k: len(_free(cells, k, size)))
    found = 0
    for digit in _free(cells, i, size):
        found += _solutions([*cells[:i], digit, *cells[i + 1 :]], size)
        if found > 1:
            break
    return found


def _free(cells: list[int], i: int, size: int) -> set[int]:
    box = int(size**0.5)
    r, c = divmod(i, size)
    seen = {
        cells[k]
        for k in range(size**2)
        if k // size == r or k % size == c or (k // size // box, k % size // box) == (r // box, c // box)
    }
    return set(range(1, size + 1)) - seen


@SUDOKUS
def test_sudokus_have_one_solution_and_their_share_of_givens(task: Task):
    few, many = (30, 45) if task.name == "sudoku9" else (4, 10)
    for problem in _problems(task, _n(task)):
        cells = [int(char) for char in problem.input.replace("\n", "")]
        assert few <= sum(digit > 0 for digit in cells) <= many
        assert _solutions(cells, int(len(cells) ** 0.5)) == 1


def test_sudoku_answers_must_keep_the_givens():
    puzzle, answer = "1000\n0002\n4003\n0000", "1234\n3412\n4123\n2341"  # a line of the public file
    assert TASKS["sudoku4"].check(puzzle, answer)
    assert not TASKS["sudoku4"].check(puzzle, answer.translate(str.maketrans("1234", "2341")))
    assert TASKS["sudoku4"].split(puzzle) == "test"


def _reachable(numbers: list[int], target: int) -> bool:
    """Brute force over ordered pairs."""
    if len(numbers) == 1:
        return numbers[0] == target
    for i, j in itertools.permutations(range(len(numbers)), 2):
        a, b = numbers[i], numbers[j]
        rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
        made = [a + b, a * b, *([a - b] if a >= b else []), *([a // b] if b and a % b == 0 else [])]
        if any(_reachable([*rest, value], target) for value in made):
            return True
    return False


@COUNTDOWNS
def test_countdown_checks_every_rule(count: int):
    task = TASKS[f"countdown{count}"]
    for problem in _problems(task, 100):
        *numbers, target = map(int, problem.input.split(","))
        assert 1 <= min(numbers) <= max(numbers) <= 99
        assert 10 <= target <= 99
        for equation in problem.output.split(","):
            left, right = equation.split("=")
            assert re.fullmatch(r"\d+[-+*/]\d+", left)
            a, op, b = re.split(r"([-+*/])", left)
            m, n = int(a), int(b)
            assert {"+": m + n, "-": m - n, "*": m * n, "/": m / max(n, 1)}[op] == int(right) >= 0
            swapped = problem.output.replace(equation, f"{b}{op}{a}={right}")
            assert task.check(problem.input, swapped) == (op in "+*" or a == b)


def test_countdown_accepts_what_the_public_file_holds():
    check = TASKS["countdown3"].check
    assert check("15,44,79,50", "44-15=29,79-29=50")
    assert check("1,2,12,25", "2*12=24,1+24=25")
    assert TASKS["countdown3"].split("79,15,44,50") == "test"
    for wrong in ("44-15=29", "44-15=29,79-29=50,50-0=50", "79-29=50,44-15=29", "15-44=29,79-29=50"):
        assert not check("15,44,79,50", wrong)
    assert not check("8,32,7,32", "8-7=1")
    assert not check("5,7,50,60", "5+5=10,50+10=60")
    assert not check("0,0,50,45", "0/0=5,50-5=45")
    assert not check("15,44,79,50", "44-15=29,79-29=" + "5" * 5_000)  # int() refuses so many digits


def test_the_countdown_trace_shows_the_answer_first():
    lines = "15:-35+65|-35+123\n44:-6+94|-64+94\n79:-29+129|-29+59"
    assert countdown.trace([15, 44, 79], 50).text == lines
    problems = _problems(TASKS["countdown3"], 300)
    for problem in problems:
        *numbers, target = map(int, problem.input.split(","))
        assert problem.thinking is not None
        assert problem.thinking == countdown.trace(numbers, target).text
        sides = [re.split(r"[:|]", line) for line in problem.thinking.split("\n")]
        assert [int(x) for x, _, _ in sides] == numbers
        values = [[re.findall(r"\d+", side) for side in line[1:]] for line in sides]
        at = next(i for i, (needs, makes) in enumerate(values) if set(needs) & set(makes))
        need = next(need for need in values[at][0] if need in values[at][1])
        first, last = problem.output.split(",")
        assert first.endswith(f"={need}")
        assert sorted(re.findall(r"\d+", last)) == sorted([str(numbers[at]), need, str(target)])
    assert np.mean([len(problem.thinking or "") for problem in problems]) < 60


def test_the_countdown_sieve_follows_the_solver():
    rng = np.random.default_rng(0)
    numbers, targets = rng.integers(1, 100, (400, 3)), rng.integers(10, 100, 400)
    numbers[:200] = rng.integers(1, 13, (200, 3))
    hits = countdown.is_solvable(numbers, targets)
    for row, target, hit in zip(numbers.tolist(), targets.tolist(), hits):
        assert (countdown.trace(row, target).solution is not None) == hit
        assert not hit or _reachable(row, target)


@COUNTDOWNS
def test_the_order_of_countdown_numbers_does_not_matter_to_the_split(count: int):
    task = TASKS[f"countdown{count}"]
    for problem in _problems(task, 20):
        *numbers, target = problem.input.split(",")
        for order in itertools.permutations(numbers):
            assert task.split(",".join([*order, target])) == task.split(problem.input)


def test_written_columns():
    assert columns(347, "+", 585) == "7+5=12,4+8+1=13,3+5+1=09"
    assert columns(932, "-", 585) == "12-5=7,13-8-1=4,9-5-1=3"
    for problem in _problems(TASKS["add4"], 50) + _problems(TASKS["sub3"], 50):
        assert problem.thinking is not None
        digits = "".join(part.split("=")[1][-1] for part in reversed(problem.thinking.split(",")))
        carry = "1" if re.search(r"\+.*=1\d$", problem.thinking.split(",")[-1]) else ""
        assert int(carry + digits) == int(problem.output)


def test_additions_of_every_length_and_form_are_held_out_by_the_pair():
    rng = np.random.default_rng(0)
    task, lengths = TASKS["add3"], set()
    for _ in range(200):
        problem = draw(task, rng, "test")
        a, b = re.findall(r"\d+", problem.input)
        lengths.add((len(a), len(b)))
        for form in ("{}+{}=", "{} + {} =", "{}+{}", "{} + {}", "What is {}+{}?", "What is {} + {}?"):
            for question in (form.format(a, b), form.format(b, a)):
                assert task.split(question) == "test" and task.check(question, problem.output)
    assert lengths == {(p, q) for p in (1, 2, 3) for q in (1, 2, 3)} - {(1, 1)}
    assert task.canonical("What is 585+347?") == "347+585="
    assert task.split("4+5=") == "train"
    with pytest.raises(ValueError, match="must look like"):
        TASKS["sub3"].canonical("1-2=")


def test_draw_refuses_another_split():
    with pytest.raises(ValueError, match="split is 'dev'; allowed: train, validation, test"):
        draw(TASKS["add2"], np.random.default_rng(0), "dev")  # pyright: ignore[reportArgumentType]
