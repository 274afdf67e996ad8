"""lm-evaluation-harness on local tasks, with nano and a random LLaDA: the figures are those of `mercury eval`.

Run by `make lm-eval`, in an environment of its own; no network is needed.
"""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import lm_eval
import numpy as np
import pytest
from lm_eval.tasks import TaskManager
from lm_eval.utils import simple_parse_args_string

import mercury_jax as mj
from mercury_jax import evaluate, hub, models, tasks
from mercury_jax.decode import presets
from mercury_jax.evaluate.harness import MercuryModel
from tests.hub.goldens_of import GOLDENS, golden
from tests.tiny import tiny

N = 24
GENERATE = """
task: local_sums
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{input}}}}"
doc_to_target: "{{{{output}}}}"
generation_kwargs: {{until: [], max_gen_toks: {tokens}, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOOSE = """
task: local_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{input}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: 0
target_delimiter: ""
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ROLL = """
task: local_text
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""
PAGE = Path(__file__).parents[1] / "docs" / "published-figures.md"
CHECKPOINTS = {  # a small random one for each preset of the page; "": no preset
    "": "diffusion_gemma",
    "llada": "llada",
    "dream": "dream",
    "fast_dllm": "llada",
    "fast_dllm_dream": "dream",
    "fast_dllm_v2": "fast_dllm",
    "llada2": "llada2",
    "llada21": "llada2",
    "open_dcoder": "open_dcoder",
    "sdar": "sdar",
}


def published() -> tuple[list[dict], set[str]]:
    """The `--model_args` of the page's tables, each with those of its column's heading, and the tasks' names."""
    found, names, heading = [], set(), ""
    for line in PAGE.read_text("utf-8").split("\n## ", 1)[1].splitlines():  # behind its introduction
        spans = re.findall(r"`([^`]+)`", line)
        begun = [span for span in spans if span.startswith("--model_args ")]
        if begun or not line.startswith("|"):
            heading = begun[0].removeprefix("--model_args ").removesuffix("...") if begun else ""
        found += [heading + span for span in spans if re.fullmatch(r"\w+=\S+", span)]
        if line.startswith("|"):
            names |= {span for span in spans if re.fullmatch(r"[a-z0-9_-]+", span)}
    return [simple_parse_args_string(arguments) for arguments in found], names


@pytest.fixture(scope="module")
def local(tmp_path_factory):
    """A folder with three tasks and their files."""
    folder = tmp_path_factory.mktemp("tasks")
    os.environ["HF_HOME"] = str(folder / "cache")
    problems = tasks.draw_distinct(tasks.TASKS["add3"], N, seed=3, split="validation")
    choices = [
        {"input": "import ", "choices": ["os\n", "zz\n", "qq\n"]},
        {"input": "def ", "choices": ["f(x):", "1 1 1"]},
    ]
    texts = [{"text": "import os\nimport sys\n"}, {"text": "for i in range(3):\n    print(i)\n" * 30}]
    sums = [{"input": p.input, "output": p.output} for p in problems]
    for name, rows, task in (("sums", sums, GENERATE), ("choices", choices, CHOOSE), ("texts", texts, ROLL)):
        file = folder / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        (folder / f"{name}.yaml").write_text(task.format(file=file, tokens=64))
    return folder


@pytest.fixture(scope="module")
def llada(tmp_path_factory):
    """A random checkpoint in LLaDA's published format."""
    one = tiny("bidirectional")
    plain = dict(qk_norm=False, tied=False, zero_centred=False, scale_embed=False, block=32, kv_heads=2)
    model = models.build(dataclasses.replace(one.model.config, **plain))
    lm = dataclasses.replace(one, model=model, params=jax.jit(model.init)(jax.random.key(2)))
    return str(hub.save_hf(tmp_path_factory.mktemp("llada") / "hf", lm, family="llada"))


def harness(local, model, task, **more):
    return lm_eval.simple_evaluate(
        model, tasks=[task], task_manager=TaskManager(include_path=str(local)), bootstrap_iters=0, **more
    )


@pytest.mark.parametrize("kind", ["nano", "llada"])
def test_answers_and_accuracy_are_those_of_mercury_eval(kind, local, llada):
    source = llada if kind == "llada" else "nano"
    model = MercuryModel(source, batch_size=8)
    own = evaluate.run(model.lm, "add3", file=local / "sums.jsonl", max_tokens=64, batch=8)
    found = harness(local, model, "local_sums", apply_chat_template=True)
    answers = {s["doc"]["input"]: s["resps"][0][0] for s in found["samples"]["local_sums"]}
    assert [answers[row["input"]] for row in own.rows] == [row["prediction"] for row in own.rows]
    assert found["results"]["local_sums"]["exact_match,none"] == own.summary["accuracy"]
    assert (own.summary["accuracy"] > 0.9) == (kind == "nano")


