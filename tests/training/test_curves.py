"""Laws of `mercury report`: one file, all metrics of all runs, what differs; and what is refused."""

import html.parser
import json

import pytest

from mercury_jax.cli import main

pytest.importorskip("matplotlib")


@pytest.fixture
def runs(tmp_path, monkeypatch):
    """Two runs with other learning rates; the second one is writing a row."""
    for number, name in enumerate(("a", "b<i>")):
        folder = tmp_path / name
        folder.mkdir()
        config = {"name": "x", "out": str(folder), "optim": {"lr": 0.1 * (number + 1)}, "steps": 4}
        (folder / "config.json").write_text(json.dumps(config))
        rows = [{"step": n, "kind": "train", "loss": 4.0 - n - number, "tokens": 9 * n} for n in (1, 2)]
        rows.append({"step": 2, "kind": "eval", "loss": 1.25, "masked_accuracy": 0.5 + number / 4})
        (folder / "metrics.jsonl").write_text(
            "".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3' * number
        )
    monkeypatch.chdir(tmp_path)
    return tmp_path


class Cells(html.parser.HTMLParser):
    """The texts of the cells of tables, and all tags."""

    def __init__(self, text):
        super().__init__()
        self.found, self.tags, self.inside = [], [], False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.inside = tag in ("td", "th")
        if self.inside:
            self.found.append("")

    def handle_endtag(self, tag):
        self.inside = False

    def handle_data(self, data):
        if self.inside:
            self.found[-1] += data


def test_a_page_has_curves_last_values_and_what_differs(runs, capsys):
    assert main(["report", "a", "b<i>", "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"file": "report.html", "runs": ["a", "b<i>"]}
    page = (runs / "report.html").read_text()
    cells = Cells(page)
    assert cells.found == [
        "", "a", "b<i>", "steps", "2", "2", "loss", "2", "1", "loss, held out", "1.25", "1.25",
        "masked_accuracy, held out", "0.5", "0.75", "", "a", "b<i>", "optim.lr", "0.1", "0.2",
    ]  # fmt: skip
    assert cells.tags.count("svg") == 1 and not {"script", "i"} & set(cells.tags)
    assert "masked_accuracy" in page and "a, held out" in page


@pytest.mark.parametrize("name, begins", [("c.png", b"\x89PNG"), ("c.svg", b"<?xml"), ("c.pdf", b"%PDF")])
def test_the_ending_chooses_the_form(runs, name, begins):
    assert main(["report", "a", "--out", name, "--metrics", "loss"]) == 0
    assert (runs / name).read_bytes().startswith(begins)


@pytest.mark.parametrize(
    "metric, values, log",
    [
        ("loss", (3.0, 0.2, 0.004), True),
        ("loss", (3.0, 0.2, 0.15), False),
        ("loss", (3.0, 0.2, 0.0), False),  # a log axis would leave 0 out
        ("masked_accuracy", (0.9, 0.001), False),
    ],
)
def test_a_loss_that_spans_decades_has_a_logarithmic_axis(tmp_path, metric, values, log):
    (tmp_path / "config.json").write_text("{}")
    rows = [{"step": n, "kind": "train", metric: value} for n, value in enumerate(values)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert main(["report", str(tmp_path), "--out", str(tmp_path / "c.svg")]) == 0
    # An SVG keeps the labels of ticks as text: powers of ten on a logarithmic axis.
    assert (r"10^{" in (tmp_path / "c.svg").read_text()) == log


@pytest.mark.parametrize(
    "words, said",
    [
        (["none"], "there is no run in none"),
        (["a", "--out", "x.txt"], "out is 'x.txt'; allowed: a file that ends in .html"),
        (["a", "--out", "no/x.png"], "a file in a folder that exists"),
        (["a", "--metrics", "lost"], "metrics is 'lost'; allowed: loss, masked_accuracy"),
    ],
)
def test_what_cannot_be_drawn_is_refused(runs, capsys, words, said):
    assert main(["report", *words]) == 2
    assert said in capsys.readouterr().err
