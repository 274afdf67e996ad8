"""Installs configs/ as the package `mercury_jax.configs`; everything else is said in pyproject.toml.

pyproject.toml could map the folder by package-dir, but then an editable install goes through an import hook, which
type checkers cannot follow. So the recipes are copied when a wheel is built; an editable install reads the clone's.
"""

import os

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            self.copy_tree("configs", os.path.join(self.build_lib, "mercury_jax", "configs"))


setup(cmdclass={"build_py": BuildWithRecipes})
