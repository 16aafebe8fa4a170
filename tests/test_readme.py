"""What the README shows is what the repository holds."""

import re
from pathlib import Path

import jfp8

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text()


def test_first_model_is_the_quickstart():
    assert (ROOT / "examples/quickstart.py").read_text().strip() in README


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets
    missing = [t for t in targets if not t.startswith("http") and not (ROOT / t).exists()]
    assert not missing


def test_names_exist():
    """Every `jfp8.something` in the text is a public name."""
    names = set(re.findall(r"\bjfp8\.([a-zA-Z_]+)(?:\.([a-zA-Z_]+))?", README)) - {("jfp8", "")}
    assert len(names) >= 8
    for first, second in names:
        value = getattr(jfp8, first)
        if second:
            assert hasattr(value, second), f"jfp8.{first}.{second}"


def test_scripts_exist():
    scripts = set(re.findall(r"(?:examples|benchmarks|notebooks)/\w+\.\w+", README))
    assert "examples/train_lm.py" in scripts
    assert all((ROOT / script).exists() for script in scripts)
