"""The old name of `cerebras.pytorch`: the same modules and objects.

Submodules imported as `cerebras_pytorch.x` are `cerebras.pytorch.x`, not copies of them.
"""

import importlib
import importlib.abc
import importlib.util
import sys

import cerebras.pytorch as _new


class _Alias(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds `cerebras_pytorch.<name>` as the module `cerebras.pytorch.<name>`."""

    def find_spec(self, fullname, path=None, target=None):
        if not fullname.startswith(__name__ + "."):
            return None
        new = _new.__name__ + fullname[len(__name__) :]
        try:
            found = importlib.util.find_spec(new)
        except ModuleNotFoundError:
            return None
        return importlib.util.spec_from_loader(fullname, self, is_package=found.submodule_search_locations is not None) if found else None

    def create_module(self, spec):
        return importlib.import_module(_new.__name__ + spec.name[len(__name__) :])

    def exec_module(self, module):
        """The module has been executed under its own name."""


sys.meta_path.append(_Alias())

__version__ = _new.__version__
__all__ = list(_new.__all__)


def __getattr__(name):
    return getattr(_new, name)


def __dir__():
    return dir(_new)
