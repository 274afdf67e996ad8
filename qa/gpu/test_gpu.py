"""On a GPU: every kernel form passes its check, and decoding gives the text of the CPU.

Run with `python -m pytest qa/gpu --platform cuda`, in an environment with jax[cuda].
"""

import json

import pytest

import mercury_jax as mj
from mercury_jax.cli import main
from mercury_jax.ops import device as kernel_device

QUESTIONS = ["389+784=", "12+7=", "347+585="]


@pytest.fixture(scope="module", autouse=True)
def gpu():
    import jax

    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU; run with --platform cuda")


def test_every_kernel_form_of_this_gpu_passes(tmp_path, monkeypatch):
    monkeypatch.setenv(kernel_device.FILE, str(tmp_path / "kernels.json"))
    assert main(["bench", "gpu", "check", "--out", str(tmp_path / "rows.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    if "no kernel is written" in rows[-1].get("left_out", ""):
        pytest.skip(rows[-1]["left_out"])
    verdicts = {row["form"]: row["verdict"] for row in rows if "verdict" in row}
    assert verdicts and set(verdicts.values()) == {"on"}, verdicts


def test_the_embedded_model_adds():
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    out = mj.sample(mj.load(), chats, temperature=0, seed=0)
    assert out.texts == [str(sum(map(int, question[:-1].split("+")))) for question in QUESTIONS]
