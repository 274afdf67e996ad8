"""Chat templates: they render as in transformers, and the sandbox limits what they may do."""

import random
import sys
import time

import pytest

from mercury_jax.hub.chat_template import ChatTemplate, RenderLimits, TracedText, joined, mask_of, own
from mercury_jax.hub.tokenizer import HFTokenizer
from tests.hub.tiny_tokenizers import TEMPLATES, byte_level, reference

CHAT = [
    {"role": "system", "content": " Be <brief>.\n"},
    {"role": "user", "content": "1 < 2 & 'x'\n\n\té🙂"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes "},
    {"role": "user", "content": "again"},
]
GROW = "{% set n = namespace(x='ab') %}{% for i in range(99) %}"
QUICK = RenderLimits(units=8_000_000, seconds=20.0)


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("prompt", [False, True])
def test_rendered_text_equals_transformers_and_contents_are_not_marked_as_the_templates(
    name: str, prompt: bool
):
    source = TEMPLATES[name]
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    for messages in (CHAT[1:2], CHAT, CHAT[1:]):
        text = ChatTemplate(source).render(messages, names, add_generation_prompt=prompt)
        assert text == reference(source, messages, add_generation_prompt=prompt, **names)
        theirs = "".join(c for c, by in zip(text, mask_of(text), strict=True) if not by)
        contents = "".join(m["content"] for m in messages)
        assert "again" in theirs or len(messages) == 1
        assert set(theirs) <= set(contents)
        assert "<s>" not in theirs and "im_start" not in theirs


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages | map(attribute='role') | join(', ') }}|{{ messages|length }}|{{ 7 // 2 }}{{ 2 ** 10 }}",
        "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}{{ 'é' | tojson }}",
        "{{ messages | selectattr('role', 'equalto', 'user') | list | length }}{{ 7 % 4 }}",
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ loop.first }} {{ loop.last }} "
        "{{ loop.nextitem.role if not loop.last }}{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}",
        "{% for m in [] %}x{% else %}none{% endfor %}{% for i in range(3) %}{{ i }}{% continue %}x{% endfor %}",
        "{% set ns = namespace(a='', n=0) %}{% for m in messages if m.role == 'user' %}"
        "{% set ns.a = ns.a ~ m.content %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.a }}{{ ns.n }}",
        "{% macro f(x, y='d') %}[{{ x | upper }}{{ y }}{{ caller() if caller else '' }}]{% endmacro %}"
        "{{ f('a') }}{{ f('b', y=messages[1].content) }}{% call f('c') %}d{% endcall %}",
        "{{ 'a%sb%05.1f%%' % ('x', 2.5) }}{{ 'p%s' | format('q') }}{{ 'x' * 3 }}{{ [1, 2] + [3] }}",
        "{{ messages[1].content | replace('x', 'yy') | trim | title }}{{ 'a-b-c'.split('-', 1)[1] }}",
        "{{ '  a '.strip() ~ 'abab'.replace('ab', 'c') }}{{ ', '.join(['a', messages[0].content]) }}",
        "{{ {'a': 1, 'b': [1, 2]} | dictsort }}{{ messages[0].items() | list }}{{ messages[0].get('no', 'd') }}",
        "{{ messages[-1:][0].content[::-1] }}{{ messages[1].content[:3] }}{{ 'abc'[1] }}{{ (1, 'b') }}",
        "{{ messages.foo }}{{ nothing | default('d') }}{% if x is not defined and messages[0].content is string %}"
        "{{ 'think' in messages[2].content }}{{ 1 < 2 <= 2 }}{{ 'b' not in ['a'] }}{% endif %}",
        "{% set t %}{{ messages[3].content }}!{% endset %}{{ t | indent(2, true) }}"
        "{% filter upper %}ab{{ t }}{% endfilter %}{% for k, v in {'a': 1}.items() %}{{ k }}={{ v }}{% endfor %}",
        "{{ [3, 1, 2] | sort | join }}{{ ['a', 'b'] | last }}{{ [1, none, true] }}{{ 1.5 | round | int }}",
        "{% for m in [[1, [2]], [3]] recursive %}<{{ m if m is number else loop(m) }}>{% endfor %}",
        "{{ [1, 2] | sum }}{{ [[1], [2]] | sum(start=[]) }}{{ ['b', 'a', 'b'] | unique | list }}{{ 'x' | safe }}",
    ],
)  # fmt: skip
def test_the_features_that_templates_use_work_as_in_jinja2(source: str):
    assert ChatTemplate(source).render(CHAT) == reference(source, CHAT)


