"""Sphinx: python -m sphinx -W -b html docs docs/_build. The build needs no network."""

import inspect
import re
import shutil
import sys
import tomllib
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import flax.linen as nn  # noqa: E402
from docutils import nodes  # noqa: E402
from sphinx import addnodes  # noqa: E402

import jfp8  # noqa: E402

project = "jfp8"
author = "The jfp8 authors"
copyright = author
version = release = jfp8.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.intersphinx",
    "sphinx.ext.mathjax",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "jupyter_execute", "inventories"]
templates_path = ["_templates"]
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["pages.css"]
html_title = f"jfp8 {release}"

# Pages are Markdown that also reads well where no site is built. Headings get anchors to link to.
myst_heading_anchors = 3
# Formulas stand between $$.
myst_enable_extensions = ["dollarmath", "colon_fence"]
# Notebooks are shown as committed. The tests execute them.
nb_execution_mode = "off"
# They are stored next to examples and benchmarks, but Sphinx reads only its own folder.
shutil.rmtree(HERE / "notebooks", ignore_errors=True)
shutil.copytree(
    HERE.parent / "notebooks",
    HERE / "notebooks",
    ignore=shutil.ignore_patterns(".ipynb_checkpoints"),
)

# Every public object has a page, which the tables of docs/api link. Some file systems do not
# distinguish `report` from `Report`.
autosummary_filename_map = {
    name: f"{name}_function"
    for name in ("jfp8.report", "jfp8.summary")
    + tuple(f"jfp8.debug.{name}" for name in ("advice", "stats"))
}

# The pages of other libraries that our pages link. The inventories are stored, so that the build
# needs no network: a line is a name, its kind, and its page.
INVENTORIES = HERE / "inventories"
intersphinx_mapping = {
    "jax": ("https://docs.jax.dev/en/latest/", str(INVENTORIES / "jax.inv")),
    "nnx": ("https://flax.readthedocs.io/en/stable/", str(INVENTORIES / "nnx.inv")),
    "linen": ("https://flax-linen.readthedocs.io/en/latest/", str(INVENTORIES / "linen.inv")),
    "optax": ("https://optax.readthedocs.io/en/stable/", str(INVENTORIES / "optax.inv")),
}
ABBREVIATED = {"nn": "flax.linen", "nnx": "flax.nnx", "jnp": "jax.numpy"}

# In docstrings `name` is a name: of an argument, or of something of jfp8, which becomes a link.
# Arguments are no targets, and the names of JAX and Flax would need their inventories, so that
# nitpicky mode, which wants a target for everything, stays off; tests/papers/test_docs.py looks for
# the names of jfp8.
default_role = "py:obj"
nitpicky = False

# What a class takes is said in its own docstring, or in that of its __init__.
autoclass_content = "both"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_inherit_docstrings = False
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
maximum_signature_line_length = 400
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Fields as a list in the text of their class, also several in one entry.
napoleon_custom_sections = [("Attributes", "params_style")]


ARRAY_LIKE = re.compile(r"~[\w.]*Array \| ~numpy\.ndarray (\| ~?[\w.]+ ){5}\| complex")


def link_to_copies(app, docname, source):
    """Links to notebooks, `../notebooks/..`, lead to the copies; other files are downloads."""
    up = "../" * (docname.count("/") + 1)
    source[0] = source[0].replace(f"]({up}notebooks/", "](/notebooks/")


def list_promises(app, docname, source):
    """The promises stand once, next to the names of their tests."""
    if docname == "promises":
        file = HERE.parent / "tests/papers/promises.toml"
        sections = tomllib.loads(file.read_text(encoding="utf-8")).items()
        text = (f"## {name}\n\n- " + "\n- ".join(promises) for name, promises in sections)
        source[0] = source[0].replace("<!-- the promises -->", "\n\n".join(text))


# `**NNX**`, code, `**Linen**`, code: the same program twice. All tabs of the site switch together.
TAB = r"\*\*(NNX|Linen)\*\*\n\n(```python\n.*?\n```\n)"


def tabs(app, docname, source):
    """Blocks of code under the names of Flax's two APIs become tabs."""

    def tab(found):
        name, code = found.groups()
        return f":::{{tab-item}} {name}\n:sync: {name}\n\n{code}:::\n"

    def tab_set(found):
        return (
            "::::{tab-set}\n:sync-group: flax\n\n"
            + re.sub(TAB, tab, found[0], flags=re.S)
            + "::::\n"
        )

    source[0] = re.sub(rf"(?:^{TAB}\n?)+", tab_set, source[0], flags=re.M | re.S)


def link_names(app, doctree):
    """Link `jfp8.something`, `nnx.something` and so on to the page of that object, if any."""

    def full(name):
        first, dot, rest = name.partition(".")
        return ABBREVIATED.get(first, first) + dot + rest

    for xref in doctree.findall(addnodes.pending_xref):
        if xref.get("refdomain") == "py":
            xref["reftarget"] = full(xref["reftarget"])
    for literal in list(doctree.findall(nodes.literal)):
        name = literal.astext()
        linked = nodes.title | nodes.reference | addnodes.pending_xref
        within = isinstance(literal.parent, linked) or isinstance(literal.parent.parent, linked)
        if not within and re.fullmatch(r"(jfp8|jax|jnp|nn|nnx|optax)(\.\w+)+", name):
            role = {"refdomain": "py", "reftype": "obj", "reftarget": full(name)}
            literal.replace_self(addnodes.pending_xref("", literal.deepcopy(), **role))


