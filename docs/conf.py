"""Settings of the documentation site: Sphinx with MyST, see CONTRIBUTING.md. `make docs` builds it into build/docs."""

project = "Stillroom"
author = "The Stillroom authors"
project_copyright = "The Stillroom authors, Apache-2.0"
extensions = ["myst_parser"]
myst_heading_anchors = 4  # headings get the anchors that GitHub gives them
nitpicky = True  # with -W, a reference that leads nowhere ends the build
html_theme = "pydata_sphinx_theme"
html_title = "Stillroom"
html_copy_source = False
html_show_sourcelink = False
html_theme_options = {
    "navigation_with_keys": False,
    "show_toc_level": 2,
    "header_links_before_dropdown": 8,
    "secondary_sidebar_items": ["page-toc"],
    "footer_start": ["copyright"],
    "footer_end": [],
}
