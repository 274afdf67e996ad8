"""`mercury bench gpu check | tune | profile`: whether kernels are correct on this chip, their fastest settings, and
where a forward pass goes.

`commands` has the commands and lists the cases that each runs. `runner` runs the cases in child processes that can be
killed; `check`, `tune` and `profile` are what such a process does. The parent never uses the device. Needs
neither grain nor tyro nor rich.
"""
