"""Checkpoint families. Importing this package imports every file in it, and each file registers its families.

To add a family, write a file here; no other file needs to change. `adapted.py` starts with a short example, Dream.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
