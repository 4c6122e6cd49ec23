"""Diagrams drawn from an instantiated model and its trace: change the Config and they change.

    architecture(model, trace)              the whole decoder
    block(model, trace, layer)              one block, attention opened
    moe(model, trace, layer)                the experts with the tokens they got
    generation(model, prefill, decode)      the cache, the last position, the loop

Read `shapes` (nodes, edges), `grid` and `routes` (where they stand), then one of the four.
`render` makes SVG and PNG, `diagram` what a cell shows, `telling` the side panel.
"""

from .decoding import generation
from .diagram import Diagram, live_html
from .experts import moe
from .one_block import block
from .whole import architecture

__all__ = ["Diagram", "architecture", "block", "generation", "live_html", "moe"]
