// Curves: a faint line of the numbers as they are, a strong one of their running mean, dots where there are few.

const CURVE_COLORS = ["c-trainer", "c-engine", "c-2", "c-3", "c-4"].map(color);

// Within each phase by itself: a mean over the border would show a slope where there was a step.
function smoothed(one, border) {
  const cut = one.x.filter((step) => step <= border).length;
  return [...runningMean(one.y.slice(0, cut)), ...runningMean(one.y.slice(cut))];
}

function runningMean(values) {
  const reach = Math.floor(values.length / 40);
  if (values.length < 30) return values;
  const sums = [0];
  for (const value of values) sums.push(sums[sums.length - 1] + value);
  return values.map((_, i) => {
    const from = Math.max(0, i - reach), to = Math.min(values.length, i + reach + 1);
    return (sums[to] - sums[from]) / (to - from);
  });
}

function path(series, x, y, values) {
  return series.x.map((step, i) => (i ? "L" : "M") + x(step).toFixed(1) + " " + y(values[i]).toFixed(1)).join("");
}

function nearest(sorted, value) {
  let low = 0, high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] < value) low = middle; else high = middle;
  }
  return Math.abs(sorted[high] - value) < Math.abs(sorted[low] - value) ? high : low;
}

function extent(series) {
  let low = Infinity, high = -Infinity;
  for (const one of series) for (const value of one.y) { low = Math.min(low, value); high = Math.max(high, value); }
  if (low === 0 && high === 0) return [0, 1];
  if (low === high) { const pad = Math.abs(low) * 0.1 || 0.5; return [low - pad, high + pad]; }
  const pad = (high - low) * 0.06;
  return [low >= 0 && low < (high - low) * 0.5 ? 0 : low - pad, high + pad];
}

// A logarithmic scale where the numbers are positive and far apart, as a learning rate over two phases is.
function vertical(spec, from, to) {
  const values = spec.series.flatMap((one) => one.y), least = Math.min(...values), most = Math.max(...values);
  if (spec.log && least > 0 && most / least > 20) {
    const map = scale(Math.log10(least) - 0.1, Math.log10(most) + 0.1, from, to), marks = [];
    for (let power = Math.ceil(Math.log10(least) - 0.1); power <= Math.log10(most) + 0.1; power++) marks.push(10 ** power);
    return { y: (value) => map(Math.log10(value)), marks };
  }
  const [low, high] = extent(spec.series);
  return { y: scale(low, high, from, to), marks: ticks(low, high, spec.wide ? 5 : 4) };
}

function curveCard(parent, spec, data) {
  const card = tag("div", { class: "card" + (spec.wide ? " wide" : "") }, parent);
  const head = tag("div", { class: "head" }, card);
  tag("h3", {}, head, spec.title + (spec.unit ? ", " + spec.unit : ""));
  const smooth = spec.series.map((one) => (one.points || !spec.smooth || one.y.length < 30 ? one.y : smoothed(one, data.warmUp)));
  tag("span", { class: "now" }, head, "last " + spec.series.map((one, i) => numberWords(smooth[i].at(-1))).join(" · "));
  if (spec.series.length > 1) {
    const legend = tag("div", { class: "legend" }, card);
    spec.series.forEach((one, i) => legendItem(legend, CURVE_COLORS[i], one.name, "", one.points ? "dot" : "line"));
  }
  const box = tag("div", { class: "chart" }, card);
  onWidth(box, (width) => drawCurve(box, width, spec, smooth, data));
}

