"use strict"; // What a figure answers: values under the pointer, an enlarged part, modes hidden.
// The page says everything without it. `data-live` of a figure is what `live_values` told.

const SCALES = { linear: [(v) => v, (v) => v], log: [Math.log, Math.exp] }; // forth, back

function add(parent, name, text = "", attributes = {}) {
  const made = parent instanceof SVGElement
    ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  made.textContent = text;
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return parent.appendChild(made);
}

function swatch(parent, mode) {
  add(parent, "span", "", { class: "swatch" }).style.background = mode.colour;
  add(parent, "span", mode.label);
}

function numberText(value) {
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  return size >= 1e6 || size < 1e-4 ? value.toExponential(2) : String(+value.toPrecision(4));
}

// Round numbers between low and high: equal steps, on a long logarithmic axis 1, 2, 5.
function roundNumbers(low, high, scale) {
  const found = [];
  if (scale === "log" && high / low > 5) {
    for (let power = Math.floor(Math.log10(low)); 10 ** power <= high; power++) {
      for (const first of high / low > 100 ? [1] : [1, 2, 5]) found.push(first * 10 ** power);
    }
  } else {
    const power = 10 ** Math.floor(Math.log10((high - low) / 5));
    const step = power * [1, 2, 5, 10].find((first) => first * power >= (high - low) / 5);
    for (let i = Math.ceil(low / step); i * step <= high; i++) found.push(i * step);
  }
  return found.filter((v) => v >= low && v <= high).map((v) => Number(v.toPrecision(8)));
}

// Places are in the units of the drawing; a part of it is [left, top, right, bottom].
class LiveFigure {
  constructor(figure, modes) {
    this.modes = modes;
    this.live = JSON.parse(figure.dataset.live);
    this.svg = figure.querySelector("svg");
    const { width, height } = this.svg.viewBox.baseVal;
    this.frame = this.live.frame.map((share, i) => share * (i % 2 ? height : width));
    this.view = this.frame; // the part of it that is shown
    this.parts = [...this.svg.querySelectorAll("[data-series] :is(path, use):not(defs *)")];
    this.before = this.parts.map((part) => part.getAttribute("d")
      ?? ["x", "y"].map((key) => Number(part.getAttribute(key))));
    this.ticks = add(this.svg, "g", "", { class: "own-ticks" });
    this.line = add(this.svg, "path", "", { class: "pointer" });
    this.box = add(this.svg, "path", "", { class: "box" });
    this.tip = add(figure, "div", "", { class: "tip" });
    this.leave();
    const on = (name, answer) => this.svg.addEventListener(name, answer.bind(this));
    on("pointerdown", this.press);
    on("pointermove", this.move);
    on("pointerup", this.release);
    for (const name of ["pointerleave", "pointercancel"]) on(name, this.leave);
    on("dblclick", () => this.show(this.frame));
  }

  place(event) { // of the pointer: [x, y] kept inside the frame, and whether it is inside
    const at = new DOMPoint(event.clientX, event.clientY)
      .matrixTransform(this.svg.getScreenCTM().inverse());
    const [left, top, right, bottom] = this.frame;
    const kept = [Math.min(Math.max(at.x, left), right), Math.min(Math.max(at.y, top), bottom)];
    return [kept, kept[0] === at.x && kept[1] === at.y];
  }

  press(event) {
    const [place, inside] = this.place(event);
    if (!inside || event.button !== 0) return;
    this.start = place;
    this.svg.setPointerCapture(event.pointerId);
  }

  move(event) {
    const [place, inside] = this.place(event);
    if (!inside && !this.start) return this.leave();
    const [left, top, right, bottom] = this.start ? this.chosen(place) : [0, 0, 0, 0];
    this.box.setAttribute("d", `M${left} ${top}H${right}V${bottom}H${left}z`);
    this.tell(place[0], event);
  }

  release(event) {
    if (!this.start) return;
    const part = this.chosen(this.place(event)[0]);
    this.leave();
    const isClick = part[2] - part[0] < 4 || part[3] - part[1] < 4;
    if (!isClick) this.show(part.map((at, i) => this.moved(at, i, this.frame, this.view)));
  }

  leave() {
    this.start = null;
    this.tip.hidden = true;
    for (const part of [this.line, this.box]) part.removeAttribute("d");
  }

  chosen([x, y]) { // the part between press and pointer; all of an axis it hardly moved along
    const [left, top, right, bottom] = this.frame;
    const tall = this.live.y && Math.abs(y - this.start[1]) > 12;
    const wide = !tall || Math.abs(x - this.start[0]) > 12;
    const [x0, x1] = wide ? [this.start[0], x].sort((a, b) => a - b) : [left, right];
    const [y0, y1] = tall ? [this.start[1], y].sort((a, b) => a - b) : [top, bottom];
    return [x0, y0, x1, y1];
  }

