// Choices in, page out: every control changes `state` and draws again.

function chosenBudget() {
  const budgets = setting().budgets;
  return state.budget ?? budgets[Math.floor((budgets.length - 1) / 2)] ?? null;
}

function draw() {
  showBudget();
  lead();
  legend();
  charts();
  layerHeat();
  marginSection();
}

function choose(change) {
  Object.assign(state, change);
  hideTip();
  at("layer").value = String(state.layer);
  draw();
}

function options(select, pairs, value) {
  select.replaceChildren(...pairs.map(([v, text]) => element("option", { value: String(v) }, text)));
  select.value = String(value);
}

function chooseSetting(index) {
  Object.assign(state, { setting: index, layer: null, all: false, hidden: new Set() });
  const budgets = setting().budgets, mains = Object.keys(setting().margins);
  state.budget = budgets[Math.floor((budgets.length - 1) / 2)] ?? null;
  state.main = mains[0] ?? null;
  at("title").textContent = setting().model || "Recall report";
  at("facts").replaceChildren(...setting().facts.map((fact) => element("span", {}, fact)));
  const sparse = setting().layers.filter((l) => !l.dense);
  options(at("layer"), [[null, `mean of ${sparse.length} non-dense`], ...sparse.map((l) => [l.layer, `layer ${l.layer}`])], null);
  options(at("main"), mains.map((m) => [m, m]), state.main);
  at("losses").hidden = !mains.length;
  fillBudgets();
  draw();
}

options(at("metric"), Object.entries(METRICS).map(([key, m]) => [key, m.label]), state.metric);
options(at("setting"), DATA.settings.map((s, i) => [i, s.name || s.model]), 0);
at("setting-choice").hidden = DATA.settings.length < 2;
at("setting").onchange = (e) => chooseSetting(Number(e.target.value));
at("metric").onchange = (e) => choose({ metric: e.target.value });
at("layer").onchange = (e) => choose({ layer: e.target.value === "null" ? null : Number(e.target.value) });
at("main").onchange = (e) => choose({ main: e.target.value, all: false });
at("more").onclick = () => choose({ all: true });
document.querySelectorAll("table.headline").forEach((table) => sortable(table, "recall", "descending"));
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
addEventListener("resize", () => { layerHeat(); marginSection(); });
addEventListener("scroll", hideTip, { passive: true });
chooseSetting(0);
chartTips();
