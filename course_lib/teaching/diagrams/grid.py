"""Nodes in the cells of a grid: every width, height and gap follows from the texts.

A column is as wide as its widest node, a gap as wide as the labels that stand in it, so that
nothing can overlap whatever the Config says; tests/teaching/test_diagrams.py measures it.
"""

from dataclasses import dataclass

from .routes import BESIDE, LINE, label_texts, paths_of
from .shapes import Edge, Frame, Label, Node, Point, Rect, around

MARGIN, GAP, FRAME_HEAD, FRAME_PAD = 18, 24, 22, 12


@dataclass(eq=False)
class Cell:
    """Nodes side by side without a gap between: steps in this order."""

    nodes: list[Node]
    column: int
    row: int
    rows: int = 1
    tall: bool = False  # its nodes fill all its rows
    align: float = 0.5  # in its column: 0 left, 1 right

    @property
    def last_row(self) -> int:
        return self.row + self.rows - 1

    def width(self) -> float:
        return sum(node.width() for node in self.nodes)

    def height(self) -> float:
        return max(node.height() for node in self.nodes)

    def place(self, left: float, right: float, top: float, bottom: float):
        """Give each node its box, centred in the cell."""
        height = bottom - top if self.tall else self.height()
        x = left + (right - left - self.width()) * self.align
        y = (top + bottom - height) / 2
        for node in self.nodes:
            node.box = Rect(round(x, 2), round(y, 2), round(node.width(), 2), round(height, 2))
            x += node.width()


