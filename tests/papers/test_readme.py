"""What the README and the pages of docs show is what the repository holds."""

import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import jfp8

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
# Pages to read. Those of docs/api list names, which tests/test_docs.py looks after.
GUIDES = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/coming_from").glob("*.md")]
PAGES = [ROOT / "README.md", *sorted(GUIDES)]

pages = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


def test_it_is_read_in_five_minutes():
    assert len(README.split()) <= 700


@pytest.mark.slow
def test_the_code_of_the_readme_runs_from_top_to_bottom():
    scope: dict[str, Any] = {}
    with jax.numpy_rank_promotion("allow"):  # JAX's default, which users have
        for code in re.findall(r"^```python\n(.*?)^```", README, re.M | re.S):
            exec(code, scope)
    assert jnp.isfinite(scope["loss"])
    assert scope["optimizer"].step == 1


def anchors(page: Path) -> set[str]:
    """What the headings of a page are called in links to them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pages
def test_links_lead_somewhere(page):
    targets = [t.partition("#")[0] for t in re.findall(r"\]\(([^)]+)\)", page.read_text())]
    assert targets
    missing = [t for t in targets if not t.startswith("http") and not (page.parent / t).exists()]
    assert not missing
    for target, anchor in re.findall(r"\]\(([^)#:]*\.md|)#([^)]+)\)", page.read_text()):
        assert anchor in anchors(page.parent / target if target else page), f"{target}#{anchor}"


@pages
def test_names_exist(page):
    """Every `jfp8.something` in the text is a public name."""
    names = set(re.findall(r"\bjfp8\.(\w+)(?:\.(\w+))?", page.read_text()))
    assert names
    for first, second in names:
        value = getattr(jfp8, first)
        if second:
            assert hasattr(value, second), f"jfp8.{first}.{second}"


@pages
def test_scripts_exist(page):
    scripts = set(re.findall(r"(?:examples|benchmarks|notebooks)/\w+\.\w+", page.read_text()))
    assert all((ROOT / script).exists() for script in scripts)


def test_every_recipe_has_a_section():
    text = (ROOT / "docs/recipes.md").read_text()
    names = {recipe.__name__ for recipe in jfp8.recipes.RECIPES}
    for recipe in jfp8.recipes.RECIPES:
        assert f"## `{recipe.__name__}`" in text
        section = text.partition(f"## `{recipe.__name__}`")[2].partition("\n## ")[0]
        equations = re.findall(r"^(?:y|dx|dw) +&=", section, re.MULTILINE)
        others = re.findall(r"^The equations of \[`(\w+)`\]", section, re.MULTILINE)
        assert len(equations) == 3 or others, recipe.__name__
        assert names.issuperset(others)
        row = r"^\| `" + recipe.__name__ + r"` \| [^|]+ \| [^|]+ \|$"
        assert re.search(row, text, re.MULTILINE), (recipe.__name__, "cost, when")
