// Draw the panels that wire.py has packed: heat maps, bars, lines, text, diagrams.
//
// Order: values and text, colours, axes, the three plots, panels in the page, the widget.
// A plot is a function (ctx, box, panel, look) that draws and returns { find, outline, tell }:
// find(x, y) names the place under the pointer, outline(place) draws round it, tell(place) says
// its value. Nothing here computes a value of its own or needs the network.

// ---- values and text ------------------------------------------------------------------------

const ARRAYS = { float32: Float32Array, float64: Float64Array, bool: Uint8Array };

function unpack(value, buffer) {
  if (Array.isArray(value)) return value.map((item) => unpack(item, buffer));
  if (value === null || typeof value !== "object") return value;
  if (!("at" in value && "dtype" in value)) {
    return Object.fromEntries(Object.entries(value).map(([k, v]) => [k, unpack(v, buffer)]));
  }
  const count = value.shape.reduce((a, b) => a * b, 1);
  if (value.dtype === "bytes") return new Uint8Array(buffer, value.at, count);
  const array = new ARRAYS[value.dtype](buffer, value.at, count);
  return Object.assign(array, { dims: value.shape });
}

// A copy: the message's bytes need not start at a multiple of eight.
const aligned = (view) =>
  new Uint8Array(view.buffer, view.byteOffset, view.byteLength).slice().buffer;

const exact = (value) =>
  Number.isInteger(value) ? value.toLocaleString("en") : String(Number(value.toPrecision(6)));

function compact(value) {
  for (const [size, suffix] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size * 0.9999) return Number((value / size).toPrecision(3)) + suffix;
  }
  return String(Number(value.toPrecision(3)));
}

// ---- colours --------------------------------------------------------------------------------

const rgb = (hex) => [1, 3, 5].map((i) => parseInt(hex.slice(i, i + 2), 16));

// 256 colours between stops of equal distance, mixed in sRGB as matplotlib does.
function ramp(stops) {
  const known = stops.map(rgb);
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i / 255) * (known.length - 1);
    const from = Math.min(Math.floor(at), known.length - 2);
    return known[from].map((c, k) => Math.round(c + (known[from + 1][k] - c) * (at - from)));
  });
}

function roleColour(role, palette) {
  const [word, number] = role.split(" ");
  if (word === "expert" && number) return palette.experts[number % palette.experts.length];
  return palette.roles[role] ?? palette.roles.stream;
}

// What the page looks like now: JupyterLab's own colours and sizes, and which light it is.
function lookOf(node, palette) {
  const style = getComputedStyle(node);
  const read = (name, otherwise) => style.getPropertyValue(name).trim() || otherwise;
  const dark = document.body.dataset.jpThemeLight === "false";
  const light = dark ? "dark" : "light";
  const size = Math.max(12, 0.93 * (parseFloat(read("--jp-content-font-size1", "14px")) || 14));
  return {
    palette,
    size,
    ink: read("--jp-content-font-color1", "#1f2328"),
    faint: read("--jp-content-font-color2", "#57606a"),
    line: read("--jp-border-color2", "#d9dce1"),
    paper: read("--jp-layout-color0", "#ffffff"),
    masked: palette.masked[light],
    hatch: palette.hatch[light],
    ramps: { sequential: ramp(palette.sequential[light]), diverging: ramp(palette.diverging[light]) },
    font: `${size}px ${read("--jp-ui-font-family", "system-ui, sans-serif")}`,
    step: Math.round(size * 1.45),
    ratio: window.devicePixelRatio || 1,
  };
}

function hatching(ctx, look) {
  const side = Math.round(7 * look.ratio);
  const tile = new OffscreenCanvas(side, side);
  const pen = tile.getContext("2d");
  pen.fillStyle = look.masked;
  pen.fillRect(0, 0, side, side);
  pen.strokeStyle = look.hatch;
  pen.lineWidth = look.ratio;
  for (const shift of [-side, 0, side]) {
    pen.beginPath();
    pen.moveTo(shift, side);
    pen.lineTo(shift + side, 0);
    pen.stroke();
  }
  const pattern = ctx.createPattern(tile, "repeat");
  pattern.setTransform(new DOMMatrix().scale(1 / look.ratio));
  return pattern;
}

// ---- axes -----------------------------------------------------------------------------------

// Round numbers that cover low to high in about `wanted` steps; counts get whole ones.
function niceTicks(low, high, wanted, counts = false) {
  const raw = Math.max((high - low || 1) / Math.max(1, wanted), counts ? 1 : 0);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 2.5, 5, 10].find((m) => m * power >= raw * 0.999 && (power > 1 || !counts || m !== 2.5));
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) ticks.push(n * step);
  return ticks;
}

function logTicks(low, high, wanted) {
  const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
  const factors = last - first > wanted ? [1] : last - first > 2 ? [1, 3] : [1, 2, 5];
  const all = [];
  for (let e = first; e <= last; e++) for (const f of factors) all.push(f * 10 ** e);
  const inside = all.filter((t) => t >= low * 0.999 && t <= high * 1.001);
  const every = Math.ceil(inside.length / Math.max(1, wanted));
  return inside.filter((_, i) => i % every === 0);
}

