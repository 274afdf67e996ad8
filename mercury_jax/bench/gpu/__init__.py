"""`mercury bench gpu check | profile`: whether kernels are correct on this chip, and where a forward pass goes.

`commands` has the commands and lists the cases that each runs. `runner` runs the cases in child processes that can be
killed; `check` and `profile` are what such a process does. The parent never uses the device. Needs
neither grain nor tyro nor rich.
"""
