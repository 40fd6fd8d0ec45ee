"""Sphinx's configuration. The package is imported as it is installed."""

from importlib.metadata import version as version_of

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
autodoc_default_options = {"members": True, "show-inheritance": True}

# There is no inventory of other projects to look names up in: only links into the package itself are checked.
nitpick_ignore_regex = [("py:.*", r"(?!celery_anarchon).*")]

html_theme = "furo"
html_title = f"celery-anarchon {release}"
