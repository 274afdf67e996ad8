"""Request models: what they accept and refuse, and that their JSON Schemas say the same."""

import gc
import itertools
import math
import time

import pytest
from jsonschema.validators import Draft202012Validator

from mercury_jax.decode.defaults import EFFORTS
from mercury_jax.serve import protocol
from mercury_jax.serve.errors import ApiError
from mercury_jax.serve.protocol import parse_request, refused_properties, request_schema
from tests.serve.api_client import PAYLOAD

MODELS = {
    "chat": protocol.ChatCompletionsRequest,
    "completions": protocol.CompletionsRequest,
    "fim": protocol.FimCompletionsRequest,
    "edit": protocol.EditCompletionsRequest,
    "apply": protocol.ApplyCompletionsRequest,
}
USER = [{"role": "user", "content": "hi"}]
MINIMAL = {
    "chat": {"model": "m", "messages": USER},
    "completions": {"model": "m", "prompt": "hi"},
    "fim": {"model": "m", "prompt": "hi"},
    "edit": {"model": "m", "messages": USER},
    "apply": {"model": "m", "messages": USER},
}
# Values in range, at its ends and out of it, of every JSON type.
VALUES = [
    None, True, False, 0, 1, -1, 2, 3, 16, 17, 5.0, 0.5, 1.5, -2.5, 2**31, -(2**63), 2**63, 2**70, 1e300, "", "a",
    "auto", "none", "instant", "medium", "minimal", "x" * 65, "x" * 300, [], ["a"], [""], ["a"] * 33, [1], [None], {},
    {"a": 1}, {"1": 5}, {"01": 5}, {"1": 101}, {"1": None}, {"include_usage": True}, {"include_usage": 1},
    {"type": "text"}, {"type": "json_object"}, {"type": "json_schema"}, {"type": "nothing"},
    {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}},
    {"type": "json_schema", "json_schema": {"name": "a b"}}, {"type": "json_schema", "json_schema": {"name": "n" * 65}},
    {"type": "function", "function": {"name": "f"}}, {"type": "function", "function": {}}, {"type": "function"},
    [{"type": "function", "function": {"name": "f", "parameters": {}}}],
    [{"type": "function", "function": {"name": "f", "strict": 1}}],
    [{"role": "user", "content": "hi"}], [{"role": "user"}], [{"role": "bot", "content": "hi"}],
    [{"role": "user", "content": [{"type": "text", "text": "hi"}]}], [{"role": "tool", "content": 5}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f", "arguments": "{}"}}]}],
    [{"role": "assistant", "tool_calls": [{"id": "1", "function": {"name": "f"}}]}],
]  # fmt: skip


CALL = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
# Fields of a message beside its role.
MESSAGE_FIELDS = [
    {}, {"content": None}, {"content": "hi"}, {"content": 5}, {"content": [{"type": "text", "text": "hi"}]},
    {"content": [{"type": "text"}]}, {"content": [{}]}, {"content": [{"type": "image_url", "text": "hi"}]},
    {"content": ["hi"]}, {"name": "f"}, {"name": ""}, {"name": "a b"}, {"tool_call_id": "1"}, {"tool_call_id": ""},
    {"tool_call_id": 1}, {"tool_calls": [CALL]}, {"tool_calls": [{**CALL, "type": "x"}]}, {"tool_calls": [{"id": "1"}]},
    {"function_call": CALL["function"]}, {"function_call": {"name": "a b"}}, {"function_call": {}},
]  # fmt: skip


def accepts(model, data):
    """Whether a request is accepted; a refusal counts only where it is a short 400."""
    try:
        parse_request(model, data)
    except ApiError as error:
        return not (error.status == 400 and isinstance(error.message, str) and len(error.message) < 400)
    return True


def schema_of(model):
    """The schema of a model as the document has it, with the fields that are refused."""
    schema = request_schema(model)
    return schema | {"properties": schema["properties"] | refused_properties(model)}