@pytest.mark.parametrize("kind", ["nano", "llada"])
def test_choices_are_those_of_score(kind, local, llada):
    model = MercuryModel(llada if kind == "llada" else "nano", samples=16, seed=5)
    found = harness(local, model, "local_choice")
    right = []
    for sample in found["samples"]["local_choice"]:
        doc = sample["doc"]
        own = [
            mj.score(model.lm, *model._pair(doc["input"], c), samples=16, seed=5).log_p
            for c in doc["choices"]
        ]
        np.testing.assert_allclose([float(r[0][0]) for r in sample["resps"]], own, rtol=1e-5)
        right.append(int(np.argmax(own)) == 0)
    assert found["results"]["local_choice"]["acc,none"] == np.mean(right)


def test_a_preset_is_the_script_of_its_authors(local, llada):
    """LLaDA's arguments, whose 16 tokens win over the 64 of the task."""
    script = dict(gen_length=16, steps=8, block_length=8, cfg_scale=0.5)
    model = MercuryModel(llada, preset="llada", batch_size=8, **script)
    found = harness(local, model, "local_sums", gen_kwargs="do_sample=True,temperature=0.7")["samples"][
        "local_sums"
    ]
    prompts = [model._ids(s["doc"]["input"]) for s in found]
    own = mj.sample(model.lm, prompts, **mj.presets.llada(**script))
    assert [s["resps"][0][0] for s in found] == own.texts
    assert set(own.lengths) <= set(range(17))


def test_guidance_counts_for_answers_and_log_likelihoods(local, llada):
    model = MercuryModel(llada, guidance=1.5, samples=8, max_gen_toks=8)
    found = harness(local, model, "local_choice")["samples"]["local_choice"]
    for sample in found:
        pairs = [model._pair(sample["doc"]["input"], c) for c in sample["doc"]["choices"]]
        own = [mj.score(model.lm, *pair, samples=8, guidance=1.5).log_p for pair in pairs]
        np.testing.assert_allclose([float(r[0][0]) for r in sample["resps"]], own, rtol=1e-5)
    request = lm_eval.api.instance.Instance("generate_until", {}, ("12+34=", {"until": []}), 0)
    own = mj.sample(model.lm, [model._ids("12+34=")], max_tokens=8, guidance=1.5, negative="masked")
    assert model.generate_until([request], disable_tqdm=True) == own.texts


def test_an_answer_may_be_begun_by_the_task(local):
    task = (local / "sums.yaml").read_text().replace("local_sums", "local_begun") + 'gen_prefix: "9"\n'
    (local / "begun.yaml").write_text(task)
    model = MercuryModel("nano", batch_size=8)
    found = harness(local, model, "local_begun", apply_chat_template=True)["samples"]["local_begun"]
    tokenizer = model.lm.tokenizer
    render = lambda question: tokenizer.render([{"role": "user", "content": question}])
    prompts = [[*render(s["doc"]["input"]), *tokenizer.encode("9")] for s in found]
    own = mj.sample(model.lm, prompts, max_tokens=64)
    assert [s["resps"][0][0] for s in found] == own.texts


def test_a_long_text_is_scored_in_parts(local):
    model = MercuryModel("nano", samples=8)
    found = harness(local, model, "local_text")
    short, long = (json.loads(line)["text"] for line in (local / "texts.jsonl").read_text().splitlines())
    assert len(model.lm.tokenizer.encode(long)) > model.lm.model.config.context // 2
    nats = {s["doc"]["text"]: s["resps"][0][0] for s in found["samples"]["local_text"]}
    begin = model.lm.tokenizer.begin
    whole = mj.score(model.lm, begin or "", model.lm.tokenizer.encode(short), samples=8).log_p
    assert float(nats[short]) == pytest.approx(whole, rel=1e-5)
    bits = -(float(nats[short]) + float(nats[long])) / np.log(2) / len((short + long).encode())
    assert found["results"]["local_text"]["bits_per_byte,none"] == pytest.approx(bits, rel=1e-5)


def test_greedy_answers_are_told_apart():
    model = MercuryModel("nano", check_greedy=True, samples=4)
    greedy = mj.sample(model.lm, "import os\n", max_tokens=2, temperature=0.0).text
    request = lambda answer: lm_eval.api.instance.Instance("loglikelihood", {}, ("import os\n", answer), 0)
    found = model.loglikelihood([request(greedy), request("zz zz")], disable_tqdm=True)
    assert [flag for _, flag in found] == [True, False]


