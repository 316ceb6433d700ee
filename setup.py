"""What pyproject.toml cannot say: a wheel has no sources of notebooks, which have the solutions."""

from setuptools import setup
from setuptools.command.build_py import build_py

SOURCES = ("lecture", "exercises", "appendix", "puzzle")


class WithoutSources(build_py):
    def find_package_modules(self, package, package_dir):
        found = super().find_package_modules(package, package_dir)
        if not package.startswith("dtlib.lessons."):
            return found
        return [row for row in found if row[1] not in SOURCES]


setup(cmdclass={"build_py": WithoutSources})
