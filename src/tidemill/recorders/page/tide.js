// The tide chart: bytes on the device above the water line, their copies in host memory below, phases underneath.

const LANES = [
  ["engine", ["generate", "evaluate", "reward"]],
  ["trainer", ["train", "train_wait"]],
  ["moves", ["sleep", "wake_up", "update_weights"]],
  ["saving", ["save_stall", "save_durable"]],
];
const OWNER_COLORS = { trainer: "c-trainer", engine: "c-engine" };
const TIDE = { left: 74, right: 14, top: 24, lane: 19, gap: 34, sea: 330 };

function ownerColor(owners, i) {
  return color(OWNER_COLORS[owners[i]] || "c-" + (2 + (Math.max(0, i - 2) % 4)));
}

function laneOf(name) {
  const known = LANES.findIndex(([, names]) => names.includes(name));
  return known >= 0 ? known : name.startsWith("save") ? 3 : 4;
}

function showTide(data) {
  const detail = data.detail, caption = document.getElementById("tide-caption");
  if (!detail.steps.length) { caption.textContent = "Nothing has been recorded yet."; return () => {}; }
  const state = { width: Math.min(3, detail.steps.length) };
  state.first = Math.max(0, Math.min(detail.steps.length - state.width, interesting(detail) - 1));
  const box = document.getElementById("tide-chart"), controls = document.getElementById("tide-controls");
  let redraw = () => {};
  const slider = tag("input", { type: "range", min: 0, max: detail.steps.length - 1, "aria-label": "first step shown" });
  const move = (first) => {
    state.first = Math.max(0, Math.min(detail.steps.length - state.width, first));
    slider.value = state.first;
    redraw();
  };
  const button = (text, label, by) => {
    const made = tag("button", { type: "button", "aria-label": label }, controls, text);
    made.addEventListener("click", () => move(state.first + by()));
  };
  button("◀", "earlier", () => -state.width);
  controls.append(slider);
  button("▶", "later", () => state.width);
  const width = tag("select", { "aria-label": "steps shown" }, controls);
  for (const count of [1, 2, 3, 5, 10, 25]) if (count <= detail.steps.length) option(width, count, count === 1 ? "1 step" : count + " steps");
  width.value = String(state.width);
  width.addEventListener("change", () => { state.width = Number(width.value); move(state.first); });
  slider.addEventListener("input", () => move(Number(slider.value)));
  slider.value = state.first;
  tideLegend(detail);
  redraw = onWidth(box, (pixels) => drawTide(box, pixels, data, state, caption));
  return (step) => {
    let best = 0;
    detail.steps.forEach((one, i) => { if (Math.abs(one[0] - step) < Math.abs(detail.steps[best][0] - step)) best = i; });
    move(best);
  };
}

// The last step that saved and has a step after it, else the last but one: the last may have been cut short.
function interesting(detail) {
  const last = detail.steps.length - 2;
  const saves = detail.spans.filter((span) => detail.words[span[0]].startsWith("save_") && last >= 0 && span[2] <= detail.steps[last][2]);
  if (!saves.length) return last;
  return detail.steps.findLastIndex((step) => step[1] <= saves.at(-1)[2]);
}

function tideLegend(detail) {
  const legend = document.getElementById("tide-legend");
  detail.owners.forEach((owner, i) => legendItem(legend, ownerColor(detail.owners, i), owner, ""));
  const names = new Set(detail.spans.map((span) => detail.words[span[0]]));
  for (const name of [...LANES.flatMap(([, all]) => all), ...names]) {
    if (names.delete(name) && !(name === "train" || name === "generate")) legendItem(legend, phaseColor(name), phaseWords(name), "");
  }
}

// The part of `detail` between two moments: levels with the one in force at the start, spans that touch it.
function tideWindow(detail, state) {
  const shown = detail.steps.slice(state.first, state.first + state.width);
  const next = detail.steps[state.first + state.width];
  const begin = shown[0][1], end = Math.max(shown.at(-1)[2], next ? Math.min(next[1], shown.at(-1)[2] * 1.001) : shown.at(-1)[2]);
  let from = 0;
  for (let i = 0; i < detail.levels.length && detail.levels[i][0] <= begin; i++) from = i;
  const levels = detail.levels.slice(from).filter((level) => level[0] <= end);
  const spans = detail.spans.filter((span) => span[2] < end && span[2] + span[3] > begin);
  return { shown, begin, end, levels: levels.map((level) => [Math.max(begin, level[0]), ...level.slice(1)]), spans };
}