@pytest.mark.long
@pytest.mark.parametrize("name", MODELS)
def test_a_request_is_accepted_exactly_where_its_schema_is_valid(name):
    model, minimal = MODELS[name], MINIMAL[name]
    schema = Draft202012Validator(schema_of(model))
    assert accepts(model, minimal) and schema.is_valid(minimal)
    for field, value in itertools.product(schema_of(model)["properties"], VALUES):
        data = {**minimal, field: value}
        # Fields of `extra_body` count as fields of the request, which a schema does not say.
        inner = value if field == "extra_body" and isinstance(value, dict) else {}
        valid = schema.is_valid(data) and schema.is_valid({**inner, **data})
        assert accepts(model, data) == valid, (field, value)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool", "function", "bot"])
def test_the_fields_of_a_message_depend_on_its_role(role):
    model = protocol.ChatCompletionsRequest
    schema = Draft202012Validator(schema_of(model))
    for fields in MESSAGE_FIELDS:
        data = {"model": "m", "messages": [{"role": role, **fields}]}
        assert accepts(model, data) == schema.is_valid(data), data
    with_content = {"model": "m", "messages": [{"role": role, "content": "hi"}]}
    assert accepts(model, with_content) == (role not in ("tool", "bot"))


@pytest.mark.parametrize("name", MODELS)
def test_fields_that_constrain_the_answer_are_refused_by_name(name):
    fields = {"guided_json": {"type": "object"}, "guided_regex": "a+", "guided_choice": ["a"], "guided_grammar": "x",
              "structured_outputs": {"regex": "a"}, "regex": "a+", "ebnf": "x", "grammar": "x", "json_schema": {"a": 1},
              "structural_tag": {"a": 1}, "allowed_token_ids": [5], "bad_words_ids": [[5]], "min_tokens": 5,
              "functions": [{"name": "f"}], "function_call": "auto", "max_new_tokens": 5}  # fmt: skip
    if name in ("chat", "completions"):  # which have some of these fields
        fields = {field: value for field, value in fields.items() if field not in protocol.GUIDED_FIELDS}
        fields |= {"guided_whitespace_pattern": " "}
    else:
        fields |= {"bad_words": ["a"]}
    fields |= (
        {} if name == "chat" else {"response_format": {"type": "json_object"}, "max_completion_tokens": 5}
    )
    for field, value in fields.items():
        for data in ({field: value}, {"extra_body": {field: value}}):
            with pytest.raises(
                ApiError, match=f"{field} is [^:]*.*; allowed: no value, .*no such field. [A-Z]"
            ) as error:
                parse_request(MODELS[name], {**MINIMAL[name], **data})
            assert (error.value.status, error.value.param) == (400, field)
        parse_request(MODELS[name], {**MINIMAL[name], field: None, "user": "x"})


@pytest.mark.parametrize("name", MODELS)
def test_null_means_the_default_and_required_fields_have_none(name):
    model, minimal = MODELS[name], MINIMAL[name]
    request = parse_request(model, {**dict.fromkeys(model.model_fields), **minimal})
    for field, info in model.model_fields.items():
        assert field in minimal or getattr(request, field) == info.default
        assert info.is_required() == (field in minimal)
        without = {k: v for k, v in minimal.items() if k != field}
        assert accepts(model, without) == (field not in minimal)


@pytest.mark.parametrize("name", MODELS)
def test_unknown_fields_are_ignored(name):
    unknown = {"user": 5, "store": [True], "mode": "chat", "nextEdit": True, "top_a": math.pi, "": None}
    model, minimal = MODELS[name], MINIMAL[name]
    assert parse_request(model, {**minimal, **unknown}) == parse_request(model, minimal)