class Grid:
    """Cells, edges and frames of one diagram, and after `arrange` where each of them stands."""

    def __init__(self):
        self.cells: list[Cell] = []
        self.edges: list[Edge] = []
        self.frames: list[Frame] = []
        self.cell_of: dict[Node, Cell] = {}
        self.column_gaps: dict[int, float] = {}  # right of that column, at least
        self.row_gaps: dict[int, float] = {}  # below that row, at least
        self.columns: dict[int, tuple[float, float]] = {}  # left and right
        self.size: Point = (0, 0)

    @property
    def nodes(self) -> list[Node]:
        return [node for cell in self.cells for node in cell.nodes]

    def put(self, column: int, row: int, *nodes: Node, **how):
        """Place nodes side by side in a cell; `how` are the other fields of Cell."""
        cell = Cell(list(nodes), column, row, **how)
        self.cells.append(cell)
        self.cell_of.update(dict.fromkeys(nodes, cell))

    def join(self, source: Node, target: Node | list[Node], *labels: Label, **how) -> Edge:
        """Draw an edge with its labels; `how` are the fields of Edge."""
        targets = target if isinstance(target, list) else [target]
        edge = Edge(source, targets, list(labels), **how)
        self.edges.append(edge)
        return edge

    def frame(self, title: str, nodes: list[Node], role: str, **how):
        """Put a ground behind nodes, and ask for the room of its title."""
        self.frames.append(Frame(title, nodes, role, **how))
        rows = [(self.cell_of[n].row, self.cell_of[n].last_row) for n in nodes]
        self.room_below(min(row for row, _ in rows) - 1, FRAME_HEAD + FRAME_PAD + 16)
        self.room_below(max(row for _, row in rows), FRAME_PAD + 16)

    def room_below(self, row: int, pixels: float):
        self.row_gaps[row] = max(pixels, self.row_gaps.get(row, 0))

    def room_right(self, column: int, pixels: float):
        self.column_gaps[column] = max(pixels, self.column_gaps.get(column, 0))

    def arrange(self) -> "Grid":
        """Give every node its box, every edge its path and labels, every frame its ground."""
        widths = self.widths()
        for edge in self.edges:
            self.make_room(edge, widths)
        self.columns = spread(widths, self.column_gaps)
        rows = spread(self.heights(), self.row_gaps)
        for cell in self.cells:
            left_right = self.columns[cell.column]
            cell.place(*left_right, rows[cell.row][0], rows[cell.last_row][1])
        for edge in self.edges:
            edge.paths = paths_of(edge)
            edge.texts = label_texts(edge, self.limits(edge)) if edge.labels else []
        for frame in self.frames:
            frame.box = self.ground(frame)
        self.move_into_view()
        return self

    def ground(self, frame: Frame) -> Rect:
        """Around the nodes of a frame and the labels between them, with room for the title."""
        texts = [
            text.box
            for edge in self.edges
            if edge.source in frame.nodes and set(edge.targets) <= set(frame.nodes)
            for text in edge.texts
        ]
        box = around([*(node.box for node in frame.nodes), *texts])
        left = min(node.box.x for node in frame.nodes) - frame.left
        top = box.y - FRAME_HEAD - FRAME_PAD
        return Rect(left, top, box.right + FRAME_PAD - left, box.bottom + FRAME_PAD - top)

    def widths(self) -> dict[int, float]:
        numbers = [cell.column for cell in self.cells]
        widths = dict.fromkeys(range(min(numbers), max(numbers) + 1), 0.0)
        for cell in self.cells:
            widths[cell.column] = max(widths[cell.column], cell.width())
        return widths

    def heights(self) -> dict[int, float]:
        last = max(cell.last_row for cell in self.cells)
        heights = dict.fromkeys(range(min(cell.row for cell in self.cells), last + 1), 0.0)
        for cell in self.cells:
            if cell.rows == 1:
                heights[cell.row] = max(heights[cell.row], cell.height())
        return heights

    def gap_of(self, edge: Edge) -> int:
        """The gap (by the column on its left) in which a horizontal label stands."""
        start, end = self.cell_of[edge.source].column, self.cell_of[edge.targets[0]].column
        if edge.holder == "first":
            return start if end > start else start - 1
        return end - 1 if end > start else end

    def make_room(self, edge: Edge, widths: dict[int, float]):
        """Ask for the room that the labels take in the gap where they stand."""
        if not edge.labels or edge.route == "loop":
            return
        start, end = self.cell_of[edge.source], self.cell_of[edge.targets[0]]
        if edge.leg == "h":
            bend = edge.turn if len(edge.route) > 1 else 8
            self.room_right(self.gap_of(edge), edge.label_width + 2 * BESIDE + bend)
            return
        upright = end if edge.route == "hv" else start
        beyond = edge.label_width + BESIDE + 12 - widths[upright.column] / 2 + abs(edge.leave)
        self.room_right(upright.column - (edge.place == "left"), beyond)
        if edge.route == "v" and not edge.thick:
            upper = min(start.last_row, end.last_row)
            self.room_below(upper, LINE * len(edge.lines()) + 14)

    def limits(self, edge: Edge) -> tuple[float, float] | None:
        """Left and right end of the gap where a horizontal label stands, up to the node."""
        if edge.leg != "h" or edge.route == "loop":
            return None
        gap = self.gap_of(edge)
        left, right = self.columns[gap][1], self.columns[gap + 1][0]
        node = edge.source if edge.holder == "first" else edge.targets[0]
        if node.box.middle[0] < left:
            return node.box.right, right
        return left, node.box.x

    def move_into_view(self):
        """Move all so that the picture begins at its margin, and take its size."""
        boxes = [item.box for item in [*self.nodes, *self.frames]]
        boxes += [text.box for edge in self.edges for text in edge.texts]
        boxes += [Rect(x, y, 0, 0) for e in self.edges for path in e.paths for x, y in path]
        whole = around(boxes)
        dx, dy = round(MARGIN - whole.x, 2), round(MARGIN - whole.y, 2)
        for item in [*self.nodes, *self.frames]:
            item.box = item.box.moved(dx, dy)
        for edge in self.edges:
            edge.paths = [[(x + dx, y + dy) for x, y in path] for path in edge.paths]
            edge.texts = [text.moved(dx, dy) for text in edge.texts]
        self.size = (round(whole.w + 2 * MARGIN), round(whole.h + 2 * MARGIN))


def spread(sizes: dict[int, float], gaps: dict[int, float]) -> dict[int, tuple[float, float]]:
    """Start and end of each column or row, one after another with its gap."""
    at, spans = 0.0, {}
    for number, size in sizes.items():
        spans[number] = (round(at, 2), round(at + size, 2))
        at += size + gaps.get(number, GAP)
    return spans