function drawTide(box, width, data, state, caption) {
  const detail = data.detail;
  const view = tideWindow(detail, state);
  const sum = (values) => values.reduce((total, value) => total + value, 0);
  const device = Math.max(1, ...view.levels.map((level) => sum(level[2])));
  const host = Math.max(0, ...view.levels.map((level) => sum(level[3])));
  const budget = view.levels.length ? view.levels.at(-1)[4] : 0;
  const drawn = budget > 0 && budget < device * 2.5;
  const above = Math.max(device, drawn ? budget : 0) * 1.06, below = host * 1.08;
  const sea = TIDE.sea, line = TIDE.top + (sea * above) / (above + below || 1);
  const lanes = [...new Set(view.spans.map((span) => laneOf(detail.words[span[0]])))].sort();
  const height = TIDE.top + sea + TIDE.gap + lanes.length * (TIDE.lane + 5) + 6;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "bytes by owner over time" });
  const chart = {
    root, detail, view, width, height, line, lanes, steps: data.steps,
    x: scale(view.begin, view.end, TIDE.left, width - TIDE.right),
    y: scale(-below, above, TIDE.top + sea, TIDE.top),
    below, above,
  };
  tidePatterns(chart);
  tideFrame(chart);
  tideAreas(chart, 2, 1);
  tideAreas(chart, 3, -1);
  svg("line", { class: "water", x1: TIDE.left, x2: width - TIDE.right, y1: line, y2: line }, root);
  if (drawn) {
    svg("line", { class: "budget", x1: TIDE.left, x2: width - TIDE.right, y1: chart.y(budget), y2: chart.y(budget) }, root);
    const word = svg("text", { class: "budget-word", x: width - TIDE.right - 4, y: chart.y(budget) - 5, "text-anchor": "end" }, root, "budget " + byteWords(budget));
    halo(word);
  }
  tideLanes(chart);
  tideMoves(chart);
  tideHover(chart);
  box.replaceChildren(root);
  const first = view.shown[0], last = view.shown.at(-1);
  const date = new Date(first[3] * 1000).toISOString().replace("T", " ").slice(0, 19);
  const end = Math.min(last[0] + 1, data.steps) + (last[0] >= data.steps ? " and what follows it" : "");
  caption.textContent = `${first === last ? "Step" : `Steps ${first[0] + 1} to`} ${end}, from ${date} UTC. ` +
    (drawn || !budget ? "" : `The budget, ${byteWords(budget)}, lies beyond this picture. `) +
    `Peak ${byteWords(device)} on the device, ${byteWords(host)} of copies in host memory.`;
}