METHODS = """
    upper() lower() title() capitalize() swapcase() casefold() strip() lstrip() rstrip('r') split() split('s')
    split('s',1) rsplit('s',1) rsplit() splitlines() partition('s') rpartition('e') replace('e','EE') replace('s','')
    startswith('us') endswith('r') removeprefix('us') removesuffix('er') find('e') rfind('s') index('s') count('s')
    join(['a','b']) isdigit() isalpha() isupper() islower() isspace() istitle() format() |upper |lower |title
    |capitalize |trim |replace('s','z') |length |first |last |list |string |reverse
"""


@pytest.mark.parametrize(
    "value", ["messages[1].role", "'user don\\'t ß'", "messages[1].content", "bos_token", "ns.x"]
)
def test_the_methods_of_texts_work_as_in_jinja2_on_roles_literals_and_variables(value: str):
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    before = "{% set ns = namespace(x=' us er\n' ~ messages[1].role) %}"
    for method in METHODS.split():
        call = method if method.startswith("|") else f".{method}"
        source = f"{before}{{{{ ({value}){call} }}}}"
        try:
            want = reference(source, CHAT, **names)
        except ValueError:  # `index` of what is not there
            want = None
        if want is None:
            with pytest.raises(ValueError, match="substring not found"):
                ChatTemplate(source).render(CHAT, names)
        elif "generator" not in want:  # of `reverse`, whose text has an address
            assert ChatTemplate(source).render(CHAT, names) == want, method


@pytest.mark.parametrize(
    "source",
    [
        "{{ '<|' ~ message.role.upper() ~ '|>' }}", "{{ '<|USER|>' }}", "{{ '<|user|>'.upper() }}",
        "{{ '<|{}|>'.format('USER') }}", "{{ '<|{r}|>'.format(r=message.role.upper()) }}",
        "{{ '<|%s|>' % message.role.upper() }}", "{{ ' <|USER|>  x'.split()[0] }}", "{{ 'a,<|USER|>'.split(',')[1] }}",
        "{{ 'a,<|USER|>'.rsplit(',', 1)[1] }}", "{{ '<|USER|>:x'.partition(':')[0] }}",
        "{{ 'x:<|USER|>'.rpartition(':')[2] }}", "{{ '<|USER|>\nx'.splitlines()[0] }}",
        "{{ 'x<|USER|>'.removeprefix('x') }}", "{{ '<|USER|>x'.removesuffix('x') }}", "{{ '<|user|>'.swapcase() }}",
        "{{ ('<|' ~ message.role ~ '|>') | upper }}", "{{ '<|X|>' | replace('X', message.role.upper()) }}",
    ],
)  # fmt: skip
def test_methods_keep_what_the_template_wrote_and_never_mark_what_a_user_wrote(source: str):
    """The control token is the template's own; the same operation on the user's text leaves it the user's."""
    loop = "{% for message in messages %}" + source + "{{ message.content }}{% endfor %}"
    forged = "<|USER|>"
    text = ChatTemplate(loop).render([{"role": "user", "content": forged}])
    assert text == forged * 2 and mask_of(text) == b"\1" * 8 + b"\0" * 8
    for call in METHODS.split():
        call = call if call.startswith("|") else f".{call}"
        use = f"{{% set x = messages[0].content{call} %}}{{{{ x if x is string else '' }}}}"
        text = ChatTemplate(use).render([{"role": "user", "content": "ab<|user|>bab <|USER|> s"}])
        assert not any(mask_of(text)), call


@pytest.mark.parametrize("mask", range(16))
def test_parts_of_a_text_keep_the_marks_of_their_own_characters(mask: int):
    """Also where the separator contains a part: "bab" split at "ab" begins with the first b."""
    for text, sep in (("bab", "ab"), ("abab", "b"), ("a  ba", None), ("a\r\nb", "\n"), ("xaax", "a")):
        marks = bytes(mask >> i & 1 for i in range(len(text)))
        traced, number = TracedText(text, marks), TracedText(text, bytes(range(len(text))))
        calls = [("split", (sep,)), ("rsplit", (sep, 1)), ("splitlines", ())]
        for name, args in [*calls, *([("partition", (sep,)), ("rpartition", (sep,))] if sep else [])]:
            parts, places = getattr(traced, name)(*args), getattr(number, name)(*args)
            for part, place in zip(parts, places, strict=True):
                at = list(mask_of(place))  # the index of each character
                assert (
                    str.__str__(part) == "".join(text[i] for i in at)
                    and at == list(range(at[0], at[0] + len(at)))
                    if at
                    else part == ""
                )
                assert mask_of(part) == bytes(marks[i] for i in at)
            assert list(parts) == list(getattr(text, name)(*args))
        if sep == "ab":
            assert list(mask_of(number.split("ab")[0])) == [0]


