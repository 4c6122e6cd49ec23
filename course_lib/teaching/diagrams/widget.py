"""The live viewer in JupyterLab: the same script as in exported HTML, as an anywidget."""

import anywidget
import traitlets

from .diagram import STATIC

MODULE = """
function render({ model, el }) {
  const draw = () => mountDiagram(el, model.get("svg"), JSON.parse(model.get("panel")));
  model.on("change:svg", draw);
  draw();
  return () => model.off("change:svg", draw);
}
export default { render };
"""


class DiagramWidget(anywidget.AnyWidget):
    """A diagram's SVG with what its nodes tell (JSON). Module 16."""

    _esm = (STATIC / "diagram.js").read_text(encoding="utf-8") + MODULE
    _css = (STATIC / "diagram.css").read_text(encoding="utf-8")
    svg = traitlets.Unicode().tag(sync=True)
    panel = traitlets.Unicode("{}").tag(sync=True)
