"""`mercury bench repair`: which rules repair a wrong token."""

from __future__ import annotations

from collections.abc import Sequence

from mercury_jax.cli import bench, options, show
from mercury_jax.cli.parser import Parser

MORE = """\
examples:
  mercury bench repair --limit 512
  mercury bench repair --rules default wino --seed 7 --json

The answers are held-out 4x4 Sudokus with one wrong digit: the puzzle in the prompt determines the truth. Each call is
mj.edit, with the answer as text. `settled`: the whole answer. `drafting`: half of the other open cells are masks
again, for rules that revise only while they draft. The rule `default` is mj.edit without a sampler."""


def parser() -> Parser:
    p = Parser(
        "bench repair", "Put a wrong digit into a finished answer, and see which rules repair it.", MORE
    )
    bench.model(p)
    p.add_argument(
        "--rules",
        nargs="+",
        metavar="NAME",
        help="rules, or `default` (default: all that edit, and the plain ones)",
    )
    bench.count(p, "--limit", 256, "texts of each setting")
    bench.count(p, "--batch", 64, "rows together")
    bench.ending(p, "texts and errors")
    return p


def run(argv: Sequence[str]) -> int:
    args = parser().read(argv)
    from mercury_jax.bench import repair, settings

    names = (*repair.EDITING, *repair.PLAIN)
    if args.rules is not None:
        named = [name for name in args.rules if name != repair.DEFAULT]
        names = tuple(dict.fromkeys(s.rule for s in settings.settings(named))) if named else ()
        names = (repair.DEFAULT, *names) if repair.DEFAULT in args.rules else names
    options.writable("--out", args.out)
    lm, rows = show.load(args.model), []
    for row in repair.run(lm, names, n=args.limit, seed=args.seed, batch=args.batch):
        rows.append(row)
        bench.write(args.out, rows)
        if args.json:
            show.emit(row)
        elif "refused" in row:
            print(f"{row['rule']:18} {row['setting']:9} refused: {row['refused']}")
        else:
            print(
                f"{row['rule']:18} {row['setting']:9} repaired {100 * row['repaired']:5.1f}% of {row['n']} "
                f"(95% {100 * row['low']:.1f} to {100 * row['high']:.1f}), all right {100 * row['solved']:.1f}%, "
                f"{row['forwards']:.1f} forwards"
            )
    return 0
