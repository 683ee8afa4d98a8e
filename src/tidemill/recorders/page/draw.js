"use strict";
// Drawing: elements, scales, ticks, numbers as words, the floating read-out. Text is only ever set as text.

const SVG = "http://www.w3.org/2000/svg";

function svg(name, attributes, parent, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes || {})) {
    // The page's content policy forbids style attributes in text; setting them as properties is allowed.
    if (key === "style") element.style.cssText = value; else element.setAttribute(key, value);
  }
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function tag(name, attributes, parent, text) {
  const element = document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  if (parent) parent.append(element);
  return element;
}

function paint(element, color) { element.style.background = color; return element; }

function scale(from, to, low, high) {
  const slope = (high - low) / (to - from || 1);
  const map = (value) => low + (value - from) * slope;
  map.invert = (pixel) => from + (pixel - low) / (slope || 1);
  return map;
}

function niceStep(span, count, base) {
  const raw = span / Math.max(1, count);
  if (base === 1024) return Math.pow(2, Math.ceil(Math.log2(Math.max(1, raw))));
  const power = Math.pow(10, Math.floor(Math.log10(raw || 1)));
  return [1, 2, 5, 10].map((digit) => digit * power).find((step) => step >= raw * 0.999) || 10 * power;
}

function ticks(low, high, count, options) {
  let step = niceStep(high - low, count, options && options.base);
  if (options && options.whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-6; i++) found.push(i * step);
  return found.map((value) => (Math.abs(value) < step * 1e-6 ? 0 : value));
}

function digits(value, count) { return String(Number(value.toPrecision(count))); }

function numberWords(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size >= 1e9) return digits(value / 1e9, 3) + " G";
  if (size >= 1e6) return digits(value / 1e6, 3) + " M";
  if (size >= 1e4) return digits(value / 1e3, 3) + " k";
  if (size && size < 1e-3) return value.toExponential(size < 1e-99 ? 0 : 1).replace("e-", "e−");
  return digits(value, 3);
}

function byteWords(value) {
  for (const [name, factor] of [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]]) {
    if (Math.abs(value) >= factor) return digits(value / factor, 3) + " " + name;
  }
  return Math.round(value) + " B";
}

function secondWords(value) {
  if (value === 0) return "0 s";
  if (value < 1) return digits(value * 1e3, 3) + " ms";
  if (value < 120) return digits(value, 3) + " s";
  return Math.floor(value / 60) + " min " + Math.round(value % 60) + " s";
}

function color(name) { return "var(--" + name + ")"; }

const tip = {
  show(event, title, rows) {
    const box = document.getElementById("tip");
    box.replaceChildren();
    tag("div", { class: "title" }, box, title);
    for (const [name, value, fill] of rows) {
      const row = tag("div", { class: "row" }, box);
      if (fill) paint(tag("i", {}, row), fill);
      tag("span", {}, row, name);
      tag("b", {}, row, value);
    }
    box.hidden = false;
    const left = event.clientX + 16 + box.offsetWidth > innerWidth ? event.clientX - box.offsetWidth - 12 : event.clientX + 16;
    box.style.left = Math.max(4, left) + "px";
    box.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.offsetHeight - 6)) + "px";
  },
  hide() { document.getElementById("tip").hidden = true; },
};

// Calls draw(width) now and whenever the width of the element changes.
function onWidth(element, draw) {
  let width = 0;
  const run = () => {
    const now = Math.floor(element.clientWidth);
    if (now && now !== width) { width = now; draw(now); }
  };
  new ResizeObserver(run).observe(element);
  run();
  return () => { width = 0; run(); };
}

function legendItem(parent, fill, name, value, shape) {
  const item = tag("span", {}, parent);
  paint(tag("i", shape ? { class: shape } : {}, item), fill);
  tag("span", {}, item, name);
  if (value) tag("b", {}, item, value);
  return item;
}

// An edge in the colour of the card, so that a word can be read over lines.
function halo(word) {
  Object.assign(word.style, { paintOrder: "stroke", stroke: "var(--card)", strokeWidth: "4px", strokeLinejoin: "round" });
}
