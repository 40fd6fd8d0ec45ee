"""Sphinx's configuration. The package is imported as it is installed."""

import sys
from importlib.metadata import version as version_of
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
import overview

project = "celery-anarchon"
author = "celery-anarchon contributors"
copyright = f"2026, {author}"
release = version = version_of("celery-anarchon")

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.doctest"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True}

# Links to what docs/reference.md documents are checked. Other projects' names cannot be (there is no inventory of them
# to look in), nor can names of modules that only developers read.
nitpick_ignore_regex = [
    ("py:.*", r"(?!celery_anarchon\.(app|backends\.(base|registry)|errors|model|schedules|timetable)\b).*"),
    ("py:mod", r"celery_anarchon\.(app|model|schedules)"),
    ("py:class", r"celery_anarchon\.app\.StoreT"),
    ("py:.*", r".*\._.*"),
]

html_theme = "furo"
html_title = f"celery-anarchon {release}"


def setup(app):
    app.connect("builder-inited", overview.check)