function text(ctx, string, x, y, { align = "left", base = "middle", colour, turn = 0, bold, halo } = {}) {
  ctx.save();
  if (colour) ctx.fillStyle = colour;
  if (bold) ctx.font = `600 ${ctx.font}`;
  ctx.textAlign = align;
  ctx.textBaseline = base;
  ctx.translate(x, y);
  ctx.rotate(turn);
  if (halo) {
    [ctx.strokeStyle, ctx.lineWidth, ctx.lineJoin] = [halo, 4, "round"];
    ctx.strokeText(string, 0, 0);
  }
  ctx.fillText(string, 0, 0);
  ctx.restore();
}

function shorten(ctx, string, width) {
  if (ctx.measureText(string).width <= width) return string;
  let kept = string;
  while (kept.length > 1 && ctx.measureText(kept + "…").width > width) kept = kept.slice(0, -1);
  return kept + "…";
}

const widest = (ctx, strings) =>
  strings.reduce((most, s) => Math.max(most, ctx.measureText(s).width), 0);

// Labels under cells or bars: flat where they fit, else slanted where named, else every nth.
// An empty label leaves its room to its neighbours.
function planLabels(ctx, labels, named, cell, look, room) {
  const most = widest(ctx, labels);
  const written = labels.map((label, i) => (label ? i : -1)).filter((i) => i >= 0);
  const apart = Math.min(labels.length, ...written.slice(1).map((at, i) => at - written[i]));
  if (most + 6 <= cell * apart) return { every: 1, slanted: false, height: look.step };
  if (named && cell >= look.size * 0.95) {
    return { every: 1, slanted: true, height: Math.min(most * 0.71 + look.size, room) };
  }
  let every = Math.ceil((most + 10) / cell);
  if (!named) every = [1, 2, 5, 10, 20, 25, 50, 100, 200, 500].find((n) => n >= every) ?? every;
  return { every, slanted: false, height: look.step };
}

function drawLabels(ctx, labels, plan, left, cell, y, look, strong = null) {
  labels.forEach((label, i) => {
    if (i % plan.every && i !== strong) return;
    if (plan.every > 1 && strong !== null && i !== strong && Math.abs(i - strong) < plan.every) return;
    const x = left + (i + 0.5) * cell;
    const how = { colour: look.ink, bold: i === strong };
    if (plan.slanted) {
      const fits = shorten(ctx, label, (plan.height - look.size * 0.6) / 0.71);
      text(ctx, fits, x + 4, y + 6, { ...how, align: "right", base: "middle", turn: -Math.PI / 4 });
    } else {
      const half = ctx.measureText(label).width * (how.bold ? 0.56 : 0.5);
      const inside = Math.min(x, ctx.canvas.width / look.ratio - half - 1);
      text(ctx, label, inside, y + 4, { ...how, align: "center", base: "top" });
    }
  });
}

function drawAxisNames(ctx, frame, bottom, panel, look) {
  const middle = (frame.top + frame.bottom) / 2;
  const faint = { colour: look.faint };
  if (panel.xlabel) {
    const at = { ...faint, align: "center", base: "top" };
    text(ctx, panel.xlabel, (frame.left + frame.right) / 2, bottom, at);
  }
  if (panel.ylabel) {
    const turned = { ...faint, align: "center", base: "top", turn: -Math.PI / 2 };
    text(ctx, shorten(ctx, panel.ylabel, frame.bottom - frame.top + 24), 0, middle, turned);
  }
}

// One line of entries above a plot, right-aligned: [{ name, draw(ctx, x, y) }].
function drawLegend(ctx, entries, right, look) {
  let x = right;
  for (const { name, swatch } of [...entries].reverse()) {
    x -= ctx.measureText(name).width;
    if (x < 24) return;
    text(ctx, name, x, look.size * 0.6, { colour: look.ink });
    x -= 24;
    swatch(x, look.size * 0.6);
    x -= 12;
  }
}

const block = (ctx, colour) => (x, y) => {
  ctx.fillStyle = colour;
  ctx.fillRect(x + 4, y - 5, 14, 10);
};

const dash = (ctx, colour, pattern, width) => (x, y) => {
  ctx.save();
  stroke(ctx, colour, width, pattern, [[x, y], [x + 19, y]]);
  ctx.restore();
};

function stroke(ctx, colour, width, pattern, points) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = width;
  ctx.setLineDash(pattern);
  ctx.beginPath();
  let drawing = false;
  for (const [x, y] of points) {
    if (!Number.isFinite(x + y)) drawing = false;
    else if (drawing) ctx.lineTo(x, y);
    else {
      ctx.moveTo(x, y);
      drawing = true;
    }
  }
  ctx.stroke();
  ctx.setLineDash([]);
}

function outlineBox(ctx, look, x, y, w, h, pattern = []) {
  ctx.save();
  ctx.lineWidth = 4;
  ctx.strokeStyle = look.paper;
  ctx.strokeRect(x - 1, y - 1, w + 2, h + 2);
  ctx.lineWidth = 2;
  ctx.strokeStyle = look.ink;
  ctx.setLineDash(pattern);
  ctx.strokeRect(x - 1, y - 1, w + 2, h + 2);
  ctx.restore();
}

// ---- heat map -------------------------------------------------------------------------------

const GAP = 12; // between tiles

// How many tiles side by side make the cells largest; the same rule as agg.tiles_across.
function tilesAcross(n, rows, columns, width, height, head) {
  let best = 1, most = -Infinity;
  for (let c = 1; c <= n; c++) {
    const down = Math.ceil(n / c);
    const wide = (width - GAP * (c - 1)) / (c * columns), high = (height - head * down) / (down * rows);
    if (Math.min(wide, high) > most + 1e-9) [best, most] = [c, Math.min(wide, high)];
  }
  return best;
}

