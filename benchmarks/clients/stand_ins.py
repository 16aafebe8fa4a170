"""Stand-ins for packages that clients import to log, to type and to load data, unused here."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from unittest.mock import MagicMock

import flax.linen as nn


class _Any(type):
    def __getattr__(cls, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


class _Base(metaclass=_Any):
    """A base that a class may inherit from."""

    def __init_subclass__(cls, **kwargs: object) -> None:
        pass

    def __class_getitem__(cls, item: object) -> type:
        return cls

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass


class _Identity(nn.Module):
    def __call__(self, x):
        return x


# Objects for annotations that need more than a name.
_GIVEN = {
    "kauldron.kontext.Key": str,
    "kauldron.kontext.REQUIRED": "__required__",
    "kauldron.kd.nn": types.SimpleNamespace(Identity=_Identity),
    "metrax.logging.LoggingBackend": _Base,
}


class _Module(types.ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        path = f"{self.__name__}.{name}"
        return _GIVEN[path] if path in _GIVEN else _Base if name[0].isupper() else MagicMock()


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, packages: tuple[str, ...]) -> None:
        self.packages = packages

    def find_spec(self, name, path=None, target=None):
        if any(f"{name}.".startswith(f"{package}.") for package in self.packages):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec):
        return _Module(spec.name)

    def exec_module(self, module):
        pass


def stand_in_for(*packages: str) -> None:
    """Replace later imports of `packages` by modules that do nothing."""
    sys.meta_path.insert(0, _Finder(packages))
