// The viewer of a diagram: zoom at the pointer, drag, fit, full screen, a side panel for a node.
// It asks nothing of the network, and runs the same in a widget and in exported HTML.

const BUTTONS = [
  ["+", "zoom in (key +)", "+"],
  ["-", "zoom out (key -)", "\u2212"],
  ["0", "fit (key 0 or double click)", "fit"],
  ["f", "full screen (key f)", "full screen"],
];
const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };

function make(tag, className, text) {
  const element = document.createElement(tag);
  if (className) element.className = className;
  if (text !== undefined) element.textContent = text;
  return element;
}

// The part of the drawing that is seen, kept in the SVG's viewBox.
function makeCamera(svg, shown) {
  const { width, height } = svg.viewBox.baseVal;
  let view = [0, 0, width, height];
  const put = () => {
    svg.setAttribute("viewBox", view.map((value) => value.toFixed(2)).join(" "));
    shown(Math.round((100 * width) / view[2]));
  };
  const camera = {
    fit() {
      view = [0, 0, width, height];
      put();
    },
    pan(dx, dy) {
      view[0] += dx;
      view[1] += dy;
      put();
    },
    zoom(factor, centre) {
      const [cx, cy] = centre || [view[0] + view[2] / 2, view[1] + view[3] / 2];
      const seen = Math.min(2 * width, Math.max(width / 20, view[2] / factor));
      const ratio = seen / view[2];
      view = [cx - (cx - view[0]) * ratio, cy - (cy - view[1]) * ratio, seen, view[3] * ratio];
      put();
    },
    step: () => view[2] / 10,
    perPixel: () => 1 / svg.getScreenCTM().a,
    at(event) {
      const point = new DOMPoint(event.clientX, event.clientY);
      const { x, y } = point.matrixTransform(svg.getScreenCTM().inverse());
      return [x, y];
    },
  };
  put();
  return camera;
}

function fillPanel(panel, told, close) {
  panel.replaceChildren();
  const button = make("button", "diagram-close", "\u00d7");
  button.title = "close (key Escape)";
  button.setAttribute("aria-label", "close");
  button.addEventListener("click", close);
  panel.append(button, make("h4", "", told.title[0]));
  for (const line of told.title.slice(1)) panel.append(make("p", "diagram-sub", line));
  for (const [key, value] of Object.entries(told.rows)) {
    const row = make("div", "diagram-row");
    const tag = key === "code" || key === "formula" ? "code" : "span";
    row.append(make("div", "diagram-key", key), make(tag, "", value));
    panel.append(row);
  }
}

function watchPointer(view, camera, open, close) {
  let drag = null;
  view.addEventListener(
    "wheel",
    (event) => {
      if (!event.ctrlKey && !event.metaKey) return; // a plain wheel scrolls the page
      event.preventDefault();
      event.stopPropagation();
      const pixels = event.deltaMode === 1 ? event.deltaY * 16 : event.deltaY;
      camera.zoom(Math.exp(-pixels * 0.002), camera.at(event));
    },
    { passive: false },
  );
  view.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    drag = { x: event.clientX, y: event.clientY, moved: 0, node: event.target.closest("[data-node]") };
    view.setPointerCapture(event.pointerId);
  });
  view.addEventListener("pointermove", (event) => {
    if (!drag) return;
    const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
    drag.moved += Math.abs(dx) + Math.abs(dy);
    if (drag.moved > 3) camera.pan(-dx * camera.perPixel(), -dy * camera.perPixel());
    [drag.x, drag.y] = [event.clientX, event.clientY];
  });
  const end = (event) => {
    const clicked = drag && drag.moved <= 3 && event.type === "pointerup" ? drag.node : null;
    drag = null;
    if (clicked) open(clicked);
  };
  view.addEventListener("pointerup", end);
  view.addEventListener("pointercancel", end);
  view.addEventListener("dblclick", () => {
    close();
    camera.fit();
  });
}

function watchKeys(box, act, camera, open, close) {
  box.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const node = event.target.closest("[data-node]");
    if (node && (event.key === "Enter" || event.key === " ")) open(node);
    else if (event.key === "Escape") close();
    else if (ARROWS[event.key]) camera.pan(...ARROWS[event.key].map((sign) => sign * camera.step()));
    else if ("+-0f=".includes(event.key)) act(event.key === "=" ? "+" : event.key);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
}

function mountDiagram(host, svgText, told) {
  const box = make("div", "diagram");
  box.tabIndex = 0;
  box.dataset.lmSuppressShortcuts = "true"; // JupyterLab would take 0 and f for itself
  const bar = make("div", "diagram-bar");
  const view = make("div", "diagram-view");
  const panel = make("div", "diagram-panel");
  panel.hidden = true;
  panel.setAttribute("aria-live", "polite");
  view.innerHTML = svgText;
  const svg = view.querySelector("svg");
  const { width, height } = svg.viewBox.baseVal;
  svg.removeAttribute("width");
  svg.removeAttribute("height");
  svg.setAttribute("role", "group"); // a picture hides its parts from a screen reader; these act
  box.setAttribute("role", "region");
  box.setAttribute("aria-label", svg.getAttribute("aria-label"));
  box.style.setProperty("--diagram-ratio", `${width} / ${height}`);
  box.style.setProperty("--diagram-width", `${Math.round(width * 1.3)}px`);
  const percent = make("span", "diagram-percent");
  const camera = makeCamera(svg, (value) => (percent.textContent = `${value} %`));
  const nodes = [...svg.querySelectorAll("[data-node]")].filter((node) => told[node.dataset.node]);
  const stage = make("div", "diagram-stage");
  const close = () => {
    panel.hidden = true;
    nodes.forEach((node) => node.classList.remove("open"));
  };
  const open = (node) => {
    if (!told[node.dataset.node]) return;
    close();
    node.classList.add("open");
    fillPanel(panel, told[node.dataset.node], close);
    panel.hidden = false;
    // the panel lies over the drawing, which keeps its size: move what it would hide
    const hidden = node.getBoundingClientRect().right + 16 - panel.getBoundingClientRect().left;
    if (hidden > 0) camera.pan(hidden * camera.perPixel(), 0);
  };
  const act = (key) => {
    if (key === "+") camera.zoom(1.4);
    else if (key === "-") camera.zoom(1 / 1.4);
    else if (key === "0") camera.fit();
    else if (document.fullscreenElement) document.exitFullscreen();
    else box.requestFullscreen();
  };
  for (const node of nodes) {
    node.setAttribute("tabindex", "0");
    node.setAttribute("role", "button");
  }
  for (const [key, title, text] of BUTTONS) {
    const button = make("button", "", text);
    button.title = title;
    button.dataset.key = key;
    button.addEventListener("click", () => act(key));
    bar.append(button);
  }
  bar.append(percent, make("span", "diagram-hint", "Ctrl + wheel zooms, click a box for its formula"));
  watchPointer(view, camera, open, close);
  watchKeys(box, act, camera, open, close);
  stage.append(view, panel);
  box.append(bar, stage);
  host.replaceChildren(...[...host.children].filter((child) => child.tagName === "STYLE"), box);
}
