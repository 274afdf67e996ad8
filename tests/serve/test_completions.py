"""Edit, apply and fill-in-the-middle as editors (Zed, Kilo, Continue, ProxyAI) send and read them."""

import dataclasses

import pytest

from mercury_jax.serve.service import Service
from tests.serve.api_client import choices, client_of, content_of, events, post
from tests.serve.chat.editors import kilo, kilo_text, zed
from tests.serve.scripted_engine import ScriptedEngine, snapshot, text_snapshots

EDIT, APPLY, FIM = "/v1/edit/completions", "/v1/apply/completions", "/v1/fim/completions"
REGION, NEW = "def f(x):\n    return 1", "def f(x):\n    return x + 1"
DOCS = f"""<|recently_viewed_code_snippets|>
<|/recently_viewed_code_snippets|>

<|current_file_content|>
current_file_path: src/f.py
import os

<|code_to_edit|>
{REGION}<|cursor|>
<|/code_to_edit|>

print(f(2))
<|/current_file_content|>

<|edit_diff_history|>
<|/edit_diff_history|>
"""
EXAMPLE = f"""<|recently_viewed_code_snippets|>
<|/recently_viewed_code_snippets|>
<|edit_diff_history|>
<|/edit_diff_history|>
<|current_file_content|>
import os

{REGION}

print(f(2))
<|/current_file_content|>
<|code_to_edit|>
{REGION}<|cursor|>
<|/code_to_edit|>"""
FILE = "<|original_code|>\na = 1\nb = 2\n<|/original_code|>\n\n<|update_snippet|>\n{}\n<|/update_snippet|>"
PLAIN, UNCLEAR = FILE.format("# ... existing code ...\nb = 2\nc = 3"), FILE.format("c = 3")


@pytest.fixture(scope="module")
def instructed(nano):
    """The embedded model, declared to follow instructions."""
    return dataclasses.replace(nano, card={**nano.card, "instruct": True})


def payload_of(content, **fields):
    return {"model": "mercury-coder", "messages": [{"role": "user", "content": content}], **fields}


def edits(engine, text):
    """Returns the content of the response, after checking that the stream has the same."""
    body = post(engine, payload_of(text, max_tokens=512, stream=False), EDIT, "EditCompletion")
    content = body["choices"][0]["message"]["content"]
    chunks = events(engine, payload_of(text), EDIT, "EditChunk")
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"} and content_of(chunks) == content
    assert body["id"].startswith("cmpl-") and body["id"] != chunks[0]["id"]
    return content


@pytest.mark.parametrize("text", [DOCS, EXAMPLE])
@pytest.mark.parametrize("reply", [f"```\n{NEW}\n```", f"```python\n{NEW}\n```", NEW])
def test_zed_and_kilo_read_the_region_of_an_edit(instructed, text, reply):
    content = edits(ScriptedEngine(instructed, text_snapshots(instructed, "```", reply)), text)
    assert content == f"```\n{NEW}\n```" and zed(content) == kilo(content) == NEW


@pytest.mark.parametrize("reply", ["None", "```\nNone\n```", f"```\n{REGION}\n```", ""])
def test_zed_and_kilo_read_nothing_where_nothing_changed(instructed, reply):
    content = edits(
        ScriptedEngine(instructed, [snapshot(instructed.tokenizer.encode(reply), finish="stop")]), DOCS
    )
    assert content == "None" and zed(content) is None and kilo(content) is None


def test_an_edit_cut_off_by_the_length_changes_nothing(instructed):
    content = edits(
        ScriptedEngine(instructed, text_snapshots(instructed, "```", "```\ndef f(x):", finish="length")), DOCS
    )
    assert content == "None"


def test_a_base_model_fills_the_region_as_a_gap(nano):
    engine = ScriptedEngine(nano, text_snapshots(nano, NEW))
    assert zed(edits(engine, DOCS)) == kilo(edits(engine, EXAMPLE)) == NEW
    job = engine.tickets[0].request
    assert nano.tokenizer.decode(job.prompt) == "import os\n\n"
    assert nano.tokenizer.decode(job.suffix) == "\n\nprint(f(2))"