@pytest.mark.parametrize(
    "arguments, told",
    [({"rule": "treshold"}, "threshold is the nearest"),
     ({"rule": "threshold", "q": 1}, "argument of threshold is 'q'"),
     ({"stepz": 3}, "no further arguments without rule="), ({"preset": "dreem"}, "dream is the nearest"),
     ({"preset": "dream", "gen_length": 8}, "argument of dream is 'gen_length'"),
     ({"preset": "dream", "block": 8}, "block is 8; allowed: nothing beside preset=dream"),
     ({"preset": "dream", "alg": "entropi"}, "alg is 'entropi'"),
     ({"preset": "dream", "max_gen_toks": 64}, "max_gen_toks is 64; allowed: nothing beside preset=dream"),
     ({"preset": "llada", "cfg_scale": 0.5, "guidance": 1.0}, "guidance is 1.0; allowed: 0 beside"),
     ({"max_gen_toks": 0}, "max_gen_toks is 0"), ({"guidance": "much"}, "guidance is 'much'"),
     ({"batch_size": "auto"}, "batch_size is 'auto'")],
)  # fmt: skip
def test_arguments_are_refused_before_the_model_loads(arguments, told):
    with pytest.raises(ValueError, match=told):
        MercuryModel("no/such/model", **arguments)


def test_published_arguments_are_accepted_and_their_tasks_exist(monkeypatch):
    found, names = published()
    assert len(found) >= 75 and len(names) >= 30  # the page is read
    assert {arguments.get("preset", "") for arguments in found} == set(CHECKPOINTS)
    assert sorted(names - set(TaskManager().all_tasks)) == []
    monkeypatch.setattr(hub, "load", lambda *args, **how: None)
    for arguments in found:
        MercuryModel(**arguments)


def test_keys_that_a_user_vouches_for_are_ignored(tmp_path):
    shutil.copytree(GOLDENS / "qwen3", tmp_path / "m")
    config = tmp_path / "m" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"logit_scale": 0.5, "logit_bias": 1.5}))
    with pytest.raises(ValueError, match="logit_scale=0.5 is unknown"):
        MercuryModel(str(tmp_path / "m"))
    told = " ".join(
        MercuryModel(str(tmp_path / "m"), ignore_config="logit_scale+logit_bias").lm.card["notes"]
    )
    assert "logit_scale" in told and "logit_bias" in told


@pytest.mark.parametrize("preset", CHECKPOINTS)
def test_published_arguments_decode_a_random_model(preset, monkeypatch):
    """The first and the last ones of each preset, with answers of 8 tokens."""
    monkeypatch.setattr(presets, "LLADA_EOS", 5)  # the ids of LLaDA are none of a small vocabulary
    monkeypatch.setattr(presets, "LLADA_EOT", 9)
    said = golden(CHECKPOINTS[preset]).said
    mask = int(said["mask_id"][0]) if "mask_id" in said else None
    lm = mj.load(GOLDENS / CHECKPOINTS[preset], dtype="float32", mask=mask)
    monkeypatch.setattr(hub, "load", lambda *args, **how: lm)
    of_preset = [arguments for arguments in published()[0] if arguments.get("preset", "") == preset]
    answers = [arguments for arguments in of_preset if "samples" not in arguments]
    for arguments in (answers[0], answers[-1]):
        model = MercuryModel(**arguments)
        out = mj.sample(model.lm, [[3, 5, 8]], **model.how | {"max_tokens": 8})
        assert len(out.tokens[0]) < 8 + lm.model.config.block  # some presets decode whole blocks


def test_settings_that_would_be_ignored_are_refused(local):
    model = MercuryModel("nano")
    with pytest.raises(ValueError, match="generation_kwargs is 'num_beams'"):
        harness(local, model, "local_sums", gen_kwargs="num_beams=4")


def test_the_command_of_the_documentation_runs(local, tmp_path):
    command = [sys.executable, "-m", "mercury_jax.evaluate.harness", "run", "--model", "mercury_jax", "--model_args",
               "pretrained=nano,rule=threshold,p=0.9", "--tasks", "local_sums", "--include_path", str(local),
               "--apply_chat_template", "--output_path", str(tmp_path), "--limit", "8"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    [file] = tmp_path.rglob("results_*.json")
    assert json.loads(file.read_text())["results"]["local_sums"]["exact_match,none"] >= 0.8