function heatImage(panel, look, tile, rows, columns) {
  const colours = look.ramps[panel.scale], mask = rgb(look.masked);
  const [low, high] = panel.limits, scale = 255 / (high - low || 1);
  const image = new ImageData(columns, rows), offset = tile * rows * columns;
  for (let i = 0; i < rows * columns; i++) {
    const hidden = panel.hidden && panel.hidden[offset + i];
    const level = Math.round((panel.values[offset + i] - low) * scale);
    const colour = hidden ? mask : colours[Math.max(0, Math.min(255, level))];
    image.data.set([colour[0], colour[1], colour[2], 255], 4 * i);
  }
  const canvas = new OffscreenCanvas(columns, rows);
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

function heatGeometry(ctx, box, panel, look) {
  const dims = panel.values.dims, tiled = dims.length === 3;
  const [n, rows, columns] = tiled ? dims : [1, ...dims];
  const limits = [panel.limits[0], panel.limits[1]].map(compact);
  const yTexts = tiled ? [] : panel.yticks ?? Array.from({ length: rows }, (_, i) => String(i));
  const xTexts = tiled ? [] : panel.xticks ?? Array.from({ length: columns }, (_, i) => String(i));
  const yWidth = Math.min(widest(ctx, yTexts), box.w * 0.38);
  const left = (panel.ylabel ? look.step : 0) + (tiled ? 0 : yWidth + 8);
  const right = widest(ctx, limits) + 12 + 18;
  const top = panel.hidden && panel.hidden.some(Boolean) ? look.step : 6;
  const inner = Math.max(20, box.w - left - right);
  const planFor = (cell) =>
    tiled ? { height: 4 } : planLabels(ctx, xTexts, !!panel.xticks, cell, look, box.h * 0.35);
  const highFor = (plan) => Math.max(20, box.h - top - plan.height - 4 - (panel.xlabel ? look.step : 0));
  const square = panel.square ?? rows === columns;
  let plan = planFor(inner / columns);
  if (square) plan = planFor(Math.min(inner / columns, highFor(plan) / rows));
  const high = highFor(plan);
  const head = tiled ? look.step + 4 : 0;
  const across = tilesAcross(n, rows, columns, inner, high, head);
  const down = Math.ceil(n / across);
  let cw = (inner - GAP * (across - 1)) / (across * columns);
  let ch = (high - head * down) / (down * rows);
  if (square) cw = ch = Math.min(cw, ch);
  const whole = (size) => (size > 3 ? Math.floor(size * look.ratio) / look.ratio : Math.max(size, 0.05));
  [cw, ch] = [whole(cw), whole(ch)];
  const tileAt = (i) => [
    left + (i % across) * (columns * cw + GAP),
    top + head + Math.floor(i / across) * (rows * ch + head),
  ];
  const width = across * columns * cw + GAP * (across - 1);
  const height = down * (rows * ch + head) - head;
  const frame = { left, right: left + width, top: top + head, bottom: top + head + height };
  return { tiled, n, rows, columns, cw, ch, tileAt, frame, plan, limits, xTexts, yTexts, yWidth };
}

function drawHeat(ctx, box, panel, look) {
  const g = heatGeometry(ctx, box, panel, look);
  for (let i = 0; i < g.n; i++) drawTile(ctx, g, i, panel, look);
  drawHeatAxes(ctx, g, panel, look);
  drawColourBar(ctx, g, panel, look);
  const cell = ({ tile, y, x }) => {
    const [left, top] = g.tileAt(tile);
    return [left + x * g.cw, top + y * g.ch, g.cw, g.ch];
  };
  if (panel.mark) {
    const tiles = panel.mark_tile === null ? [...Array(g.n).keys()] : [panel.mark_tile];
    const [y, x] = panel.mark;
    for (const tile of tiles) outlineBox(ctx, look, ...cell({ tile, y, x }));
  }
  return {
    start: { tile: panel.mark_tile ?? 0, y: panel.mark?.[0] ?? 0, x: panel.mark?.[1] ?? 0 },
    most: { tile: g.n, y: g.rows, x: g.columns },
    find: (px, py) => heatFind(g, px, py),
    outline: (place) => outlineBox(ctx, look, ...cell(place), [3, 2]),
    tell: (place) => heatTell(g, panel, place),
  };
}

function heatFind(g, px, py) {
  for (let tile = 0; tile < g.n; tile++) {
    const [left, top] = g.tileAt(tile);
    const x = Math.floor((px - left) / g.cw), y = Math.floor((py - top) / g.ch);
    if (x >= 0 && x < g.columns && y >= 0 && y < g.rows) return { tile, y, x };
  }
  return null;
}

function heatTell(g, panel, { tile, y, x }) {
  const at = (tile * g.rows + y) * g.columns + x;
  const hidden = panel.hidden && panel.hidden[at];
  const name = (label, ticks, i) =>
    [label || null, ticks ? `${ticks[i]}${ticks[i] === String(i) ? "" : ` [${i}]`}` : i]
      .filter((part) => part !== null)
      .join(" ");
  const value = hidden ? panel.hidden_label : exact(panel.values[at]);
  return [
    ...(g.tiled ? [panel.names[tile]] : []),
    name(panel.ylabel || "row", panel.yticks, y),
    name(panel.xlabel || "column", panel.xticks, x),
  ].join(" · ") + `:  ${value}`;
}

function drawTile(ctx, g, i, panel, look) {
  const [left, top] = g.tileAt(i), width = g.columns * g.cw, height = g.rows * g.ch;
  ctx.imageSmoothingEnabled = g.cw < 1 || g.ch < 1;
  ctx.drawImage(heatImage(panel, look, i, g.rows, g.columns), left, top, width, height);
  if (panel.hidden) hatchTile(ctx, g, i, panel, look);
  if (panel.texts) writeCells(ctx, g, i, panel, look);
  ctx.strokeStyle = look.line;
  ctx.lineWidth = 1;
  ctx.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
  if (g.tiled) {
    const name = shorten(ctx, tileName(ctx, panel.names, i, width + 8), width + 10);
    text(ctx, name, left, top - 3, { base: "bottom", colour: look.ink });
  }
}

// "h 12" is 12 on all tiles where it does not fit on one: the number tells tiles apart.
function tileName(ctx, names, i, width) {
  const numbers = names.map((name) => name.match(/^\D+(\d+)$/)?.[1]);
  return widest(ctx, names) > width && numbers.every(Boolean) ? numbers[i] : names[i];
}

function hatchTile(ctx, g, i, panel, look) {
  const [left, top] = g.tileAt(i), offset = i * g.rows * g.columns;
  ctx.beginPath();
  for (let y = 0; y < g.rows; y++) {
    for (let x = 0; x < g.columns; x++) {
      if (!panel.hidden[offset + y * g.columns + x]) continue;
      const from = x;
      while (x + 1 < g.columns && panel.hidden[offset + y * g.columns + x + 1]) x++;
      ctx.rect(left + from * g.cw, top + y * g.ch, (x + 1 - from) * g.cw, g.ch);
    }
  }
  ctx.fillStyle = hatching(ctx, look);
  ctx.fill();
}

function writeCells(ctx, g, i, panel, look) {
  const [left, top] = g.tileAt(i), offset = i * g.rows * g.columns;
  if (widest(ctx, panel.texts) + 4 > g.cw || look.size + 2 > g.ch) return;
  const [low, high] = panel.limits, colours = look.ramps[panel.scale];
  for (let at = 0; at < g.rows * g.columns; at++) {
    if (panel.hidden && panel.hidden[offset + at]) continue;
    const level = Math.round((255 * (panel.values[offset + at] - low)) / (high - low || 1));
    const [r, gr, b] = colours[Math.max(0, Math.min(255, level))];
    const colour = 0.299 * r + 0.587 * gr + 0.114 * b > 140 ? "#111111" : "#ffffff";
    const x = left + ((at % g.columns) + 0.5) * g.cw;
    const y = top + (Math.floor(at / g.columns) + 0.5) * g.ch;
    text(ctx, panel.texts[offset + at], x, y, { align: "center", colour });
  }
}

function drawHeatAxes(ctx, g, panel, look) {
  const { frame, plan } = g;
  if (!g.tiled) {
    const mark = panel.mark ?? [null, null];
    drawLabels(ctx, g.xTexts, plan, frame.left, g.cw, frame.bottom, look, mark[1]);
    const low = panel.yticks && g.ch >= 10.5 && g.ch < look.size + 2; // all names, a little smaller
    if (low) ctx.font = look.font.replace(`${look.size}px`, `${Math.min(look.size, g.ch)}px`);
    const every = panel.yticks
      ? Math.ceil((low ? 1 : look.size + 3) / g.ch)
      : [1, 2, 5, 10, 20, 50, 100, 200, 500].find((n) => n * g.ch >= look.size + 6) ?? 1000;
    g.yTexts.forEach((label, i) => {
      if (i % every && i !== mark[0]) return;
      if (every > 1 && mark[0] !== null && i !== mark[0] && Math.abs(i - mark[0]) < every) return;
      const at = { align: "right", colour: look.ink, bold: i === mark[0] };
      text(ctx, shorten(ctx, label, g.yWidth), frame.left - 6, frame.top + (i + 0.5) * g.ch, at);
    });
    ctx.font = look.font;
  }
  drawAxisNames(ctx, frame, frame.bottom + plan.height + 3, panel, look);
}

function drawColourBar(ctx, g, panel, look) {
  const { left, right, top, bottom } = g.frame, x = right + 12;
  drawHiddenName(ctx, left, right, panel, look);
  if (bottom - top < 2.2 * look.size) return; // no room for its two numbers
  const colours = look.ramps[panel.scale];
  const fill = ctx.createLinearGradient(0, bottom, 0, top);
  for (const i of [0, 64, 128, 191, 255]) fill.addColorStop(i / 255, `rgb(${colours[i]})`);
  ctx.fillStyle = fill;
  ctx.fillRect(x, top, 10, bottom - top);
  ctx.strokeStyle = look.line;
  ctx.lineWidth = 1;
  ctx.strokeRect(x - 0.5, top - 0.5, 11, bottom - top + 1);
  const at = { colour: look.faint };
  text(ctx, g.limits[1], x + 15, top + look.size / 2, at);
  text(ctx, g.limits[0], x + 15, bottom - look.size / 2, at);
}

function drawHiddenName(ctx, left, right, panel, look) {
  if (!panel.hidden || !panel.hidden.some(Boolean)) return;
  const name = panel.hidden_label, width = ctx.measureText(name).width;
  const from = Math.max(left, right - width - 20);
  ctx.fillStyle = hatching(ctx, look);
  ctx.fillRect(from, 1, 14, look.size - 1);
  text(ctx, name, from + 19, look.size / 2 + 0.5, { colour: look.faint });
}

// ---- bars -----------------------------------------------------------------------------------

function drawBars(ctx, box, panel, look) {
  const dims = panel.values.dims, stacked = dims.length === 2;
  const [names, n] = stacked ? dims : [1, dims[0]];
  const sum = (i) => Array.from({ length: names }, (_, k) => panel.values[k * n + i]).reduce((a, b) => a + b, 0);
  const totals = Array.from({ length: n }, (_, i) => sum(i)); // NaN where there is no value
  const known = totals.filter((total) => !Number.isNaN(total));
  const limits = panel.limits ?? [
    Math.min(0, ...known) * 1.12,
    Math.max(...known, panel.reference ?? 0, 1e-12) * 1.12,
  ];
  // a bar that ends at the upper limit carries its number above the frame
  const above = (limits[1] - Math.max(...known)) / (limits[1] - limits[0]);
  const fills = above * (box.h - look.step * (2 + !!panel.xlabel)) < 0.9 * look.size;
  const legend = barLegend(ctx, panel, look, stacked);
  const top = (legend.length ? look.step : 0) + (panel.show_values ? look.size * (fills ? 1.5 : 0.6) : 4);
  const frame = { top, right: box.w - 2 };
  const ticks = niceTicks(...limits, box.h / 45, known.every(Number.isInteger));
  frame.left = (panel.ylabel ? look.step : 0) + widest(ctx, ticks.map(compact)) + 8;
  const numbered = panel.labels.every((label) => /^\d+$/.test(label));
  const planFor = (wide) => planLabels(ctx, panel.labels, !numbered, wide / n, look, box.h * 0.35);
  if (planFor(frame.right - frame.left).slanted) {
    frame.left = Math.max(frame.left, ctx.measureText(panel.labels[0]).width * 0.71);
  }
  const cell = (frame.right - frame.left) / n, plan = planFor(frame.right - frame.left);
  frame.bottom = box.h - plan.height - (panel.xlabel ? look.step : 0) - 4;
  const scale = (frame.bottom - frame.top) / (limits[1] - limits[0]);
  const y = (value) => frame.bottom - (value - limits[0]) * scale;
  drawGrid(ctx, frame, [], ticks.map((t) => [y(t), compact(t)]), look);
  const width = Math.max(1, cell * (cell > 8 ? 0.78 : 0.9));
  for (let i = 0; i < n; i++) drawBar(ctx, panel, i, n, names, frame.left + (i + 0.5) * cell, width, y, look);
  stroke(ctx, look.faint, 1, [], [[frame.left, y(Math.max(0, limits[0]))], [frame.right, y(Math.max(0, limits[0]))]]);
  if (panel.reference !== null) {
    const at = y(panel.reference);
    stroke(ctx, look.ink, 1.5, [6, 4], [[frame.left, at], [frame.right, at]]);
  }
  writeTotals(ctx, panel, totals, frame, cell, y, look);
  drawLabels(ctx, panel.labels, plan, frame.left, cell, frame.bottom, look, panel.mark);
  drawAxisNames(ctx, frame, frame.bottom + plan.height + 3, panel, look);
  drawLegend(ctx, legend, frame.right, look);
  const outline = ({ x }, pattern = [3, 2]) => {
    const total = totals[x] || 0;
    outlineBox(ctx, look, frame.left + x * cell + (cell - width) / 2, y(Math.max(total, 0)), width, Math.abs(y(0) - y(total)), pattern);
  };
  if (panel.mark !== null) outline({ x: panel.mark }, []);
  return {
    start: { x: panel.mark ?? 0 },
    most: { x: n },
    find: (px) => {
      const x = Math.floor((px - frame.left) / cell);
      return x >= 0 && x < n ? { x } : null;
    },
    outline,
    tell: ({ x }) => barTell(panel, x, n, names, stacked, totals),
  };
}

function barLegend(ctx, panel, look, stacked) {
  const entries = stacked
    ? panel.names.map((name, k) => ({ name, swatch: block(ctx, roleColour(panel.roles[k], look.palette)) }))
    : [];
  if (panel.reference !== null && panel.reference_label) {
    entries.push({ name: panel.reference_label, swatch: dash(ctx, look.ink, [6, 4], 1.5) });
  }
  return entries;
}

function barTell(panel, x, n, names, stacked, totals) {
  const parts = stacked
    ? panel.names.map((name, k) => `${name} ${exact(panel.values[k * n + x])}`).join(", ") + ", together "
    : "";
  const label = [panel.xlabel, panel.labels[x]].filter(Boolean).join(" ");
  if (Number.isNaN(totals[x])) return `${label}:  ${panel.missing}`;
  return `${label}:  ${parts}${exact(totals[x])}${panel.ylabel ? ` ${panel.ylabel}` : ""}`;
}

function drawBar(ctx, panel, i, n, names, middle, width, y, look) {
  let floor = 0;
  for (let k = 0; k < names; k++) {
    const value = panel.values[k * n + i];
    ctx.fillStyle = roleColour(panel.roles[names > 1 || panel.names ? k : i], look.palette);
    const [from, to] = [y(floor), y(floor + value)];
    const gap = k > 0 && Math.abs(from - to) > 3 ? 1 : 0; // a thin line of paper between parts
    ctx.fillRect(middle - width / 2, Math.min(from, to), width, Math.abs(from - to) - gap);
    floor += value;
  }
}

function writeTotals(ctx, panel, totals, frame, cell, y, look) {
  if (!panel.texts || widest(ctx, panel.texts) + 2 > cell) return;
  totals.forEach((value, i) => {
    const below = value < 0, none = Number.isNaN(value);
    const at = { align: "center", base: below ? "top" : "bottom", halo: look.paper };
    const height = y(none ? 0 : value) + (below ? 3 : -3);
    text(ctx, panel.texts[i], frame.left + (i + 0.5) * cell, height, { ...at, colour: none ? look.faint : look.ink });
  });
}

// Horizontal lines at [position, label], and vertical ones.
function drawGrid(ctx, frame, verticals, horizontals, look) {
  for (const [y, label] of horizontals) {
    stroke(ctx, look.line, 1, [], [[frame.left, y], [frame.right, y]]);
    text(ctx, label, frame.left - 6, y, { align: "right", colour: look.faint });
  }
  for (const [x, label] of verticals) {
    stroke(ctx, look.line, 1, [], [[x, frame.top], [x, frame.bottom]]);
    text(ctx, label, x, frame.bottom + 5, { align: "center", base: "top", colour: look.faint });
  }
}

// ---- lines ----------------------------------------------------------------------------------

const DASHES = [[], [7, 3], [8, 3, 2, 3], [2, 3]];

function extent(values, log) {
  const seen = values.filter((v) => Number.isFinite(v) && (!log || v > 0));
  const [low, high] = seen.length ? [Math.min(...seen), Math.max(...seen)] : [log ? 1 : 0, 1];
  return high > low ? [low, high] : log ? [low / 2, low * 2] : [low - 0.5, low + 0.5];
}

function axis(limits, log, from, to) {
  const f = log ? Math.log10 : (v) => v;
  const [low, high] = limits.map(f);
  return (value) => from + ((f(value) - low) / (high - low)) * (to - from);
}

function drawLines(ctx, box, panel, look) {
  const curves = Object.entries(panel.curves), xs = [...panel.x];
  const marks = Object.entries(panel.marks);
  const xLimits = panel.xlimits ?? extent([...xs, ...marks.map(([, x]) => x)], panel.xlog);
  let yLimits = panel.limits ?? extent(curves.flatMap(([, y]) => [...y]), panel.ylog);
  if (!panel.limits && !panel.ylog) {
    const margin = 0.06 * (yLimits[1] - yLimits[0]);
    yLimits = [yLimits[0] - (yLimits[0] === 0 ? 0 : margin), yLimits[1] + margin];
  }
  const ticks = (limits, log, wanted) => (log ? logTicks : niceTicks)(...limits, wanted);
  const yTicks = ticks(yLimits, panel.ylog, Math.max(3, box.h / 55)), xTicks = ticks(xLimits, panel.xlog, box.w / 62);
  const many = curves.length > 1;
  const frame = {
    top: (many ? look.step : 4) + (marks.length ? look.step : 4),
    left: (panel.ylabel ? look.step : 0) + widest(ctx, yTicks.map(compact)) + 8,
    right: box.w - Math.max(10, widest(ctx, xTicks.slice(-1).map(compact)) / 2 + 2),
    bottom: box.h - look.step - (panel.xlabel ? look.step : 0) - 2,
  };
  const X = axis(xLimits, panel.xlog, frame.left, frame.right);
  const Y = axis(yLimits, panel.ylog, frame.bottom, frame.top);
  drawGrid(ctx, frame, xTicks.map((t) => [X(t), compact(t)]), yTicks.map((t) => [Y(t), compact(t)]), look);
  drawMarks(ctx, marks, X, frame, look);
  const colour = (k) => roleColour(panel.roles[k], look.palette);
  ctx.save();
  ctx.beginPath();
  ctx.rect(frame.left - 3, frame.top - 3, frame.right - frame.left + 6, frame.bottom - frame.top + 6);
  ctx.clip();
  curves.forEach(([, y], k) => {
    const dense = xs.length > frame.right - frame.left && y.every(Number.isFinite);
    if (dense) drawBand(ctx, xs.map(X), Array.from(y, Y), colour(k));
    else stroke(ctx, colour(k), 2.2, DASHES[k % 4], xs.map((x, i) => [X(x), Y(y[i])]));
    if (panel.dots) xs.forEach((x, i) => dot(ctx, X(x), Y(y[i]), 3, colour(k)));
  });
  ctx.restore();
  drawAxisNames(ctx, frame, frame.bottom + look.step + 2, panel, look);
  const legend = curves.map(([name], k) => ({ name, swatch: dash(ctx, colour(k), DASHES[k % 4], 2.2) }));
  if (many) drawLegend(ctx, legend, frame.right, look);
  return {
    start: { x: 0 },
    most: { x: xs.length },
    find: (px, py) => {
      if (px < frame.left - 8 || px > frame.right + 8 || py < frame.top || py > frame.bottom + 20) return null;
      let best = 0;
      xs.forEach((x, i) => { if (Math.abs(X(x) - px) < Math.abs(X(xs[best]) - px)) best = i; });
      return { x: best };
    },
    outline: ({ x }) => {
      stroke(ctx, look.faint, 1, [3, 2], [[X(xs[x]), frame.top], [X(xs[x]), frame.bottom]]);
      curves.forEach(([, y], k) => dot(ctx, X(xs[x]), Y(y[x]), 4, colour(k)));
    },
    tell: ({ x }) =>
      `${panel.xlabel || "x"} ${exact(xs[x])}:  ` +
      curves.map(([name, y]) => `${name} ${Number.isFinite(y[x]) ? exact(y[x]) : "none"}`).join(" · "),
  };
}

// A curve of more points than pixels, without a gap: in each column of two pixels from the lowest
// to the highest, so that what swings to and fro is a pale band, and what is smooth a line.
function drawBand(ctx, xs, ys, colour) {
  const columns = new Map(), last = Math.floor(xs.at(-1) / 2) - 1; // takes what is left over, too
  xs.forEach((x, i) => {
    const column = Math.min(last, Math.floor(x / 2));
    const before = ys[Math.max(0, i - 1)]; // a column begins where the one before it ends
    const [low, high] = columns.get(column) ?? [before, before];
    columns.set(column, [Math.min(low, ys[i]), Math.max(high, ys[i])]);
  });
  const [lows, highs] = [0, 1].map((side) => [...columns].map(([x, ends]) => [2 * x + 1, ends[side]]));
  ctx.beginPath();
  [...highs, ...lows.reverse()].forEach(([x, y]) => ctx.lineTo(x, y));
  ctx.save();
  [ctx.globalAlpha, ctx.fillStyle] = [0.25, colour];
  ctx.fill();
  [ctx.globalAlpha, ctx.lineJoin] = [1, "round"];
  for (const edge of [lows, highs]) stroke(ctx, colour, 1.6, [], edge);
  ctx.restore();
}

function dot(ctx, x, y, radius, colour) {
  if (!Number.isFinite(x + y)) return;
  ctx.fillStyle = colour;
  ctx.beginPath();
  ctx.arc(x, y, radius, 0, 2 * Math.PI);
  ctx.fill();
}

// Vertical lines; a label turns to the left side where the right edge is near.
function drawMarks(ctx, marks, X, frame, look) {
  for (const [label, value] of marks) {
    const x = X(value), width = ctx.measureText(label).width;
    stroke(ctx, look.ink, 1.2, [2, 3], [[x, frame.top - 4], [x, frame.bottom]]);
    const centre = Math.max(frame.left + width / 2, Math.min(frame.right - width / 2, x));
    text(ctx, label, centre, frame.top - 6, { align: "center", base: "bottom", colour: look.ink });
  }
}

// ---- panels in the page ---------------------------------------------------------------------

const PLOTS = { Heat: drawHeat, Bars: drawBars, Lines: drawLines };

function make(tag, className, parent, content) {
  const node = document.createElement(tag);
  node.className = className;
  if (content) node.textContent = content;
  parent.append(node);
  return node;
}

class PlotView {
  constructor(parent, index, widget) {
    [this.index, this.widget, this.cursor] = [index, widget, null];
    this.title = make("div", "xp-title", parent);
    this.holder = make("div", "xp-plot", parent);
    this.canvas = make("canvas", "", this.holder);
    this.canvas.tabIndex = 0;
    this.canvas.setAttribute("role", "img");
    this.canvas.addEventListener("pointermove", (event) => this.point(this.under(event)));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", (event) => this.choose(this.under(event)));
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("blur", () => this.point(null));
  }

  update(panel) {
    this.panel = panel;
    this.title.textContent = panel.title;
    this.canvas.setAttribute("aria-label", `${panel.title}. ${this.widget.alt}`);
    this.canvas.style.cursor = Object.keys(panel.pick ?? {}).length ? "pointer" : "crosshair";
    this.draw();
  }

  draw() {
    const { clientWidth: w, clientHeight: h } = this.holder;
    if (!w || !h || !this.panel) return;
    const look = this.widget.look, ratio = look.ratio;
    this.canvas.width = Math.round(w * ratio);
    this.canvas.height = Math.round(h * ratio);
    Object.assign(this.canvas.style, { width: `${w}px`, height: `${h}px` }); // a whole number of pixels
    const ctx = this.canvas.getContext("2d");
    ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
    ctx.font = look.font;
    this.plot = PLOTS[this.panel.kind](ctx, { w, h }, this.panel, look);
    if (this.cursor && !this.inside(this.cursor)) this.cursor = null;
    if (this.cursor) {
      this.plot.outline(this.cursor);
      this.widget.say(this.plot.tell(this.cursor));
    }
  }

  inside(place) {
    return Object.entries(place).every(([axis, at]) => at >= 0 && at < (this.plot.most[axis] ?? 0));
  }

  under(event) {
    return this.plot?.find(event.offsetX, event.offsetY) ?? null;
  }

  point(place) {
    if (JSON.stringify(place) === JSON.stringify(this.cursor)) return;
    this.cursor = place;
    this.draw();
    if (!place) this.widget.say("");
  }

  choose(place) {
    const pick = this.panel.pick ?? {};
    if (place && Object.keys(pick).length) {
      this.widget.model.send({ event: "pick", panel: this.index, ...place });
    }
  }

  key(event) {
    const move = {
      ArrowLeft: ["x", -1], ArrowRight: ["x", 1], ArrowUp: ["y", -1], ArrowDown: ["y", 1],
      PageUp: ["tile", -1], PageDown: ["tile", 1],
    }[event.key];
    const choose = event.key === "Enter" || event.key === " ";
    if (!this.plot || (!move && !choose && event.key !== "Escape")) return;
    event.preventDefault();
    event.stopPropagation();
    if (event.key === "Escape") return this.point(null);
    if (choose) return this.choose(this.cursor);
    const [axis, step] = move, start = this.cursor ?? this.plot.start;
    if (!(axis in start)) return;
    const place = this.cursor ? { ...start, [axis]: start[axis] + step } : { ...start };
    if (!this.inside(place)) return;
    this.point(place);
    if (axis in (this.panel.pick ?? {})) this.choose(place);
  }
}

class NoteView {
  constructor(parent) {
    this.title = make("div", "xp-title", parent);
    this.text = make("pre", "xp-note", parent);
  }

  update(panel) {
    this.title.textContent = panel.title;
    this.text.textContent = panel.text;
  }

  draw() {}
}

class PictureView {
  constructor(parent) {
    this.title = make("div", "xp-title", parent);
    this.holder = make("div", "xp-picture", parent);
  }

  update(panel) {
    this.title.textContent = panel.title;
    const svg = new DOMParser().parseFromString(panel.svg, "image/svg+xml").documentElement;
    svg.querySelectorAll("script, foreignObject").forEach((node) => node.remove());
    this.holder.replaceChildren(document.importNode(svg, true));
  }

  draw() {}
}

const VIEWS = { Heat: PlotView, Bars: PlotView, Lines: PlotView, Note: NoteView, Picture: PictureView };

// ---- the widget -----------------------------------------------------------------------------

class ExplorablePicture {
  constructor(model, el) {
    [this.model, this.alt, this.structure, this.views] = [model, "", null, []];
    this.root = make("div", "xp", el);
    this.root.setAttribute("role", "group");
    const message = make("div", "xp-message", this.root);
    this.finding = make("p", "xp-finding", message);
    this.status = make("div", "xp-status", message);
    this.status.setAttribute("role", "status");
    this.rows = make("div", "xp-rows", this.root);
    this.foot = make("div", "xp-foot", this.root);
    this.readout = make("div", "xp-readout", this.foot);
    this.readout.setAttribute("aria-live", "polite");
    this.code = make("code", "", this.foot);
    this.copy = make("button", "", this.foot, "copy");
    this.copy.title = "copy this line";
    this.copy.addEventListener("click", () => this.copyCode());
  }

  start() {
    this.watch();
    this.showPicture();
    this.showStatus();
    this.model.on("change:picture", this.onPicture = () => this.showPicture());
    this.model.on("change:status", this.onStatus = () => this.showStatus());
  }

  // Draw again when the size, the theme or the sharpness of the screen changes.
  watch() {
    this.sizes = new ResizeObserver(() => this.redraw());
    this.sizes.observe(this.root);
    this.themes = new MutationObserver(() => [60, 400].forEach((ms) => setTimeout(() => this.redraw(), ms)));
    const names = ["data-jp-theme-light", "data-jp-theme-name", "class"];
    this.themes.observe(document.body, { attributes: true, attributeFilter: names });
    const sharpness = () => {
      matchMedia(`(resolution: ${window.devicePixelRatio}dppx)`).addEventListener("change", () => {
        this.redraw();
        sharpness();
      }, { once: true });
    };
    sharpness();
  }

  redraw() {
    if (!this.root.isConnected) return;
    this.look = lookOf(this.root, this.model.get("palette"));
    this.views.forEach((view) => view.draw());
  }

  showPicture() {
    const picture = this.model.get("picture");
    if (!picture || !picture.rows) return;
    const rows = unpack(picture.rows, aligned(picture.data));
    this.alt = picture.alt;
    this.root.setAttribute("aria-label", picture.alt);
    this.finding.textContent = picture.alt;
    this.code.textContent = picture.code;
    this.copy.hidden = !picture.code;
    this.look = lookOf(this.root, this.model.get("palette"));
    this.build(rows, picture.heights);
    rows.flat().forEach((panel, i) => this.views[i].update(panel));
  }

  // New nodes only where the kinds of panels changed: focus stays while a slider moves.
  build(rows, heights) {
    const structure = JSON.stringify(rows.map((row) => row.map((p) => [p.kind, p.width])).concat([heights]));
    if (structure === this.structure) return;
    this.structure = structure;
    this.views = [];
    this.rows.replaceChildren();
    rows.forEach((row, r) => {
      const line = make("div", "xp-row", this.rows);
      for (const panel of row) {
        const cell = make("div", "xp-panel", line);
        cell.style.flex = `${panel.width} 1 ${Math.min(220, 200 * panel.width)}px`;
        cell.style.height = `${heights[r]}px`;
        this.views.push(new VIEWS[panel.kind](cell, this.views.length, this));
      }
    });
  }

  showStatus() {
    const { state, text: words } = this.model.get("status");
    this.root.dataset.state = state;
    this.status.textContent = state === "ok" ? "" : words;
  }

  // One line at the foot: the value under the pointer, else the state as code.
  say(words) {
    this.readout.textContent = words;
    this.code.hidden = words !== "";
  }

  async copyCode() {
    try {
      await navigator.clipboard.writeText(this.code.textContent);
    } catch {
      getSelection().selectAllChildren(this.code);
      document.execCommand("copy");
    }
    this.copy.textContent = "copied";
    setTimeout(() => (this.copy.textContent = "copy"), 1200);
  }

  close() {
    this.sizes.disconnect();
    this.themes.disconnect();
    this.model.off("change:picture", this.onPicture);
    this.model.off("change:status", this.onStatus);
  }
}

export default {
  render({ model, el }) {
    const picture = new ExplorablePicture(model, el);
    picture.start();
    return () => picture.close();
  },
};
