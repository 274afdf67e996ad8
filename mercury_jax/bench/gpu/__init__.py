"""`mercury bench gpu check | speed | model`: whether kernels are correct on this chip, and how fast they and models
are.

`commands` has the three commands, `cases` lists what each runs, and `runner` runs the cases in child processes that can
be killed. `worker` is such a process; `check`, `speed` and `model` are what it does. The parent never uses the device.
Needs neither grain nor tyro nor rich.
"""
