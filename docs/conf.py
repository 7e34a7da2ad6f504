from importlib.metadata import version as _version

project = "XDS"
author = "The XDS authors"
copyright = "The XDS authors"
release = version = _version("xpu-direct-storage")

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_build"]

html_theme = "furo"
html_title = f"XDS {release}"
html_show_copyright = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_google_docstring = True
napoleon_numpy_docstring = False
# Attributes are described in the class docstring and once more by autodoc otherwise.
napoleon_use_ivar = True