# Fields of other servers and of clients, which this server does not have.
FOREIGN = """\
frequency_penalty_range repetition_penalty_range repetition_penalty_slope
audio background conversation include input instructions max_output_tokens max_tool_calls metadata modalities
moderation previous_response_id prompt_cache_key prompt_cache_retention reasoning safety_identifier
service_tier store text truncation user verbosity web_search_options add_special_tokens cache_salt chat_template
chat_template_kwargs documents guided_decoding_backend ignore_eos include_stop_str_in_output kv_transfer_params
length_penalty mm_processor_kwargs priority prompt_embeds prompt_logprobs repetition_detection request_id
return_token_ids return_tokens_as_token_ids skip_special_tokens spaces_between_special_tokens
thinking_token_budget truncate_prompt_tokens use_beam_search vllm_xargs early_stopping include_reasoning
data_parallel_rank bootstrap_host bootstrap_port bootstrap_room custom_logit_processor custom_params lora_path
no_stop_trim rid separate_reasoning session_params stop_regex stream_reasoning return_hidden_states
return_routed_experts min_new_tokens extra_key logprob_start_len return_logprob top_logprobs_num
token_ids_logprob return_text_in_logprobs cache_prompt dynatemp_exponent dynatemp_range dry_allowed_length
dry_base dry_multiplier dry_penalty_last_n dry_sequence_breakers dynatemp grammar_lazy grammar_triggers id_slot
image_data lora min_keep mirostat mirostat_eta mirostat_tau n_discard n_indent n_keep n_predict n_probs
parse_tool_calls penalize_nl penalty_prompt post_sampling_probs preserved_tokens reasoning_format
reasoning_in_content repeat_last_n repeat_penalty response_fields return_progress return_tokens samplers
t_max_predict_ms thinking_forced_open timings_per_token top_n_sigma typical_p typ_p tfs_z xtc_probability
xtc_threshold adapter slot_id prompt_tokens adapter_id decoder_input_details details do_sample
return_full_text stop_sequences tool_prompt top_n_tokens truncate watermark guideline models provider preset
plugins route session_id top_a transforms usage debug cache_control image_config api_base api_key api_type
api_version allowed_openai_params base_url caching cooldown_time custom_llm_provider deployment_id drop_params
fallbacks guardrails headers hidden_params input_cost_per_token litellm_call_id litellm_metadata litellm_params
litellm_params_metadata litellm_trace_id logger_fn max_retries mock_response model_info model_list num_retries
organization prompt_variables proxy_server_request rpm tags timeout tpm tenant_id verbose extra_headers
extra_query request_timeout stream_chunk_size thinking no_log document_image_limit document_page_limit
prompt_mode random_seed safe_prompt guardrail citation_options compound_custom disable_tool_validation
exclude_domains include_domains search_settings compliance context_length_exceeded_behavior safety_model
draft_model draft_tokens max_draft_tokens mean_inp_token_count perf_metrics_in_response
prompt_cache_isolation_key prompt_cache_max_len prompt_truncate_len raw_output reasoning_history rewrite_inputs
rewrite_speculation speculation enable_thinking thinking_budget search_options search_parameters deferred
incremental_output result_format enable_search vl_high_resolution_images translation_options format keep_alive
options raw template system think images context anthropic_version betas container mcp_servers
max_tokens_to_sample output_config dry_range epsilon_cutoff eta_cutoff guidance_scale negative_prompt
no_repeat_ngram_size penalty_alpha smoothing_curve smoothing_factor temperature_last tfs dynatemp_low
dynatemp_high custom_token_bans banned_strings banned_tokens token_healing use_default_badwordsids rep_pen
rep_pen_range rep_pen_slope sampler_order sampler_seed max_length max_context_length instruction_template mode
character chat_instruct_command continue_ continue_prompt user_bio user_name bot_name greeting
auto_max_new_tokens ban_eos_token add_bos_token speculative_tokens quadratic_sampling nsigma skew id_session tab
nextEdit next_edit language file_path filepath extra segments debug_options snippets telemetry repo_name
organization_id use_cache prompt_id chat_id session conversation_id parent_message_id message_id action variant
version plan event_id client source origin title variables files features model_item background_tasks filter_ids
skill_ids folder_id tool_servers terminal_id tool_ids llm prompt_template modelname deployment engine config
context_window n_ctx stream_usage name id object created index
"""
# The same of messages, tools and functions, parts, calls, and formats.
FOREIGN_OF_MESSAGES = """\
id annotations audio reasoning_content reasoning reasoning_details thinking thinking_blocks cache_control images
citations metadata parsed provider_specific_fields finish_reason additional_kwargs response_metadata
usage_metadata example type index timestamp created_at updated_at weight ephemeral status phase model parts
files experimental_attachments reasoning_text reasoning_opaque tool_name is_error recipient channel end_turn
content_type author invalid_tool_calls artifact signature encrypted_content logprobs summary message_id
"""
FOREIGN_INSIDE = """\
cache_control input_schema output_schema returns eager_input_streaming defer_loading annotations title examples
inputSchema custom metadata required allowed_callers display_name citations image_url input_audio file video_url
audio_url prompt_cache_breakpoint synthetic thinking encrypted_content index thought_signature extra_content
provider_specific_fields caller signature status args parsed_arguments result value grammar pattern choices
regex chunk_size
"""


