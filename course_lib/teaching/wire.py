"""Panels on their way to the browser: all of one state in one message, arrays as raw bytes."""

from dataclasses import fields

import numpy as np

from course_lib.teaching.panels import Bars, Heat, Lines, Note, Panel, Picture, compact

KINDS = {kind.__name__: kind for kind in (Heat, Bars, Lines, Note, Picture)}
ALIGNMENT = 8  # bytes: a Float64Array must start at a multiple of it


class Packer:
    """Collects arrays in one block of bytes and leaves a reference in their place."""

    def __init__(self):
        self.chunks: list[bytes] = []
        self.size = 0

    def pack(self, value):
        if isinstance(value, np.ndarray | bytes):
            return self.reference(value)
        if isinstance(value, dict):
            return {str(name): self.pack(item) for name, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.pack(item) for item in value]
        return value.item() if isinstance(value, np.generic) else value

    def reference(self, value: np.ndarray | bytes) -> dict:
        raw = value if isinstance(value, bytes) else value.tobytes()
        dtype, shape = ("bytes", [len(raw)])
        if isinstance(value, np.ndarray):
            dtype, shape = value.dtype.name, list(value.shape)
        at = self.size
        padding = -len(raw) % ALIGNMENT
        self.chunks += [raw, b"\0" * padding]
        self.size += len(raw) + padding
        return {"at": at, "dtype": dtype, "shape": shape}


def sent(kind: type[Panel]) -> list[str]:
    """The fields of a panel that the browser gets."""
    return [f.name for f in fields(kind) if f.metadata.get("sent", True)]


def encode(rows: list[list[Panel]]) -> dict:
    """Rows of panels as {"rows": plain values with references, "data": bytes}."""
    packer = Packer()
    packed = [
        [
            {
                "kind": type(panel).__name__,
                **{name: packer.pack(getattr(panel, name)) for name in sent(type(panel))},
                "texts": texts_of(panel),
            }
            for panel in row
        ]
        for row in rows
    ]
    return {"rows": packed, "data": b"".join(packer.chunks)}


def texts_of(panel: Panel) -> list[str] | None:
    """Values written out by Python's format, so that both renderers write the same."""
    if isinstance(panel, Bars) and panel.show_values:
        totals = panel.values if panel.values.ndim == 1 else panel.values.sum(0)
        write = compact if panel.fmt == "compact" else panel.fmt.format
        return [panel.missing if np.isnan(value) else write(value) for value in totals]
    if isinstance(panel, Heat) and panel.fmt:
        return [panel.fmt.format(value) for value in panel.values.ravel()]
    return None


def decode(message: dict) -> list[list[Panel]]:
    """The panels as they were sent, read back from the bytes."""
    data = bytes(message["data"])
    return [[decode_panel(packed, data) for packed in row] for row in message["rows"]]


def decode_panel(packed: dict, data: bytes) -> Panel:
    kind = KINDS[packed["kind"]]
    return kind(**{name: unpack(packed[name], data) for name in sent(kind)})


def unpack(value, data: bytes):
    if isinstance(value, list):
        return [unpack(item, data) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) != {"at", "dtype", "shape"}:
        return {name: unpack(item, data) for name, item in value.items()}
    count = int(np.prod(value["shape"]))
    if value["dtype"] == "bytes":
        return data[value["at"] : value["at"] + count]
    flat = np.frombuffer(data, value["dtype"], count, value["at"])
    return flat.reshape(value["shape"])


def same(a: Panel, b: Panel) -> bool:
    """Whether two panels carry the same values, whatever their containers."""
    return type(a) is type(b) and all(
        same_value(getattr(a, name), getattr(b, name)) for name in sent(type(a))
    )


def same_value(a, b) -> bool:
    if isinstance(a, np.ndarray) or isinstance(b, np.ndarray):
        return a is not None and b is not None and np.array_equal(a, b, equal_nan=a.dtype != bool)
    if isinstance(a, dict) or isinstance(b, dict):
        return list(a) == list(b) and all(same_value(a[name], b[name]) for name in a)
    if isinstance(a, list | tuple) and isinstance(b, list | tuple):
        return len(a) == len(b) and all(same_value(x, y) for x, y in zip(a, b, strict=True))
    return a == b
