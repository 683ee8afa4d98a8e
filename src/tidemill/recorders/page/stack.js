// Seconds by phase, stacked, over the steps. A click shows that step in the tide chart.

const PHASE_WORDS = {
  generate: "generate", train: "train", reward: "reward", evaluate: "evaluate", update_weights: "update weights",
  sleep: "sleep", wake_up: "wake up", save_stall: "save stall", train_wait: "wait for a save", save_durable: "save to disk", other: "between phases",
};

function phaseWords(name) { return PHASE_WORDS[name] || name.replaceAll("_", " "); }

function phaseColor(name) {
  if (Object.hasOwn(PHASE_WORDS, name)) return color("p-" + name);
  return color(name.startsWith("save_") ? "p-save_durable" : "p-x");
}

function quantile(values, share) {
  const sorted = [...values].sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(sorted.length * share))] || 0;
}

function showStack(data, select) {
  const stack = data.stack, box = document.getElementById("stack-chart"), caption = document.getElementById("stack-caption");
  if (!stack.steps.length) { caption.textContent = "No step has ended yet."; return; }
  const sums = stack.seconds.map((row) => row.reduce((sum, value) => sum + value, 0));
  const total = sums.reduce((sum, value) => sum + value, 0) || 1;
  stack.names.forEach((name, i) => {
    const share = (100 * sums[i]) / total;
    legendItem(document.getElementById("stack-legend"), phaseColor(name), phaseWords(name), share < 1 ? "< 1 %" : Math.round(share) + " %");
  });
  const every = stack.stride > 1 ? ` One step in ${stack.stride} is drawn.` : "";
  caption.textContent = `A phase within another is taken out of it.${every} Click a step to see it in the tide chart.`;
  onWidth(box, (width) => drawStack(box, width, stack, select));
}

function drawStack(box, width, stack, select) {
  const height = 250, left = 56, right = 12, top = 10, bottom = 24, count = stack.steps.length;
  const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", "aria-label": "seconds by phase over steps" });
  const totals = stack.steps.map((_, i) => stack.seconds.reduce((sum, row) => sum + row[i], 0));
  // A few slow steps (the first, a save) may stand out of the picture; they are cut and marked.
  const high = Math.min(Math.max(...totals), quantile(totals, 0.97) * 1.6) || 1;
  const y = scale(0, high * 1.05, height - bottom, top), slot = (width - left - right) / count;
  for (const value of ticks(0, high, 5)) {
    svg("line", { class: "gridline", x1: left, x2: width - right, y1: y(value), y2: y(value) }, root);
    svg("text", { x: left - 7, y: y(value) + 4, "text-anchor": "end" }, root, secondWords(value));
  }
  const base = new Array(count).fill(0), gap = slot > 6 ? Math.min(2, slot * 0.15) : 0;
  // Thin bars overlap a little: between two that only touch, the paper would shine through.
  const wide = (gap ? slot - gap : slot + 0.4).toFixed(2);
  stack.names.forEach((name, row) => {
    let d = "";
    for (let i = 0; i < count; i++) {
      const from = Math.min(base[i], high), to = Math.min(base[i] + stack.seconds[row][i], high);
      base[i] += stack.seconds[row][i];
      if (to - from <= 0) continue;
      d += `M${(left + i * slot).toFixed(2)} ${y(from).toFixed(2)}h${wide}V${y(to).toFixed(2)}h-${wide}z`;
    }
    svg("path", { d, style: "fill:" + phaseColor(name) }, root);
  });
  totals.forEach((total, i) => {
    if (total > high * 1.001) svg("path", { d: `M${left + (i + 0.5) * slot} ${y(high) - 9}l4 6h-8z`, style: "fill:var(--soft)" }, root);
  });
  const labels = Math.max(2, Math.floor(width / 110));
  for (let k = 0; k <= labels; k++) {
    const i = Math.min(count - 1, Math.round((k * (count - 1)) / labels));
    if (k && i === Math.round(((k - 1) * (count - 1)) / labels)) continue;
    svg("text", { x: left + (i + 0.5) * slot, y: height - 7, "text-anchor": k === 0 ? "start" : k === labels ? "end" : "middle" }, root, (k === 0 ? "step " : "") + (stack.steps[i] + 1));
  }
  svg("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }, root);
  const mark = svg("rect", { y: top, width: Math.max(1, slot), height: height - top - bottom, style: "fill:var(--ink);fill-opacity:.1", visibility: "hidden" }, root);
  const at = (event) => {
    const frame = root.getBoundingClientRect();
    const i = Math.floor(((event.clientX - frame.left) * (width / frame.width) - left) / slot);
    return i >= 0 && i < count ? i : null;
  };
  root.style.cursor = "pointer";
  root.addEventListener("pointermove", (event) => {
    const i = at(event);
    mark.setAttribute("visibility", i === null ? "hidden" : "visible");
    if (i === null) { tip.hide(); return; }
    mark.setAttribute("x", left + i * slot);
    const rows = stack.names.map((name, row) => [phaseWords(name), stack.seconds[row][i], phaseColor(name)]).filter((row) => row[1] > 0);
    tip.show(event, `step ${stack.steps[i] + 1}: ${secondWords(totals[i])}`, rows.map(([name, value, fill]) => [name, secondWords(value), fill]));
  });
  root.addEventListener("pointerleave", () => { mark.setAttribute("visibility", "hidden"); tip.hide(); });
  root.addEventListener("click", (event) => { const i = at(event); if (i !== null) select(stack.steps[i]); });
  box.replaceChildren(root);
}
