"""The changes of an upgrade, one message for each kind."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field

from jfp8.checkpoint.state_dict import spelled
from jfp8.scaling.printing import listed
from jfp8.tracing.caller import user_level

_MOST_NAMED = 4  # paths in a message


class CheckpointChange(UserWarning):
    """A checkpoint was changed to fit its target.

    FP8 state was added, dropped or converted, the optimizer restarts, or arrays lose bits.

    Turn it into an error for one call by ``strict=True``, or for all by
    ``warnings.simplefilter("error", CheckpointChange)``.
    """


@dataclass(frozen=True)
class Log:
    """The changes and problems that an upgrade has found so far.

    `optimizers` are the paths of optimizer states, in which no stored array is converted.
    """

    optimizers: frozenset[tuple[str, ...]] = frozenset()
    changes: dict[str, list[str]] = field(default_factory=dict)  # the paths by kind of change
    problems: dict[tuple[str, ...], str] = field(default_factory=dict)  # mismatches by path

    def change(self, what: str, path: tuple[str, ...]) -> None:
        """Note that `what` happened to the entry at `path`."""
        self.changes.setdefault(what, []).append(spelled(path))

    def problem(self, path: tuple[str, ...], what: str) -> None:
        """Note that `path`, which holds `what`, does not fit."""
        self.problems.setdefault(path, what)

    def in_optimizer(self, path: tuple[str, ...]) -> bool:
        """Return True if `path` belongs to an optimizer state."""
        return any(path[: len(place)] == place for place in self.optimizers)

    def close(self, strict: bool) -> None:
        """Raise ``ValueError`` of problems, or else warn of changes, which raise if `strict`."""
        if self.problems:
            found = [f"  {spelled(path)}: {what}" for path, what in self.problems.items()]
            shown = found[: _MOST_NAMED - 1]
            if len(found) > len(shown):
                shown.append(f"  and {len(found) - len(shown)} more")
            hints = sorted({_OPTIMIZER if self.in_optimizer(p) else _MODEL for p in self.problems})
            raise ValueError("\n".join(["The checkpoint does not fit the target.", *shown, *hints]))
        changes = [f"{what}{_listed(paths)}." for what, paths in self.changes.items()]
        if strict and changes:
            raise ValueError(
                "The checkpoint does not have the state of the target, and strict=True.\n"
                + "".join(f"  {message}\n" for message in changes)
                + "Omit strict to allow these changes, or restore into the model and the "
                "optimizer that were saved."
            )
        for message in changes:
            warnings.warn(message, CheckpointChange, stacklevel=user_level())


_OPTIMIZER = (
    "An optimizer state is restored into the optimizer that was saved, with the same wrappers and "
    "storages. To continue with another optimizer, start it from the parameters alone: "
    'upgrade({"params": saved["params"]}, target), or in NNX with the state of the model, '
    'upgrade(saved["0"], nnx.state(model)), for saved = load(path).'
)
_MODEL = (
    "Only FP8 state is added, dropped or converted. Restore into the model that was saved, in NNX "
    "into the same part of its state, such as nnx.state(model, nnx.Param), and then convert it. Or "
    'rename and reshape first: saved = load(path); layers = saved.get("params", saved); '
    'layers["new"] = layers.pop("old"); upgrade(saved, target).'
)


def _listed(paths: list[str]) -> str:
    return "" if paths == [spelled(())] else f": {listed(paths, _MOST_NAMED)}"