function drawCurve(box, width, spec, smooth, data) {
  const height = spec.wide ? 250 : 170, left = 46, right = 12, top = 8, bottom = 24;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": spec.title });
  const end = Math.max(1, ...spec.series.map((one) => one.x.at(-1) || 0), data.warmUp && !spec.more ? data.warmUp : 0);
  const begin = Math.min(...spec.series.map((one) => (one.x.length ? one.x[0] : end)));
  const from = begin > end / 2 ? begin : 0;
  const x = scale(from, Math.max(end, from + 1), left, width - right);
  const { y, marks } = vertical(spec, height - bottom, top);
  if (data.warmUp > from) {
    const edge = x(Math.min(end, data.warmUp));
    svg("rect", { class: "shade", x: left, y: top, width: Math.max(0, edge - left), height: height - top - bottom }, root);
  }
  for (const value of marks) {
    svg("line", { class: "gridline", x1: left, x2: width - right, y1: y(value), y2: y(value) }, root);
    svg("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, root, numberWords(value));
  }
  for (const value of ticks(from, end, Math.max(2, width / 110), { whole: true })) {
    svg("text", { x: Math.min(x(value), width - right), y: height - 7, "text-anchor": value === from ? "start" : "middle" }, root, value === from ? "step " + value : numberWords(value));
  }
  svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }, root);
  spec.series.forEach((one, i) => drawSeries(root, one, smooth[i], x, y, CURVE_COLORS[i]));
  if (data.warmUp > from && x(Math.min(end, data.warmUp)) - left > 60) halo(svg("text", { x: left + 6, y: height - bottom - 6 }, root, "warm-up"));
  hoverCurve(root, { spec, smooth, x, left, right, top, bottom, width, height });
  box.replaceChildren(root);
}

function drawSeries(root, one, smooth, x, y, stroke) {
  const line = { fill: "none", "stroke-linejoin": "round", "stroke-linecap": "round" };
  if (!one.points && smooth !== one.y) svg("path", { ...line, d: path(one, x, y, one.y), "stroke-opacity": 0.3, "stroke-width": 1, style: "stroke:" + stroke }, root);
  svg("path", { ...line, d: path(one, x, y, smooth), "stroke-width": 2, style: "stroke:" + stroke }, root);
  if (!one.points && one.x.length > 1) return;
  if (one.x.length > 80) return;
  one.x.forEach((step, i) => svg("circle", { cx: x(step), cy: y(one.y[i]), r: 3.5, style: `fill:${stroke};stroke:var(--card);stroke-width:1.5` }, root));
}

function hoverCurve(root, chart) {
  const cross = svg("line", { class: "cross", y1: chart.top, y2: chart.height - chart.bottom, visibility: "hidden" }, root);
  root.addEventListener("pointermove", (event) => {
    const frame = root.getBoundingClientRect();
    const pixel = (event.clientX - frame.left) * (chart.width / frame.width);
    if (pixel < chart.left - 8 || pixel > chart.width - chart.right + 8) { cross.setAttribute("visibility", "hidden"); tip.hide(); return; }
    const wanted = chart.x.invert(pixel);
    const rows = [];
    let step = null;
    chart.spec.series.forEach((one, i) => {
      if (!one.x.length) return;
      const at = nearest(one.x, wanted);
      if (step === null) step = one.x[at];
      const where = one.points ? ` (step ${one.x[at]})` : "";
      rows.push([one.name + where, numberWords(one.y[at]), CURVE_COLORS[i]]);
      if (chart.smooth[i] !== one.y) rows.push(["running mean", numberWords(chart.smooth[i][at]), ""]);
    });
    if (step === null) return;
    cross.setAttribute("x1", chart.x(step)); cross.setAttribute("x2", chart.x(step)); cross.setAttribute("visibility", "visible");
    tip.show(event, "step " + step, rows);
  });
  root.addEventListener("pointerleave", () => { cross.setAttribute("visibility", "hidden"); tip.hide(); });
}

function showCurves(data) {
  const main = data.curves.filter((spec) => !spec.more), more = data.curves.filter((spec) => spec.more);
  for (const spec of main) curveCard(document.getElementById("curves"), spec, data);
  document.getElementById("no-curves").hidden = data.curves.length > 0;
  if (!more.length) return;
  const details = document.getElementById("more-curves");
  details.hidden = false;
  details.querySelector("summary").textContent = `${more.length} more numbers`;
  details.addEventListener("toggle", () => {
    const parent = document.getElementById("more");
    if (details.open && !parent.childElementCount) for (const spec of more) curveCard(parent, spec, data);
  });
}
