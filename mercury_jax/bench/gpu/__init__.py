"""`mercury bench gpu check | speed | model`: are the kernels right on this chip, how fast are they and a model.

`commands` has the three, `cases` lists what each runs, `runner` runs cases in processes that can be killed, `worker` is
such a process, and `check`, `speed`, `model` and `peer` are what it does. The parent never touches the device.
"""