def test_kilo_reads_a_streamed_fim_completion(nano):
    engine = ScriptedEngine(nano, text_snapshots(nano, "a, ", "a, b"))
    payload = {"model": "mercury-edit", "prompt": "def f(", "suffix": "):\n", "max_tokens": 150}
    chunks = events(engine, payload, FIM, "TextChunk")
    assert "".join(kilo_text(c) for c in choices(chunks)) == "a, b"


def test_an_unambiguous_update_is_merged_without_the_model(nano, instructed):
    for lm in (nano, instructed):
        engine = ScriptedEngine(lm, text_snapshots(lm, "not asked"))
        body = post(engine, payload_of(PLAIN, temperature=0, max_tokens=4096), APPLY, "EditCompletion")
        assert body["choices"][0]["message"]["content"] == "a = 1\nb = 2\nc = 3" and not engine.tickets
        assert content_of(events(engine, payload_of(PLAIN), APPLY, "EditChunk")) == "a = 1\nb = 2\nc = 3"


def test_an_ambiguous_update_needs_a_model_that_follows_instructions(nano, instructed):
    engine = ScriptedEngine(instructed, text_snapshots(instructed, "```\na = 1\nb = 2\nc = 3\n```"))
    body = post(engine, payload_of(UNCLEAR), APPLY, "EditCompletion")
    assert body["choices"][0]["message"]["content"] == "a = 1\nb = 2\nc = 3" and len(engine.tickets) == 1
    engine = ScriptedEngine(nano, text_snapshots(nano, "a file lost"))
    refused = client_of(engine).post(APPLY, json=payload_of(UNCLEAR))
    assert refused.status_code == 400 and not engine.tickets
    error = refused.json()["error"]
    assert error["param"] == "messages" and "nano does not merge" in error["message"]


def test_without_instructions_a_similar_line_is_inserted_as_a_new_one(nano, instructed):
    file = "function f(x) {\n  log(x);\n  return x;\n}\n"
    update = "function f(x) {\n  log(z);\n  // ... existing code ..."
    text = f"<|original_code|>\n{file}\n<|/original_code|>\n<|update_snippet|>\n{update}\n<|/update_snippet|>"
    body = post(ScriptedEngine(nano, text_snapshots(nano, "x")), payload_of(text), APPLY, "EditCompletion")
    assert body["choices"][0]["message"]["content"] == file.replace("  log(x)", "  log(z);\n  log(x)")
    engine = ScriptedEngine(instructed, text_snapshots(instructed, "```\nmerged\n```"))
    body = post(engine, payload_of(text), APPLY, "EditCompletion")
    assert body["choices"][0]["message"]["content"] == "merged\n"


@pytest.mark.parametrize("fields", [{"rule": "nothing"}, {"logit_bias": {"999999999": 1}}], ids=str)
def test_without_an_answer_parameters_are_checked_too(scripted_app, fields):
    body = {"model": "nano", "prompt": "a", "max_tokens": 0}
    assert scripted_app.post(body, "/v1/completions").status_code == 200
    scripted_app.refuses({**body, **fields}, "/v1/completions")


def test_bad_words_count_as_a_grammar(scripted_app, monkeypatch):
    """They are compiled where grammars are, and only for a prompt that fits."""
    sizes, submit = [], Service.submit

    def recorded(self, prepare, count, grammar_bytes=None, *rest):
        sizes.append(grammar_bytes)
        return submit(self, prepare, count, grammar_bytes, *rest)

    monkeypatch.setattr(Service, "submit", recorded)
    body = {"model": "nano", "prompt": "a", "bad_words": ["upon"]}
    assert scripted_app.post(body, "/v1/completions").status_code == 200 and sizes == [
        len('{"bad_words":["upon"]}')
    ]
    error = scripted_app.refuses({**body, "prompt": "a b" * 2_000, "bad_words": ["new"]}, "/v1/completions")
    assert error["code"] == "context_length_exceeded"
