"""`mercury bench gpu check | speed | model`: whether kernels are correct on this chip, and how fast they and models
are.

`commands` has the three commands and lists the cases that each runs. `runner` runs the cases in child processes that
can be killed; `check`, `speed` and `model` are what such a process does. The parent never uses the device. Needs
neither grain nor tyro nor rich.
"""
