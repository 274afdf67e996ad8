"""The checkpoint families. Importing this package imports every file, and each file registers its families.

To add a family: write its file here; `adapted.py` begins with a short one, Dream. No other file names it.
"""

import importlib
import pkgutil

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