function tidePatterns(chart) {
  const defs = svg("defs", {}, chart.root);
  chart.detail.owners.forEach((_, i) => {
    const pattern = svg("pattern", { id: "host" + i, width: 7, height: 7, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" }, defs);
    svg("rect", { width: 7, height: 7, style: `fill:${ownerColor(chart.detail.owners, i)};fill-opacity:.22` }, pattern);
    svg("rect", { width: 2.4, height: 7, style: `fill:${ownerColor(chart.detail.owners, i)};fill-opacity:.55` }, pattern);
  });
}

// What follows the last step that is done (a final evaluation, or a step under way) bears the name of that step.
function stepName(step, steps, long) {
  if (step[0] >= steps) return long ? "after step " + steps : "";
  return (long ? "step " : "") + (step[0] + 1);
}

function tideFrame(chart) {
  const { root, view, width, x, y } = chart, bottom = TIDE.top + TIDE.sea;
  view.shown.forEach((step, i) => {
    const left = Math.max(TIDE.left, x(step[1])), right = Math.min(width - TIDE.right, x(step[2]));
    if (i % 2 === 0) svg("rect", { class: "shade", x: left, y: TIDE.top, width: Math.max(0, right - left), height: chart.height - TIDE.top }, root);
    if (right - left > 30) svg("text", { class: "strong", x: (left + right) / 2, y: 15, "text-anchor": "middle" }, root, stepName(step, chart.steps, right - left > 64));
  });
  const size = niceStep(chart.above + chart.below, 7, 1024);
  for (let value = -Math.floor(chart.below / size) * size; value <= chart.above; value += size) {
    svg("line", { class: "gridline", x1: TIDE.left, x2: width - TIDE.right, y1: y(value), y2: y(value) }, root);
    svg("text", { x: TIDE.left - 8, y: y(value) + 4, "text-anchor": "end" }, root, byteWords(Math.abs(value)));
  }
  const side = (text, at) => svg("text", { class: "strong", transform: `translate(11 ${at}) rotate(-90)`, "text-anchor": "middle" }, root, text);
  side("device", (TIDE.top + chart.line) / 2);
  if (bottom - chart.line > 44) side("host", (bottom + chart.line) / 2);
  for (const value of ticks(0, view.end - view.begin, Math.max(2, width / 120))) {
    const at = x(view.begin + value);
    svg("line", { class: "gridline", x1: at, x2: at, y1: bottom, y2: chart.height }, root);
    svg("text", { x: at, y: bottom + 16, "text-anchor": value === 0 ? "start" : "middle" }, root, secondWords(value));
  }
}

function tideAreas(chart, side, sign) {
  const { root, view, detail, x, y } = chart;
  const base = view.levels.map(() => 0);
  detail.owners.forEach((owner, i) => {
    const ends = view.levels.map((_, k) => (k + 1 < view.levels.length ? view.levels[k + 1][0] : view.end));
    let d = "", widest = { width: 0 };
    view.levels.forEach((level, k) => {
      const bytes = level[side][i], from = y(sign * base[k]), to = y(sign * (base[k] + bytes));
      base[k] += bytes;
      const left = x(level[0]), right = x(ends[k]);
      if (bytes <= 0 || right <= left) return;
      d += `M${left.toFixed(2)} ${from.toFixed(2)}H${right.toFixed(2)}V${to.toFixed(2)}H${left.toFixed(2)}z`;
      if (Math.abs(to - from) > 15 && right - left > widest.width) widest = { width: right - left, x: (left + right) / 2, y: (from + to) / 2 };
    });
    if (!d) return;
    const fill = sign > 0 ? ownerColor(detail.owners, i) : `url(#host${i})`;
    svg("path", { d, "shape-rendering": "crispEdges", style: `fill:${fill};fill-opacity:${sign > 0 ? 0.88 : 1}` }, root);
    const text = sign > 0 ? owner : owner + ", host copy";
    if (widest.width > text.length * 7 + 8) {
      const word = svg("text", { class: sign > 0 ? "ondark" : "strong", x: widest.x, y: widest.y + 4, "text-anchor": "middle" }, root, text);
      if (sign < 0) halo(word);
      else if (owner === "trainer") word.setAttribute("class", "onfill");
    }
  });
}

function tideLanes(chart) {
  const { root, view, detail, x, width } = chart, top = TIDE.top + TIDE.sea + TIDE.gap;
  const order = (span) => laneOf(detail.words[span[0]]);
  chart.lanes.forEach((lane, row) => {
    const y = top + row * (TIDE.lane + 5);
    svg("text", { x: TIDE.left - 8, y: y + 13, "text-anchor": "end" }, root, lane < LANES.length ? LANES[lane][0] : "other");
    // Long ones first: what lies within another is drawn over it.
    for (const span of view.spans.filter((one) => order(one) === lane).sort((a, b) => b[3] - a[3])) {
      const left = Math.max(TIDE.left, x(span[2])), right = Math.min(width - TIDE.right, x(span[2] + span[3]));
      const name = detail.words[span[0]], long = Math.max(1.5, right - left), words = phaseWords(name);
      svg("rect", { x: left, y, width: long, height: TIDE.lane, rx: Math.min(3, long / 2), style: `fill:${phaseColor(name)};stroke:var(--card);stroke-width:.6` }, root);
      const white = name === "train" || name === "wake_up" || name === "save_durable";
      if (long > words.length * 6.6 + 6) svg("text", { class: white ? "onfill" : "ondark", x: (left + right) / 2, y: y + 13, "text-anchor": "middle" }, root, words);
    }
  });
}

// Triangles on the water line: pointing down where an owner went to sleep, up where it woke.
function tideMoves(chart) {
  const { root, view, detail, x, line } = chart;
  if (view.shown.length > 12) return;
  for (const span of view.spans) {
    const name = detail.words[span[0]], owner = detail.words[span[1]], i = detail.owners.indexOf(owner);
    if ((name !== "sleep" && name !== "wake_up") || i < 0) continue;
    const at = x(span[2] + span[3]);
    if (at < TIDE.left || at > chart.width - TIDE.right) continue;
    const d = name === "sleep" ? `M${at} ${line + 8}l-5.5 -9h11z` : `M${at} ${line - 8}l-5.5 9h11z`;
    svg("path", { d, style: `fill:${ownerColor(detail.owners, i)};stroke:var(--card);stroke-width:1.6;paint-order:stroke` }, root);
  }
}

function tideHover(chart) {
  const { root, view, detail, x, width } = chart;
  const cross = svg("line", { class: "cross", y1: TIDE.top, y2: chart.height, visibility: "hidden" }, root);
  const hide = () => { cross.setAttribute("visibility", "hidden"); tip.hide(); };
  root.addEventListener("pointermove", (event) => {
    const frame = root.getBoundingClientRect(), pixel = (event.clientX - frame.left) * (width / frame.width);
    if (pixel < TIDE.left || pixel > width - TIDE.right) { hide(); return; }
    const time = x.invert(pixel), level = view.levels.filter((one) => one[0] <= time).at(-1);
    const step = view.shown.find((one) => one[1] <= time && time <= one[2]);
    const rows = [];
    detail.owners.forEach((owner, i) => {
      if (level && level[2][i]) rows.push([owner + " on the device", byteWords(level[2][i]), ownerColor(detail.owners, i)]);
      if (level && level[3][i]) rows.push([owner + " in host memory", byteWords(level[3][i]), ownerColor(detail.owners, i)]);
    });
    for (const span of view.spans) {
      if (span[2] > time || span[2] + span[3] < time) continue;
      const name = detail.words[span[0]], owner = detail.words[span[1]];
      rows.push([phaseWords(name) + (owner ? ` (${owner})` : ""), secondWords(span[3]), phaseColor(name)]);
    }
    cross.setAttribute("x1", pixel); cross.setAttribute("x2", pixel); cross.setAttribute("visibility", "visible");
    tip.show(event, (step ? `step ${step[0] + 1}, ` : "") + secondWords(time - view.begin), rows);
  });
  root.addEventListener("pointerleave", hide);
}