OCP = "https://www.opencompute.org/documents/ocp-"
SPECIFICATIONS = {
    "OCP OFP8": f"{OCP}8-bit-floating-point-specification-ofp8-revision-1-0-2023-12-01-pdf-1",
    "OCP Microscaling Formats v1.0": f"{OCP}microscaling-formats-mx-v1-0-spec-final-pdf",
}


def link_papers(app, doctree):
    """`arXiv 2209.05433` in a docstring becomes a link, and the name of a specification."""
    cited = "|".join([r"arXiv[: ]\d{4}\.\d{4,5}", *map(re.escape, SPECIFICATIONS)])
    for text in list(doctree.findall(nodes.Text)):
        parts = re.split(rf"\b({cited})", text)
        if len(parts) > 1 and not isinstance(text.parent, nodes.reference | nodes.literal_block):
            linked = [nodes.Text(part) for part in parts]
            for i, paper in list(enumerate(parts))[1::2]:
                where = SPECIFICATIONS.get(paper, f"https://arxiv.org/abs/{paper[6:]}")
                linked[i] = nodes.reference("", paper, refuri=where)
            text.parent.replace(text, linked)


def name_pictures(app, doctree, docname):
    """What notebooks draw is named after its section."""
    for section in doctree.findall(nodes.section):
        for image in section.findall(nodes.image):
            if not image.get("alt") or image["alt"].startswith("Drawn by the code above"):
                image["alt"] = f"Drawn by the code above: {section[0].astext()}"


def breakable_names(app, pagename, template, context, doctree):
    """Long words of code in tables break after these signs, and nowhere else."""

    def parts(code):
        short = re.sub(r"(::|[/,(=])(?=[\w&])", r"\1\n", code[0]).split("\n")
        short = [re.sub(r"([._])(?=\w)", r"\1\n", p) if len(p) > 30 else p for p in short]
        return "\n".join(short).replace("\n", '</span><wbr><span class="pre">')

    def cell(found):
        return re.sub(r'(?<=<span class="pre">)[^<]{16,}', parts, found[0])

    if "body" in context:
        context["body"] = re.sub(r"<td.*?</td>", cell, context["body"], flags=re.DOTALL)


def short_signature(app, what, name, thing, options, signature, returned):
    """Shorter ones: of classes their fields, with defaults; `ArrayLike` by its name."""
    if what != "class":
        return signature and ARRAY_LIKE.sub("~jax.typing.ArrayLike", signature), returned
    parameters = list(inspect.signature(thing.__init__).parameters.values())[1:]
    flax = ("parent", "name") if issubclass(thing, nn.Module) else ()  # every module has them
    shown = [p.replace(annotation=p.empty) for p in parameters if p.name not in flax]
    # Functions and classes print with their addresses.
    return re.sub(r"<[^<>]*(<[^<>]*>[^<>]*)*>", "...", str(inspect.Signature(shown))), None


def skip_member(app, what, name, thing, skip, options):
    """Defaults of fields that are functions or classes are no methods."""
    owner, _, own_name = getattr(thing, "__qualname__", "x.").rpartition(".")
    is_default = not owner or own_name == "init" or isinstance(thing, type)
    return True if what == "class" and is_default else None


def keep_first_line(app, what, name, thing, options, lines):
    """Napoleon takes what stands before a colon in the first line of a property for its type."""
    if what == "property":
        lines.insert(0, "")


def end_first_paragraph(app, what, name, thing, options, lines):
    """Let `::` stand alone, as tables show the first paragraph of a docstring."""
    for i, line in enumerate(lines):
        if line.endswith(". ::"):
            lines[i : i + 1] = [line[:-3], "", "::"]
            return


def list_pages(app, exception):
    """Write ``llms.txt``: every page in the order of the index, and its first sentence."""
    if exception or app.builder.format != "html":
        return
    index = (HERE / "index.md").read_text(encoding="utf-8")
    summary = index.partition("\n\n")[2].partition("\n\n")[0].replace("\n", " ")
    lines = [f"# {project}", "", f"> {summary}"]
    for caption, names in re.findall(r":caption: (.*)\n\n((?:[\w/]+\n)+)", index):
        lines += ["", f"## {caption}", ""]
        for name in names.split():
            text = (HERE / f"{name}.md").read_text(encoding="utf-8")
            title, first = re.search(r"^# ([^\n]*)\n+(.*?[.?:])(?:\s|$)", text, re.S).groups()
            lines.append(f"- [{title}]({name}.html): {' '.join(first.split()).replace(':', '.')}")
    agents = (HERE.parent / "AGENTS.md").read_text(encoding="utf-8").partition("\n\n")[2]
    text = "\n".join(lines) + f"\n\n## Writing code that uses jfp8\n\n{agents}"
    Path(app.outdir, "llms.txt").write_text(text, encoding="utf-8")


def setup(app):
    """Connect the functions above to Sphinx."""
    app.connect("build-finished", list_pages)
    app.connect("autodoc-skip-member", skip_member)
    app.connect("autodoc-process-docstring", keep_first_line, priority=400)  # before Napoleon
    app.connect("autodoc-process-docstring", end_first_paragraph, priority=400)
    app.connect("source-read", link_to_copies)
    app.connect("source-read", tabs)
    app.connect("source-read", list_promises)
    app.connect("doctree-read", link_names)
    app.connect("doctree-read", link_papers)
    app.connect("doctree-resolved", name_pictures)
    app.connect("html-page-context", breakable_names)
    app.connect("autodoc-process-signature", short_signature)