@pytest.mark.parametrize("name", MODELS)
def test_fields_of_other_servers_are_not_taken_for_misspelt_ones(name):
    model, minimal = MODELS[name], MINIMAL[name]
    own = {"audio", "modalities", "web_search_options"} if name == "chat" else set()
    for field in set(FOREIGN.split()) - own:
        assert parse_request(model, {**minimal, field: 1}) == parse_request(model, minimal), field
    both = {
        **minimal,
        "maxTokens": 3,
        "max_new_tokens": 3,
        "max_tokens": 3,
    }  # a client that sends its own spelling too
    assert parse_request(model, both) == parse_request(model, {**minimal, "max_tokens": 3})
    if name != "chat":
        return
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    request = {
        "model": "m",
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "hi"}]},
            {"role": "assistant", "content": "hi", "tool_calls": [call]},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "tool_choice": {"type": "function", "function": {"name": "f"}},
        "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {}}},
        "stream_options": {"include_usage": True},
    }
    more, inside = (dict.fromkeys(names.split(), 1) for names in (FOREIGN_OF_MESSAGES, FOREIGN_INSIDE))

    def extended(value):
        if isinstance(value, list):
            return [extended(one) for one in value]
        if not isinstance(value, dict) or not value:
            return value
        made = {key: extended(one) for key, one in value.items()}
        return {**(more if "role" in value else inside), **made}

    wide = {"model": "m", **{key: extended(value) for key, value in request.items() if key != "model"}}
    assert parse_request(model, wide) == parse_request(model, request)


@pytest.mark.parametrize(
    "fields, path, near",
    [
        ({"max_token": 5}, "max_token", "max_tokens"),
        ({"tempature": 0}, "tempature", "temperature"),
        ({"rul": "threshold"}, "rul", "rule"),
        ({"rule-params": {}}, "rule-params", "rule_params"),
        ({"maxTokens": 5}, "maxTokens", "max_tokens"),
        ({"topP": 0.5}, "topP", "top_p"),
        ({"stops": ["a"]}, "stops", "stop"),
        ({"seeds": 1}, "seeds", "seed"),
        ({"responseFormat": {}}, "responseFormat", "response_format"),
        ({"extra_body": {"top_kk": 5}}, "top_kk", "top_k"),
        ({"stream_options": {"include_usages": True}}, "stream_options.include_usages", "include_usage"),
        ({"response_format": {"type": "json_object", "schemas": {}}}, "response_format.schemas", "schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "shema": {}}}},
         "response_format.json_schema.shema", "schema"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameter": {}}}]},
         "tools[0].function.parameter", "parameters"),
        ({"messages": [{"role": "user", "contents": "hi"}]}, "messages[0].contents", "content"),
        ({"messages": [*USER, {"role": "assistant", "tool_call": [CALL]}]}, "messages[1].tool_call", "tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{**CALL, "function": {"name": "f", "argument": "{}"}}]}]},
         "messages[0].tool_calls[0].function.argument", "arguments"),
    ],
)  # fmt: skip
def test_a_misspelt_field_is_refused_with_the_one_that_was_meant(fields, path, near):
    with pytest.raises(ApiError) as error:
        parse_request(MODELS["chat"], {**MINIMAL["chat"], **fields})
    assert error.value.message == f"{path} is not a field; did you mean {near}?"
    assert (error.value.status, error.value.param) == (400, path)


