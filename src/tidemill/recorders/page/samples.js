// Samples to read: by step, best or worst first, with a search.

const SAMPLES_AT_ONCE = 12;

// Step n is the one that makes the n-th update; an evaluation at step n looks at the weights after it.
function stepWords(sample) { return sample.kind === "eval" ? "evaluation at step " + sample.step : "step " + (sample.step + 1); }

function option(select, value, text) { tag("option", { value }, select, text); }

function showSamples(data) {
  const controls = document.getElementById("sample-controls"), list = document.getElementById("sample-list");
  const samples = data.samples;
  if (!samples.length) { tag("p", { class: "empty" }, list, "No sample has been kept yet."); return; }
  const order = tag("select", { "aria-label": "order" }, controls);
  for (const [value, text] of [["new", "newest first"], ["old", "oldest first"], ["best", "best first"], ["worst", "worst first"]]) option(order, value, text);
  const step = tag("select", { "aria-label": "step" }, controls);
  option(step, "", "all steps");
  for (const words of new Set([...samples].sort((a, b) => a.step - b.step).map(stepWords))) option(step, words, words);
  const kind = tag("select", { "aria-label": "kind" }, controls);
  option(kind, "", "training and evaluation"); option(kind, "train", "training"); option(kind, "eval", "evaluation");
  const search = tag("input", { type: "search", placeholder: "search", "aria-label": "search" }, controls);
  const count = tag("span", {}, controls);
  const rewards = samples.map((one) => one.reward).filter((value) => value !== null);
  const range = [Math.min(...rewards), Math.max(...rewards)];
  let shown = SAMPLES_AT_ONCE;
  const refresh = () => {
    const found = chosen(samples, order.value, step.value, kind.value, search.value.toLowerCase());
    count.textContent = `${found.length} of ${samples.length}`;
    list.replaceChildren();
    for (const sample of found.slice(0, shown)) sampleCard(list, sample, range);
    if (found.length > shown) {
      const more = tag("button", { type: "button" }, list, "show more");
      more.addEventListener("click", () => { shown += 4 * SAMPLES_AT_ONCE; refresh(); });
    }
  };
  const restart = () => { shown = SAMPLES_AT_ONCE; refresh(); };
  for (const control of [order, step, kind]) control.addEventListener("change", restart);
  search.addEventListener("input", restart);
  refresh();
}

function chosen(samples, order, step, kind, words) {
  const found = samples.filter((one) =>
    (step === "" || stepWords(one) === step) && (kind === "" || one.kind === kind) &&
    (words === "" || (one.prompt + "\n" + one.answer + "\n" + one.label).toLowerCase().includes(words)));
  const worth = (one) => (one.reward === null ? -Infinity : one.reward);
  const rules = {
    new: (a, b) => b.step - a.step, old: (a, b) => a.step - b.step,
    best: (a, b) => (worth(b) > worth(a)) - (worth(b) < worth(a)) || b.step - a.step,
    worst: (a, b) => (worth(a) > worth(b)) - (worth(a) < worth(b)) || b.step - a.step,
  };
  return found.sort(rules[order]);
}

function sampleCard(parent, sample, [low, high]) {
  const card = tag("article", { class: "card sample" }, parent);
  const head = tag("div", { class: "head" }, card);
  let rank = "";
  if (sample.reward !== null && high > low) rank = sample.reward >= low + (high - low) * 0.66 ? " high" : sample.reward <= low + (high - low) * 0.33 ? " low" : "";
  tag("span", { class: "reward" + rank }, head, sample.reward === null ? sample.status : "reward " + numberWords(sample.reward));
  tag("span", {}, head, stepWords(sample));
  if (sample.tokens !== null) tag("span", {}, head, sample.tokens + " tokens");
  if (sample.stop) tag("span", {}, head, "ended by " + sample.stop);
  if (sample.reason) tag("span", {}, head, sample.reason);
  for (const [name, text] of [["prompt", sample.prompt], ["answer", sample.answer], ["label", sample.label]]) {
    if (name === "label" && (text === "null" || text === "")) continue;
    const turn = tag("div", { class: "turn " + name }, card);
    tag("span", {}, turn, name);
    tag("pre", { dir: "auto" }, turn, text === "" ? "(empty)" : text);
  }
}
