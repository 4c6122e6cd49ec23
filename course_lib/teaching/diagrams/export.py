"""Exported HTML in which diagrams are live: the stored PNG carries the viewer's data along.

jupyter nbconvert --to html \\
    --HTMLExporter.preprocessors=course_lib.teaching.diagrams.export.LiveDiagrams NB
"""

import base64

from nbconvert.preprocessors import Preprocessor

from .diagram import live_html

WIDGET_VIEW = "application/vnd.jupyter.widget-view+json"


class LiveDiagrams(Preprocessor):
    """Give each stored diagram its viewer as HTML; every other output stays as it is. Module 16."""

    def preprocess_cell(self, cell, resources, index):
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if "image/png" not in data:
                continue
            html = live_html(base64.b64decode(data["image/png"]))
            if html is not None:
                data.pop(WIDGET_VIEW, None)  # it needs a kernel, and would be chosen first
                data["text/html"] = html
        return cell, resources