def test_values_that_mean_nothing_are_accepted():
    chat = parse_request(MODELS["chat"], {**MINIMAL["chat"], "stop": [""], "top_logprobs": 0})
    assert chat.stop_sequences == ()
    assert parse_request(MODELS["chat"], {**MINIMAL["chat"], "stop": ["", "a"]}).stop_sequences == ("a",)


def test_a_schema_is_not_lost_in_a_format_of_another_type():
    held = {"type": "json_object", "json_schema": {"name": "a", "schema": {"type": "object"}}}
    with pytest.raises(ApiError, match="json_schema is an object of 2 entries; .* Use the type json_schema"):
        parse_request(MODELS["chat"], {**MINIMAL["chat"], "response_format": held})


@pytest.mark.parametrize("bad", [True, "5", [5], {}, float("nan"), float("inf"), -float("inf"), 10**400])
def test_a_number_is_a_finite_number_and_nothing_else(bad):
    model, tried = protocol.ChatCompletionsRequest, 0
    for field, schema in request_schema(model)["properties"].items():
        kinds = [schema.get("type"), *(branch.get("type") for branch in schema.get("anyOf", ()))]
        if {"integer", "number"} & set(kinds):
            tried += 1
            with pytest.raises(ApiError) as error:
                parse_request(model, {**MINIMAL["chat"], field: bad})
            assert error.value.param == field
    assert tried >= 12


@pytest.mark.parametrize(
    "field, allowed, message",
    [
        ("best_of", 1, "best_of is 3; allowed: 1 (every answer that is generated is returned)"),
    ],
)
def test_one_allowed_value_is_the_same_value_in_json(field, allowed, message):
    """1.0 is 1, true is not. A refusal says which value is allowed, and why no other is."""
    model = protocol.CompletionsRequest
    schema = Draft202012Validator(schema_of(model))
    for value in (1, 1.0, 0, 0.0, 1.5, True, False, "function", "1", [], {}):
        data = {**MINIMAL["completions"], field: value}
        same = value == allowed and isinstance(value, bool) == isinstance(allowed, bool)
        assert accepts(model, data) == schema.is_valid(data) == same, value
    with pytest.raises(ApiError) as error:
        parse_request(model, {**MINIMAL["completions"], field: 3 if allowed else True})
    assert error.value.message == message
    request = parse_request(model, {**MINIMAL["completions"], "best_of": 1.0})
    assert type(request.best_of) is int


CASES = {
    "role": ({"messages": [*USER, {"role": "bot"}]}, "messages[1].role", "'bot'; allowed: assistant, developer"),
    "tag": ({"tool_choice": {}}, "tool_choice.type", "type is missing; allowed: allowed_tools, function"),
    "tag is a list": ({"response_format": {"type": ["text"]}}, "response_format.type", "list of 1 entries; allowed"),
    "inner field of a union": ({"tools": [{"type": "function", "function": {"name": 5}}]},
                               "tools[0].function.name", "5; allowed: a string of 1 to 64"),
    "missing": ({"tools": [{"type": "function"}]}, "tools[0].function", "function is missing; allowed: an object"),
    "missing at the top": ({"messages": ...}, "messages", "^messages is missing; allowed: a list of 1 to"),
    "null": ({"model": None}, "model", "null; allowed: a string of 1 to 256 characters .it has no default"),
    "no member of a union": ({"stop": 5}, "stop", "5; allowed: a string .*, or a list of 0 to 32"),
    "member of a union": ({"stop": ["x" * 257]}, "stop[0]", "allowed: a string of 0 to 256"),
    "tag that is a field": ({"messages": [{"role": "function", "name": 5, "function": {"name": "x"}}]},
                            "messages[0].name", "5; allowed"),
    "key": ({"logit_bias": {"01": 1}}, "logit_bias", "^key of logit_bias is '01'; allowed: the form"),
    "value of a mapping": ({"logit_bias": {"7": 101}}, "logit_bias.7", "101; allowed: a number from -100 to 100"),
    "alias": ({"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": 5}}},
              "response_format.json_schema.schema", "5; allowed: an object"),
    "flag": ({"stream_options": {"include_usage": 1}}, "stream_options.include_usage", "1; allowed: true or false"),
    "range": ({"n": 17}, "n", "17; allowed: a whole number from 1 to 16"),
    "extra_body": ({"extra_body": {"top_p": 2}}, "top_p", "2; allowed: a number from 0 to 1"),
}  # fmt: skip


