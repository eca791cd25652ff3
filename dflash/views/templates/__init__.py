"""The HTML of every page and panel as jinja2 templates: values are escaped, Python holds no markup."""

from __future__ import annotations

import base64
import functools
import gzip
from importlib import resources
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from dflash.views import style


def render(name: str, **values: Any) -> Markup:
    """The template `name` with these values, as HTML that is not escaped again."""
    return Markup(_environment().get_template(name).render(**values))


@functools.cache
def _environment() -> Environment:
    found = Environment(
        loader=PackageLoader("dflash.views"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    found.filters.update(duration=style.duration, gib=style.gib, number=style.number, clip=style.clip)
    found.globals.update(style=style, css=_css, plotly=_plotly, draw=lambda: Markup(_text("draw.js")))
    return found


def _text(name: str) -> str:
    return resources.files(__name__).joinpath(name).read_text()


def _css() -> Markup:
    """The report's style sheet with the colours of highlighted code, light and dark."""
    from pygments.formatters import HtmlFormatter

    light, dark = (HtmlFormatter(style=name).get_style_defs(".highlight") for name in ("default", "github-dark"))
    dark = f"@media (prefers-color-scheme: dark) {{{dark}}}.highlight,.highlight pre{{background:var(--code)}}"
    return Markup(_text("style.css") + light + dark)


@functools.cache
def _plotly() -> str:
    """plotly.js, packed by gzip (1.9 MB instead of 4.8) and base64; `draw.js` unpacks it in the browser."""
    library = resources.files("plotly").joinpath("package_data", "plotly.min.js").read_bytes()
    return base64.b64encode(gzip.compress(library, 9, mtime=0)).decode("ascii")