@pytest.mark.parametrize("method", ["zfill(9)", "center(9)", "encode()", "translate({})", "expandtabs()"])
def test_a_method_that_is_not_supported_is_named(method: str):
    with pytest.raises(ValueError, match=f"'{method.split('(')[0]}' of a text, which is not supported"):
        ChatTemplate("{{ messages[0].role." + method + " }}").render(CHAT)
    with pytest.raises(ValueError, match="'append' of a list, which is not supported"):
        ChatTemplate("{{ messages.append(1) }}").render(CHAT)


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("{% for i in range(10**9) %}{% endfor %}", "range"),
        ("{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}", "too many steps"),
        (f"{GROW}{{% set n.x = n.x + n.x %}}{{% endfor %}}", "too"),
        (f"{GROW}{{% set n.x = n.x ~ n.x %}}{{% endfor %}}", "too"),
        (f"{GROW}{{% set n.x = [n.x] + [n.x] %}}{{% endfor %}}{{{{ n.x }}}}", "too"),
        ("{% macro f(n) %}{{ f(n) }}{{ f(n) }}{% endmacro %}{{ f(1) }}", "calls itself"),
        ("{% for i in range(9999) %}{{ messages[0].content * 9999 }}{% endfor %}", "too much text"),
        ("{{ 'a' * 10**10 }}", "too much text"),
        ("{{ ['a' * 99999] * 99999 }}", "too much text"),
        ("{{ 10**(10**8) }}", "huge numbers"),
        ("{{ (10**1000) * (10**1000) }}", "huge numbers"),
        ("{{ 'aaa'.replace('a', 'a' * 9999).replace('a', 'a' * 9999) }}", "too much text"),
        ("{{ range(999) | join('a' * 99999) }}", "too much text"),
        ("{{ 'a' * 3000000 }}{{ ('a' * 3000000) | list | length }}", "too much text"),
        ("{{ ''.join('a' * 3000000) | length }}", "too much text"),
        ("{{ ('ab' * 1000000).split('a') | length }}", "too much text"),
        ("{{ ('f' * 100000) | int(base=16) }}", "huge numbers"),
        ("{% set n = namespace(x=[1] * 9) %}{% for i in range(99) %}{% set n.x = [n.x, n.x] | sum(start=[]) %}"
         "{% endfor %}", "too"),
        ("{{ '%99999999d' % 1 }}", "width"),
        ("{{ '%99999999d' is divisibleby(1) }}", "width"),
        ("{{ ('a' * 999) | round(9, 'ceil') }}", "round"),
        ("{{ ('%(a)s' * 9999)[0:] | trim | string | replace('', '') % {'a': 'a' * 9999} }}", "too much text"),
        ("{{ ('a' * 200000).rfind('ab' ~ 'a' * 100000) }}", "too much text"),
        ("{{ ('a' * 200000).rsplit('ab' ~ 'a' * 100000) }}", "too much text"),
        ("{{ ('a' * 200000).rsplit(maxsplit=1, sep='ab' ~ 'a' * 100000) }}", "too much text"),
        ("{{ ('a' * 200000).rpartition('ab' ~ 'a' * 100000) }}", "too much text"),
        ("{{ ('b' * 300000).strip('a' * 100000 ~ 'b') }}", "too much text"),
        ("{{ ('b' * 300000) | trim('a' * 100000 ~ 'b') }}", "too much text"),
        ("{% for i in range(999) %}" + "x" * 50000 + "{% endfor %}", "too much text"),
        ("{% for i in range(9999) %}{{ messages[0].content ~ 'x' * 999 }}{% endfor %}", "too much text"),
        ("{{ 'a' | center(10**9) }}", "No filter named 'center'"),
        ("{{ strftime_now('%99999999d') }}", "strftime_now"),
        ("{{ 'x' | indent(10**9) }}", "too much text"),
        ("{{ 'x' | indent(-(10**9)) }}{{ 'a' * -(10**9) }}{{ ('a' * 10**8) | length }}", "too much text"),
        ("{{ 1.5 | round(10**9, 'ceil') }}", "round"),
        ("{% for i in [1] recursive %}{{ loop([i]) }}{% endfor %}", "too deeply"),
        ("{% include 'x' %}", "include"),
        ("{{ " + "(" * 300 + "1" + ")" * 300 + " }}", "too deeply"),
        ("{{ " + "+".join(["1"] * 9999) + " }}", "too deeply"),
        ("{% if", "not a jinja2"),
    ],
)  # fmt: skip
def test_a_template_that_exceeds_a_limit_is_stopped(source: str, words: str):
    began = time.monotonic()
    with pytest.raises(ValueError, match=words):
        ChatTemplate(source, QUICK).render(CHAT)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize(
    "make",
    ["{% set n.t = [n.t, n.t] %}", "{% set n.t = {'a': n.t, 'b': n.t} %}",
     "{% set n.t = dict(a=n.t, b=n.t) %}", "{% set n.t = [n.t] + [n.t] %}", "{% set n.t = [n.t] * 2 %}",
     "{% set n.t = {'a': n.t, 'b': n.t}.items() | list %}", "{{ f(n.t, n.t) }}"],
)  # fmt: skip
def test_no_way_of_making_nested_values_escapes_the_limit(make: str):
    keep = "{% macro f() %}{% set n.t = varargs %}{% endmacro %}"
    source = (
        "{% set n = namespace(t=(1,)) %}" + keep + "{% for i in range(60) %}" + make + "{% endfor %}{{ n.t }}"
    )
    with pytest.raises(ValueError, match="too large or too deep|too many steps"):
        ChatTemplate(source, QUICK).render(CHAT)


