"""Where a stranger's template runs: jinja2's immutable sandbox, narrowed and metered.

Narrowed: a template gets plain data, the methods and filters that chat templates use, and nothing else;
whatever it reaches for beyond them raises. Metered (`meter.py`): every turn of a loop, call, filter, test
and operator takes a step; every text and list made is paid for, in advance where it may be huge; what is
compared, printed or sorted is weighed first, since a list that holds itself twice, forty times over, is
small to make and endless to read. So each operation between two looks at the clock is short, and
`range(10**9)`, `'a' * 10**10` or `10**(10**8)` end at once, without a thread or a process to kill.

    traced.py        text that knows which of its characters the template wrote
    meter.py         steps, characters and seconds of one render
    functions.py     the operators, methods, filters and functions that a template may use
    environment.py   jinja2's compiler and environment around them

jinja2 is imported by the last two only, which `hub/template.py` imports when there is a template to read.
"""
