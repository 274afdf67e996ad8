"""The checkpoint families, one file each. Importing this package imports all of them, and each registers itself.

To add a family: write its file here (see `dream.py` for a short one). No other file names it.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
