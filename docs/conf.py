"""The site: `make docs` builds it from these pages, the code and the parsers of its commands into build/docs."""

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE / "extensions")]

project = "ray_app"
html_title = "ray_app"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "elsewhere", "fields", "commands", "names"]
exclude_patterns = ["extensions"]

myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence"]

default_role = "code"  # docstrings mark code as Markdown does
autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
napoleon_include_init_with_doc = False
nitpick_ignore_regex = [
    # Names of other projects are not resolved, so that the build needs no network.
    ("py:.*", r"(?!ray_app).*"),
    # Classes that appear in signatures and that users do not construct.
    ("py:class", r"ray_app\.(driver\.run\.(Run|Faults)|storage\.object_stores\.ObjectPath)"),
    (
        "py:class",
        r"ray_app\.config\.(sections|import_paths)\.\w+",
    ),
    ("py:class", r"ray_app\.(train\.job\.Job|report\.facts\.Facts|keras\.strategies\.Strategy|reduction\.reducer\.T)"),
    ("py:class", r"ray_app\.tune\.(options\.TuneSection|scheduler\.Promotion|samplers\.Observed)"),
]

html_theme = "furo"
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
smartquotes = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"
