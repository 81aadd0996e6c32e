"""Griffe extension: diagrams in docstrings are rendered as drawn. Used by mkdocs.yml."""

from __future__ import annotations

from typing import Any

import griffe

from tools.docs_site import indent_diagrams


class Diagrams(griffe.Extension):  # type: ignore[misc] # griffe is installed with the site's packages only
    """Indents the diagrams of every docstring of the API reference."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = indent_diagrams(obj.docstring.value)
