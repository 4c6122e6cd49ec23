"""The way of an edge along right angles, and the place of its labels beside a leg."""

from .shapes import Edge, Node, Point, Rect, Text

BESIDE, OVER, UNDER, LINE = 7, 6, 14, 14  # from a leg to labels beside, over and under it
BEND = 7  # radius of a bend


def side(box: Rect, towards: float, y: float) -> Point:
    """Where a horizontal leg to or from x = towards meets the box."""
    return (box.right if towards > box.middle[0] else box.x), y


def edge_of(box: Rect, towards: float, x: float) -> Point:
    """Where a vertical leg to or from y = towards meets the box."""
    return x, (box.bottom if towards > box.middle[1] else box.y)


def straight(edge: Edge, a: Rect, b: Rect) -> list[Point]:
    """One leg; it keeps to the middle of the smaller of the two boxes."""
    if edge.route == "h":
        y = a.middle[1] + edge.leave if a.h <= b.h else b.middle[1] + edge.arrive
        return [side(a, b.middle[0], y), side(b, a.middle[0], y)]
    x = a.middle[0] + edge.leave if a.w <= b.w else b.middle[0] + edge.arrive
    return [edge_of(a, b.middle[1], x), edge_of(b, a.middle[1], x)]


def one_bend(edge: Edge, a: Rect, b: Rect) -> list[Point]:
    if edge.route == "hv":
        x, y = b.middle[0] + edge.arrive, a.middle[1] + edge.leave
        return [side(a, x, y), (x, y), edge_of(b, y, x)]
    x, y = a.middle[0] + edge.leave, b.middle[1] + edge.arrive
    return [edge_of(a, y, x), (x, y), side(b, x, y)]


def two_bends(edge: Edge, a: Rect, b: Rect, near: list[Rect]) -> list[Point]:
    """Out, across and in; a fork bends at one x for all its targets."""
    ya, yb = a.middle[1] + edge.leave, b.middle[1] + edge.arrive
    rightwards = b.middle[0] > a.middle[0]
    if edge.holder == "last":
        x = a.right + edge.turn if rightwards else a.x - edge.turn
    elif rightwards:
        x = min(box.x for box in near) - edge.turn
    else:
        x = max(box.right for box in near) + edge.turn
    return [side(a, x, ya), (x, ya), (x, yb), side(b, x, yb)]


def loop(edge: Edge, a: Rect, b: Rect) -> list[Point]:
    """Down past both, back, and up into the target from below."""
    x, y = a.middle[0], max(a.bottom, b.bottom) + 2.4 * edge.turn
    return [(x, a.bottom), (x, y), (b.middle[0], y), (b.middle[0], b.bottom)]


def path_to(edge: Edge, target: Node) -> list[Point]:
    """The corner points from the source to one target."""
    a, b = edge.source.box, target.box
    if edge.route == "loop":
        points = loop(edge, a, b)
    elif edge.route in ("h", "v"):
        points = straight(edge, a, b)
    elif edge.route in ("hv", "vh"):
        points = one_bend(edge, a, b)
    else:
        points = two_bends(edge, a, b, [node.box for node in edge.targets])
    return without_zero_legs([(round(x, 2), round(y, 2)) for x, y in points])


def paths_of(edge: Edge) -> list[list[Point]]:
    """One path a target; the branches of a fork begin where they leave its trunk."""
    trunk, *branches = [path_to(edge, target) for target in edge.targets]
    if edge.route == "hvh" and branches:
        y = edge.source.box.middle[1] + edge.leave
        x = min(node.box.x for node in edge.targets) - edge.turn - BEND
        branches = [[(round(x, 2), round(y, 2)), *path[1:]] for path in branches]
    return [trunk, *branches]


def without_zero_legs(points: list[Point]) -> list[Point]:
    """Drop repeated corners, and bends between legs of the same line."""
    kept = points[:1]
    for i, point in enumerate(points[1:], start=1):
        last = i == len(points) - 1
        if last or (abs(point[0] - kept[-1][0]) + abs(point[1] - kept[-1][1]) > 0.05):
            kept.append(point)
    straight_on = [
        i
        for i in range(1, len(kept) - 1)
        if kept[i - 1][0] == kept[i][0] == kept[i + 1][0]
        or kept[i - 1][1] == kept[i][1] == kept[i + 1][1]
    ]
    return [point for i, point in enumerate(kept) if i not in straight_on]


def label_texts(edge: Edge, limits: tuple[float, float] | None) -> list[Text]:
    """The label's lines beside the leg that holds them.

    `limits` cut a horizontal leg to the gap between two columns, where no node stands."""
    path = edge.paths[0] if edge.route != "loop" else edge.paths[0][1:3]
    (x0, y0), (x1, y1) = path[:2] if edge.holder == "first" else path[-2:]
    if y0 == y1 and edge.route != "v":
        low, high = sorted((x0, x1))
        if limits:
            low, high = max(low, limits[0]), min(high, limits[1])
        return over_and_under(edge, round((low + high) / 2, 2), y0)
    return beside(edge, x0, (y0 + y1) / 2 + edge.nudge)


def over_and_under(edge: Edge, x: float, y: float) -> list[Text]:
    lines = edge.lines()
    over = lines if edge.place == "above" else lines[: (len(lines) + 1) // 2]
    texts = [
        Text(words, face, x, y - OVER - LINE * (len(over) - 1 - i))
        for i, (words, face) in enumerate(over)
    ]
    under = lines[len(over) :]
    return texts + [
        Text(words, face, x, y + UNDER + LINE * i) for i, (words, face) in enumerate(under)
    ]


def beside(edge: Edge, x: float, y: float) -> list[Text]:
    left = edge.place == "left"
    lines = edge.lines()
    top = y - LINE * len(lines) / 2 + 10.5
    return [
        Text(
            words,
            face,
            x - BESIDE if left else x + BESIDE,
            round(top + LINE * i, 2),
            "end" if left else "start",
        )
        for i, (words, face) in enumerate(lines)
    ]
