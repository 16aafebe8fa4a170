"""Checks of what users pass: rows of statistics, and reports."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from jfp8.conversion.product_report import Report
from jfp8.debug.records import TensorStats


def check_rows(rows: Any, function: str) -> list[TensorStats]:
    """Return `rows` as a list, or raise ``TypeError`` in the name of `function`."""
    several = isinstance(rows, Iterable) and not isinstance(rows, (str, bytes))
    found = list(rows) if several else [rows]
    for row in found:
        if not isinstance(row, TensorStats):
            raise TypeError(
                f"{function} takes rows of statistics, but one of them is a {type(row).__name__}. "
                "Rows come from stats.rows(step), where jfp8.debug.stats returned stats, from "
                "recorder.rows, or from jfp8.debug.read_jsonl(path)."
            )
    return found


def check_report(products: Any) -> Report:
    """Return `products`, or raise ``TypeError``."""
    if not isinstance(products, Report):
        raise TypeError(
            "products must be what jfp8.report(model, variables, x) returned, got "
            f"{type(products).__name__}."
        )
    return products