@pytest.mark.parametrize(
    "prompt, param, message",
    [
        ([1, "a"], "prompt[1]", "'a'; allowed: a whole number from 0"),
        (["a", 5], "prompt[1]", "5; allowed: a string"),
        ([[1], ["a"]], "prompt[1][0]", "'a'; allowed: a whole number from 0"),
        ([[]], "prompt[0]", "a list of 0 entries; allowed: a list of 1 to"),
        ([[1], 5], "prompt[1]", "5; allowed: a list of 1 to"),
        ([-1], "prompt[0]", "-1; allowed: a whole number from 0"),
        ([True], "prompt[0]", "true; allowed: a string"),
        ([], "prompt", "a list of 0 entries; allowed: a list of 1 to 16"),
        ([[1]] * 17, "prompt", "a list of 17 entries; allowed: a list of 1 to 16"),
        (5, "prompt", "5; allowed: a string, or a list"),
    ],
)
def test_a_prompt_is_a_text_or_ids_or_several_of_one_kind(prompt, param, message):
    for good in ("a", ["a", "b"], [1], [1, 2] * 50, [[1], [2, 3]]):
        assert parse_request(MODELS["completions"], {"model": "m", "prompt": good}).prompt == good
    with pytest.raises(ApiError) as error:
        parse_request(MODELS["completions"], {"model": "m", "prompt": prompt})
    assert error.value.param == param and error.value.message.startswith(f"{param} is {message}")


@pytest.mark.parametrize("name", CASES)
def test_a_refusal_names_the_field_the_value_and_what_is_allowed(name):
    fields, param, message = CASES[name]
    given = {k: v for k, v in {**MINIMAL["chat"], **fields}.items() if v is not ...}
    with pytest.raises(ApiError, match=message) as error:
        parse_request(protocol.ChatCompletionsRequest, given)
    assert error.value.param == param and param in error.value.message


def test_a_refusal_is_short_whatever_the_size_of_the_value():
    for value in ("x" * 10**6, ["x"] * 10**6, {"x" * 10**6: 1}):
        with pytest.raises(ApiError) as error:
            parse_request(protocol.ChatCompletionsRequest, {**MINIMAL["chat"], "seed": value})
        assert len(error.value.message) < 300


@pytest.mark.long
def test_large_bodies_take_linear_time():
    """Four times the size takes about four times the time, not sixteen; wrong lists end at their first wrong entry."""
    message = {"role": "user", "content": [{"type": "text", "text": "a"}] * 100}

    def seconds(count, wrong=None):
        data = {"model": "m", "messages": [message] * count, **(wrong or {})}
        began = time.thread_time()
        accepts(protocol.ChatCompletionsRequest, data)
        return time.thread_time() - began

    gc.disable()  # a collection looks at all that the other tests have left
    try:
        assert min(seconds(1000) for _ in range(2)) < 12 * min(seconds(250) for _ in range(2)) + 0.05
        for wrong in ({"stop": [5] * 10**6}, {"tools": [{}] * 10**6}, {"messages": [None] * 10**6}):
            assert seconds(1, wrong) < 1
    finally:
        gc.enable()


