"""What a diagram is made of: nodes, edges with labels, and frames behind nodes."""

from dataclasses import dataclass, field

from .text import AXES, DETAIL, SHAPE, TITLE, Face, width_of

PAD, LEADING = 10, 15  # inside a node, and from one of its lines to the next
Point = tuple[float, float]


@dataclass(frozen=True)
class Rect:
    """A rectangle by its left upper corner; y grows downwards."""

    x: float
    y: float
    w: float
    h: float

    @property
    def right(self) -> float:
        return self.x + self.w

    @property
    def bottom(self) -> float:
        return self.y + self.h

    @property
    def middle(self) -> Point:
        return self.x + self.w / 2, self.y + self.h / 2

    def moved(self, dx: float, dy: float) -> "Rect":
        return Rect(self.x + dx, self.y + dy, self.w, self.h)


def around(boxes: list[Rect]) -> Rect:
    """The smallest rectangle that holds them all."""
    x, y = min(b.x for b in boxes), min(b.y for b in boxes)
    return Rect(x, y, max(b.right for b in boxes) - x, max(b.bottom for b in boxes) - y)


@dataclass(frozen=True)
class Text:
    """One line where it stands: x by `anchor` (start, middle, end), y the baseline."""

    words: str
    face: Face
    x: float
    y: float
    anchor: str = "middle"

    @property
    def width(self) -> float:
        return width_of(self.words, self.face)

    @property
    def box(self) -> Rect:
        """From the ascenders to the descenders."""
        left = self.x - self.width * {"start": 0, "middle": 0.5, "end": 1}[self.anchor]
        return Rect(left, self.y - 0.78 * self.face.size, self.width, self.face.size)

    def moved(self, dx: float, dy: float) -> "Text":
        return Text(self.words, self.face, self.x + dx, self.y + dy, self.anchor)


@dataclass(eq=False)
class Node:
    """A step: a box with a title and details."""

    name: str  # unique within a diagram
    lines: tuple[str, ...]  # the title, then details
    role: str = "stream"
    kind: str = "box"  # "box", "add" (circle on the stream), "dot" (a fork), "bare" (no box)
    about: object = None  # an About for the side panel; None where there is nothing to tell
    share: float | None = None  # 0 to 1: a bar along the bottom
    least: float = 0.0  # at least so wide
    box: Rect | None = None  # set by the layout

    def width(self) -> float:
        if self.kind in ("add", "dot"):
            return 24 if self.kind == "add" else 8
        texts = zip(self.lines, self.faces, strict=True)
        widest = max(width_of(words, face) for words, face in texts)
        return max(self.least, widest + 2 * PAD)

    def height(self) -> float:
        if self.kind in ("add", "dot"):
            return self.width()
        return len(self.lines) * LEADING + 13 + (7 if self.share is not None else 0)

    @property
    def faces(self) -> list[Face]:
        return [TITLE] + [DETAIL] * (len(self.lines) - 1)

    def texts(self) -> list[Text]:
        """The lines where they stand, centred in the box."""
        if self.kind in ("add", "dot"):
            return []
        x, middle = self.box.middle
        top = middle - (7 if self.share is not None else 0) / 2 - len(self.lines) * LEADING / 2
        return [
            Text(words, face, x, round(top + LEADING * i + 11.5, 2))
            for i, (words, face) in enumerate(zip(self.lines, self.faces, strict=True))
        ]


@dataclass(frozen=True)
class Label:
    """What an edge carries: a shape with its axis letters, and a word where one helps."""

    shape: tuple[int, ...]
    axes: str = ""
    word: str = ""
    stage: str | None = None  # the trace's stage of this very shape

    def lines(self) -> list[tuple[str, Face]]:
        first = f"{self.word} {self.shape}".strip()
        return [(first, SHAPE)] + ([(self.axes, AXES)] if self.axes else [])


@dataclass(eq=False)
class Edge:
    """An arrow along right angles, and what flows through it.

    `route` names the legs: "h" one horizontal leg, "hv" a horizontal one and then a vertical
    one; "loop" goes back below both. A fork has several targets and one label."""

    source: Node
    targets: list[Node]
    labels: list[Label]
    role: str = "stream"
    route: str = "h"
    thick: bool = False
    dashed: bool = False
    faint: bool = False
    leave: float = 0.0  # where it leaves and arrives: pixels off the middle of that side
    arrive: float = 0.0
    turn: float = 16.0  # from a bend to the node beside it
    place: str = "both"  # "both" sides of the leg, "above", "left" or "right"
    caption: str = ""  # a word over the labels
    holder: str = "first"  # the leg that holds the labels: "first" or "last"
    nudge: float = 0.0  # labels of a vertical leg stand so far below its middle
    paths: list[list[Point]] = field(default_factory=list)
    texts: list[Text] = field(default_factory=list)

    def lines(self) -> list[tuple[str, Face]]:
        head = [(self.caption, DETAIL)] if self.caption else []
        return head + [line for label in self.labels for line in label.lines()]

    @property
    def label_width(self) -> float:
        return max((width_of(words, face) for words, face in self.lines()), default=0)

    @property
    def leg(self) -> str:
        """Direction of the leg that holds the labels."""
        return self.route[0] if self.holder == "first" else self.route[-1]


@dataclass(eq=False)
class Frame:
    """A titled ground behind the nodes that it holds."""

    title: str
    nodes: list[Node]
    role: str = "stream"
    left: float = 14.0
    centred: bool = False  # the title, so that edges may come in on both sides of it
    box: Rect | None = None