def test_a_namespace_that_holds_itself_is_printed_without_its_contents():
    source = "{% set n = namespace() %}{% set n.a = namespace(a=n, b=n) %}{{ n }}{{ [n] }}{{ n.a }}"
    assert ChatTemplate(source).render(CHAT) == "<Namespace>[<Namespace>]<Namespace>"


@pytest.mark.parametrize(
    "use",
    ["{{ n.t }}", "{{ n.t | tojson }}", "{{ n.t == n.u }}", "{{ {n.t: 1} }}", "{{ {}[n.t] }}",
     "{{ {}.get(n.t) }}"],
)  # fmt: skip
def test_a_small_value_that_contains_itself_many_times_is_refused_when_made(use: str):
    twice = "{% for i in range(60) %}{% set n.t = (n.t, n.t) %}{% set n.u = (n.u, n.u) %}{% endfor %}"
    template = ChatTemplate("{% set n = namespace(t=(1,), u=(1,)) %}" + twice + use, QUICK)
    with pytest.raises(ValueError, match="too large or too deep|too many steps"):
        template.render(CHAT)


def test_time_is_limited_without_another_thread():
    slow = ChatTemplate(
        "{% for i in range(99999) %}{{ messages | tojson | length }}{% endfor %}", RenderLimits(seconds=0.2)
    )
    began = time.monotonic()
    with pytest.raises(ValueError, match="too long"):
        slow.render(CHAT)
    assert time.monotonic() - began < 5
    assert ChatTemplate("{{ messages[3].content }}").render(CHAT) == "again"  # the next one has its own time


@pytest.mark.parametrize(
    "source",
    ["{{ messages.__class__ }}", "{{ messages['__class__'] }}", "{{ ''.__class__.__mro__ }}",
     "{{ messages | attr('__class__') }}", "{{ messages | map(attribute='__class__') | list }}",
     "{{ raise_exception.__globals__ }}", "{{ '{0.__class__}'.format(messages) }}", "{{ ''.format_map({}) }}",
     "{{ messages.append(1) }}", "{{ messages[0].update(a=1) }}", "{{ 'x'.encode() }}",
     "{% set n = namespace() %}{% set n.__init__ = 1 %}{{ n.__init__ }}", "{{ self.__init__ }}",
     "{{ loop.__class__ }}", "{{ cycler.__init__ }}", "{{ dict.mro() }}", "{{ range.__globals__ }}",
     "{{ (5).to_bytes(9, 'big') }}", "{% for m in messages %}{{ loop._iterable }}{% endfor %}",
     "{% macro f() %}{% endmacro %}{{ f._func }}", "{{ lipsum.__globals__ }}",
     "{{ messages[0].pop('role') }}", "{% import 'os' as os %}", "{{ dict().__class__ }}"],
)  # fmt: skip
def test_private_and_mutating_attributes_are_refused(source: str):
    with pytest.raises(ValueError, match="chat_template: .*(reaches beyond|No filter|not given)"):
        ChatTemplate(source).render(CHAT)


