"""The old name of `cerebras.pytorch`: the same modules and objects.

Submodules imported as `cerebras_pytorch.x` are `cerebras.pytorch.x`, not copies of them.
"""

import importlib
import importlib.abc
import importlib.util
import sys

import cerebras.pytorch as _new


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `cerebras_pytorch.<name>` as the module `cerebras.pytorch.<name>`.

    It comes before the finder of files, which would load a second copy of a submodule from its parent's `__path__`.
    """

    def __init__(self):
        self._specs = {}

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(__name__ + "."):
            return None
        try:
            found = importlib.util.find_spec(_new_name(fullname))
        except ModuleNotFoundError:
            return None
        if found is None:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=found.submodule_search_locations is not None)

    def create_module(self, spec):
        module = importlib.import_module(_new_name(spec.name))
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module):
        """The module has been executed under its own name, whose spec it gets back."""
        module.__spec__ = self._specs.pop(module.__spec__.name)


def _new_name(name: str) -> str:
    return _new.__name__ + name[len(__name__) :]


sys.meta_path.insert(0, _Alias())

__version__ = _new.__version__
__all__ = list(_new.__all__)


def __getattr__(name):
    return getattr(_new, name)


def __dir__():
    return dir(_new)