  moved(at, i, from, to) { // the place in `to` of a place in `from`; i even: across
    return to[i % 2] + (at - from[i % 2]) * (to[i % 2 + 2] - to[i % 2])
      / (from[i % 2 + 2] - from[i % 2]);
  }

  tell(x, event) {
    const { at, values, difference, name, x: [low, high] } = this.live;
    const [left, top, right, bottom] = this.frame;
    const places = at.map((value) => this.moved(
      left + (value - low) / (high - low) * (right - left), 0, this.view, this.frame));
    const nearest = places.reduce((best, place, i) =>
      Math.abs(place - x) < Math.abs(places[best] - x) ? i : best, 0);
    this.line.setAttribute("d", `M${places[nearest]} ${top}V${bottom}`);
    this.tip.replaceChildren();
    add(this.tip, "b", `${name} ${Math.round(at[nearest]).toLocaleString("en")}`);
    for (const [number, own] of Object.entries(values)) {
      if (this.modes[number].hidden) continue;
      const row = add(this.tip, "div"), value = own[nearest];
      swatch(row, this.modes[number]);
      const sign = difference !== null && value > 0 ? "+" : "";
      add(row, "span", value === null ? "–" : `${sign}${numberText(value)} ${difference ?? ""}`);
    }
    this.tip.hidden = false;
    const around = this.tip.parentElement.getBoundingClientRect();
    const beside = event.clientX - around.left + 14, room = around.width - this.tip.offsetWidth;
    const across = beside > room ? beside - 28 - this.tip.offsetWidth : beside;
    this.tip.style.left = `${Math.max(0, across)}px`;
    this.tip.style.top = `${event.clientY - around.top + 14}px`;
  }

  show(view) {
    this.view = view;
    const to = (at, i) => this.moved(Number(at), i, view, this.frame);
    const [left, top, right, bottom] = this.frame;
    this.parts.forEach((part, n) => {
      const before = this.before[n];
      if (typeof before === "string") {
        part.setAttribute("d", before.replace(/(-?[\d.]+) (-?[\d.]+)/g,
          (_, x, y) => `${to(x, 0).toFixed(2)} ${to(y, 1).toFixed(2)}`));
      } else {
        const [x, y] = before.map(to);
        ["x", "y"].forEach((key, i) => part.setAttribute(key, [x, y][i]));
        const inside = x > left - 1 && x < right + 1 && y > top - 1 && y < bottom + 1;
        part.classList.toggle("outside", !inside);
      }
    });
    const zoomed = view !== this.frame;
    this.svg.classList.toggle("zoomed-x", zoomed);
    this.svg.classList.toggle("zoomed-y", zoomed && Boolean(this.live.y));
    this.ticks.replaceChildren();
    if (zoomed) this.axis(0, this.live.x, "linear", left, right);
    if (zoomed && this.live.y) this.axis(1, this.live.y, this.live.scale, bottom, top);
  }

  axis(i, limits, scale, start, end) { // new ticks; i: 0 along x, 1 along y
    const [forth, back] = SCALES[scale], [low, high] = limits.map(forth);
    const ends = [start, end].map((at) => back(
      low + (high - low) * (this.moved(at, i, this.frame, this.view) - start) / (end - start)));
    const [left, top, right, bottom] = this.frame;
    for (const value of roundNumbers(...ends, scale)) {
      const was = start + (end - start) * (forth(value) - low) / (high - low);
      const at = this.moved(was, i, this.view, this.frame);
      add(this.ticks, "path", "", { d: i ? `M${left} ${at}H${right}` : `M${at} ${top}V${bottom}` });
      add(this.ticks, "text", numberText(value), i ? { x: left - 5, y: at + 3, class: "y" }
        : { x: at, y: bottom + 13 });
    }
  }
}

for (const figures of document.querySelectorAll("[data-modes]")) {
  const modes = JSON.parse(figures.dataset.modes);
  const bar = add(document.createElement("div"), "div", "", { class: "modes" });
  figures.before(bar);
  const toggle = (number) => {
    const hidden = modes[number].hidden = !modes[number].hidden;
    modes[number].button.setAttribute("aria-pressed", String(!hidden));
    const ofMode = ["series", "legend"].map((part) => `[data-${part}="${number}"]`).join();
    for (const part of figures.querySelectorAll(ofMode)) part.classList.toggle("off", hidden);
  };
  modes.forEach((mode, number) => {
    mode.button = add(bar, "button", "", { type: "button", "aria-pressed": "true" });
    swatch(mode.button, mode);
    mode.button.addEventListener("click", () => toggle(number));
  });
  add(bar, "span", "Drag in a figure to enlarge, double-click to go back.", { class: "faint" });
  for (const entry of figures.querySelectorAll("[data-legend]")) {
    entry.addEventListener("click", () => toggle(Number(entry.dataset.legend)));
  }
  for (const figure of figures.querySelectorAll("[data-live]")) new LiveFigure(figure, modes);
}