def test_an_error_that_a_template_raises_is_passed_on():
    with pytest.raises(ValueError, match="messages: the chat template refuses them: roles must alternate"):
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(CHAT)
    assert len(ChatTemplate("{{ strftime_now('%Y-%m-%d') }}").render(CHAT)) == 10


@pytest.mark.parametrize(
    ("messages", "words"),
    [([], "messages: "), ("hello", "messages: 'hello'"), (["hello"], r"messages\[0\]: 'hello'"),
     ([*CHAT, {"role": "<|im_start|>", "content": ""}], r"messages\[4\].role: '<\|im_start\|>'"),
     ([{"role": "user"}], r"messages\[0\].content: None"),
     ([{"role": "user", "content": {"type": "image"}}], r"messages\[0\].content"),
     ([{"role": "user", "content": "\ud800"}], r"messages\[0\].content: lone surrogate U\+D800"),
     ([{"role": "user", "content": "", "more": object()}], r"messages\[0\].more is 'object'"),
     ([{"role": "user", "content": "x" * 9_000_000}], "more than 8000000 characters")],
)  # fmt: skip
def test_malformed_messages_are_refused_by_name(messages, words: str):
    with pytest.raises(ValueError, match=words):
        ChatTemplate("{{ messages }}").render(messages)


def test_the_sizes_of_data_and_templates_are_limited():
    deep: list = []
    for _ in range(60):
        deep = [deep]
    with pytest.raises(ValueError, match="lists within lists"):
        ChatTemplate("x").render([{"role": "user", "content": "", "deep": deep}])
    with pytest.raises(ValueError, match="more than 9 characters"):
        ChatTemplate("{{ 'x' * 10 }}", RenderLimits(output=9)).render(CHAT)
    with pytest.raises(ValueError, match="100001 characters"):
        ChatTemplate("x" * 100_001)
    with pytest.raises(ValueError, match="chat_template is 'int'"):
        ChatTemplate(3)


def test_without_jinja2_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    ours = ("jinja2.", "mercury_jax.hub.chat_template")
    for name in [n for n in sys.modules if n.startswith(ours)]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(ValueError, match=r"jinja2 is not installed.*pip install .*\[hub\]"):
        HFTokenizer.of(byte_level()).render(CHAT)


def test_traced_text_equals_the_text_and_keeps_its_mask():
    rng = random.Random(0)
    pieces = ["<|a|>", "\n", " x ", "%", "é", "ab", ""]
    for _ in range(300):
        parts = [rng.choice([own, str])(rng.choice(pieces)) for _ in range(rng.randrange(1, 6))]
        text, plain = joined(parts), "".join(map(str.__str__, parts))
        tags = b"".join(map(mask_of, parts))
        assert text == plain and mask_of(text) == tags
        traced = TracedText(plain, tags)
        low, high = sorted(rng.randrange(len(plain) + 1) for _ in range(2))
        for got, want in [
            (traced[low:high], (plain[low:high], tags[low:high])),
            (traced + "z", (plain + "z", tags + b"\0")),
            ("z" + traced, ("z" + plain, b"\0" + tags)),
        ]:
            assert (got, mask_of(got)) == want
        for name, args in [
            ("strip", ()), ("lstrip", ("\n ",)), ("rstrip", ()), ("split", ("x",)), ("split", ()), ("split", ("a", 1)),
            ("replace", ("a", "bb")), ("replace", ("x", "")), ("replace", ("", "-")), ("upper", ()), ("title", ()),
            ("removeprefix", ("<|",)), ("removesuffix", (" ",)), ("partition", ("x",)), ("join", (["1", "2"],)),
        ]:  # fmt: skip
            got = getattr(traced, name)(*args)
            assert got == getattr(plain, name)(*args)
            for part in got if isinstance(got, list) else [got]:
                assert isinstance(part, tuple) or len(mask_of(part)) == len(part)
    filled = own("<|%s|>%%%3s") % ("x", "7")
    assert filled == "<|x|>%  7" and mask_of(filled) == b"\1\1\0\1\1\1\1\1\0"
    with pytest.raises(TypeError):
        _ = own("%s") % (1, 2)