def test_the_vendors_defaults_and_ranges_hold():
    fim = parse_request(MODELS["fim"], MINIMAL["fim"])
    assert (fim.max_tokens, fim.top_k, fim.presence_penalty, fim.stop) == (512, -1, 1.5, ["\n\n", "\n \n"])
    assert not accepts(MODELS["fim"], {**MINIMAL["fim"], "top_k": 0}) and not hasattr(fim, "temperature")
    edit = parse_request(MODELS["edit"], MINIMAL["edit"])
    assert (edit.max_tokens, edit.temperature, edit.presence_penalty) == (1024, 0.2, 1.0)
    assert not accepts(MODELS["edit"], {"model": "m", "messages": USER * 2})
    for given, used in {
        "none": "instant",
        "minimal": "instant",
        "xhigh": "high",
        "max": "high",
        "low": "low",
    }.items():
        chat = parse_request(MODELS["chat"], {**MINIMAL["chat"], "reasoning_effort": given})
        assert chat.reasoning_effort == used
    names = protocol.request_schema(MODELS["chat"])["properties"]["reasoning_effort"]["anyOf"][0]["enum"]
    assert set(names) == {*EFFORTS, *protocol.EFFORT_ALIASES}


def test_extra_body_adds_fields_and_overrides_none():
    data = {
        "max_tokens": 7,
        "min_p": None,
        "extra_body": {"max_tokens": 5, "min_p": 0.5, "top_k": 3, "extra_body": 4},
    }
    request = parse_request(MODELS["chat"], {**MINIMAL["chat"], **data})
    assert (request.max_tokens, request.min_p, request.top_k) == (7, 0.0, 3)
    assert not accepts(MODELS["chat"], {**MINIMAL["chat"], "extra_body": 5})


@pytest.mark.parametrize("name", MODELS)
def test_every_field_is_described(name):
    schema = request_schema(MODELS[name])
    described = [*schema["properties"].values()]
    for one in schema.get("$defs", {}).values():
        described += [p for field, p in one["properties"].items() if field not in ("role", "type")]
    for field in described:
        about = field.get("description") or schema["$defs"][field["$ref"].rpartition("/")[2]]["description"]
        assert about.endswith((".", ")"))


def test_the_playground_refuses_a_strictness_outside_of_its_rules_range(nano):
    from tests.serve.api_client import ScriptedApp  # imports jax

    app = ScriptedApp(nano, playground=True)
    for rule, p in (("threshold", 1.5), ("factor", 0)):
        payload = {"kind": "text", "prompt": "a", "rule": rule, "p": p}
        error = app.refuses(payload, "/playground/stream")
        assert error["param"] == "p" and rule in error["message"] and "a number" in error["message"]


def test_many_unknown_fields_take_bounded_time(scripted_app):
    scripted_app.engine.context = 1 << 20
    names = iter(f"{i}temperatur{i}" for i in range(200_000))
    extra = lambda n: {next(names): 1 for _ in range(n)}
    messages = [{"role": "user", "content": "hi", **extra(20)} for _ in range(200)]
    began = time.perf_counter()
    assert scripted_app.post({**PAYLOAD, **extra(4_000), "messages": messages}).status_code == 200
    assert time.perf_counter() - began < 1.5
    # The first of several misspelt fields is named.
    error = scripted_app.refuses({**PAYLOAD, "tempature": 0, "max_token": 5, "stops": "a"})
    assert error["param"] == "tempature"


@pytest.mark.parametrize(
    "fields, param",
    [
        ({"response_format": {"type": "text", "schema": {"type": "object"}}}, "response_format.schema"),
        ({"response_format": {"type": "text", "json_schema": {"name": "a"}}}, "response_format.json_schema"),
        ({"tools": [{"type": "function", "function": {"name": "f"}, "strict": True}]}, "tools[0].strict"),
    ],
)
def test_a_constraint_at_the_wrong_place_is_refused(scripted_app, fields, param):
    assert scripted_app.refuses({**PAYLOAD, **fields})["param"] == param
