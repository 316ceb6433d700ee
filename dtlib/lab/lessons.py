"""``dtlib.lab.lessons``, where notebooks that learners have kept look for ``dtlib.lessons``."""

import sys
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

__path__: list[str] = []


class _Moved(MetaPathFinder, Loader):
    """The same modules by both names: what they keep is not kept twice."""

    def find_spec(self, name, path=None, target=None):
        return ModuleSpec(name, self) if name.startswith(f"{__name__}.") else None

    def exec_module(self, module):
        sys.modules[module.__name__] = import_module(module.__name__.replace(__name__, "dtlib.lessons", 1))


sys.meta_path.insert(0, _Moved())
