"""Stand-ins for the packages that MaxText imports to load data, tokenize and talk to clouds.

Import this before MaxText. Installed without its dependencies, MaxText then imports, and trains on
synthetic tokens.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from types import ModuleType
from typing import Any

PACKAGES = [
    "array_record",
    "datasets",
    "drjax",
    "grain",
    "huggingface_hub",
    "jaxtyping",
    "jinja2",
    "ml_collections",
    "pathwaysutils",
    "sentencepiece",
    "seqio",
    "sympy",
    "tensorflow",
    "tensorflow_datasets",
    "tensorflow_text",
    "tiktoken",
    "tokamax",
    "tokenizers",
    "transformers",
]


class _AnyClass(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__


class Anything(metaclass=_AnyClass):
    """A class, function, context or decorator that does nothing."""

    def __init__(self, *args: Any, **more: Any):
        del args, more

    def __call__(self, *args: Any, **more: Any) -> Any:
        return self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self

    def __class_getitem__(cls, item: Any) -> Any:
        return cls

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *error: Any) -> None:
        return None


class _Package(ModuleType):
    __path__: list[str] = []
    __version__ = "5.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, fullname: str, path: Any, target: Any = None) -> Any:
        del path, target
        if fullname.split(".")[0] in PACKAGES:
            return importlib.machinery.ModuleSpec(fullname, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        del module


# From now on, what is not installed of them imports as a stand-in.
sys.meta_path.append(_Finder())
