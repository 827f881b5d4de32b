// Heat maps: recall by policy and layer, and the margin to the best rival by budget and layer.

const VIRIDIS = ["#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725"];

function mix(a, b, share) {
  const part = (colour, i) => parseInt(colour.slice(1 + 2 * i, 3 + 2 * i), 16);
  return `rgb(${[0, 1, 2].map((i) => Math.round(part(a, i) * (1 - share) + part(b, i) * share)).join(" ")})`;
}

function viridis(share) {
  const place = Math.min(1, Math.max(0, share)) * (VIRIDIS.length - 1);
  const i = Math.min(VIRIDIS.length - 2, Math.floor(place));
  return mix(VIRIDIS[i], VIRIDIS[i + 1], place - i);
}

function diverging(share) {
  const end = share < 0 ? (isDark() ? "#ff8a4c" : "#c85200") : isDark() ? "#5ab0f0" : "#0b66a8";
  return mix(css("--neutral"), end, Math.min(1, Math.abs(share)));
}

// rows, columns: [{name, ...}]; cellOf(row, column) -> {colour, tip, kind?, click?}
function heat(holder, rows, columns, cellOf, scale) {
  const grid = element("div", { className: "grid" });
  const widths = columns.map((column) => (column.always ? "minmax(34px, 1fr)" : "minmax(6px, 1fr)"));
  grid.style.gridTemplateColumns = `max-content ${widths.join(" ")}`;
  const every = Math.ceil(columns.length / Math.max(4, Math.floor((holder.clientWidth - 90) / 26)));
  for (const row of rows) {
    grid.append(element("div", { className: "row-name", title: row.name }, row.name));
    for (const column of columns) {
      const { colour, tip, kind = "", click = null } = cellOf(row, column);
      const cell = element(click ? "button" : "div", { className: `cell ${kind}`, "aria-label": tip.replaceAll("\n", ", ") });
      if (colour) cell.style.background = colour;
      cell.onpointerenter = () => showTip(cell.getBoundingClientRect(), tip);
      cell.onpointerleave = hideTip;
      if (click) cell.onclick = click;
      grid.append(cell);
    }
  }
  grid.append(element("div", { className: "row-name" }));
  columns.forEach((column, i) =>
    grid.append(element("div", { className: `column-name${column.chosen ? " chosen" : ""}` }, column.chosen || column.always || (column.layer % every === 0) ? column.name : "")));
  holder.replaceChildren(grid, scale);
}

function showTip(box, text) {
  const tip = at("tip");
  tip.textContent = text;
  tip.hidden = false;
  const left = Math.min(box.left, innerWidth - tip.offsetWidth - 8);
  const above = box.top - tip.offsetHeight - 6;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${above > 4 ? above : box.bottom + 6}px`;
}

const hideTip = () => { at("tip").hidden = true; };

function scaleBar(low, high, gradient, ...keys) {
  const bar = element("i", { style: `background:linear-gradient(90deg, ${gradient.join(", ")})` });
  const key = ([kind, text]) => element("span", {}, element("i", { className: `key ${kind}` }), text);
  return element("div", { className: "scale" }, element("span", {}, low, bar, high), ...keys.map(key));
}

// What an adaptive policy reads, for its label; nothing where it has a budget.
function readBy(label) {
  const line = setting().headline.find((l) => l.policy === label);
  return line && missing(line.budget_tokens) && line.density < 1 ? ` (adaptive: ${percent(line.density)})` : "";
}

function layerHeat() {
  const budget = chosenBudget(), metric = METRICS[state.metric];
  const rows = setting().policies.filter((p) => !p.readsAll && !state.hidden.has(p.label)).map((p) => ({ ...p, name: p.label + readBy(p.label) }));
  const columns = setting().layers.map((l) => ({ ...l, name: String(l.layer), chosen: l.layer === state.layer }));
  const lines = setting().byLayer.filter((l) => missing(l.budget_tokens) || l.budget_tokens === budget);
  const find = (p, c) => lines.find((l) => l.policy === p.label && l.layer === c.layer);
  const values = rows.flatMap((r) => columns.filter((c) => !c.dense).map((c) => find(r, c)?.[state.metric])).filter((x) => !missing(x));
  const low = metric.best === 1 ? Math.min(0.9, Math.floor(10 * Math.min(...values)) / 10) : 0;
  const high = metric.best === 1 ? 1 : Math.max(0.05, Math.ceil(10 * Math.max(...values)) / 10);
  const share = (x) => (metric.best === 1 ? (x - low) / (high - low) : 1 - x / high);
  const cellOf = (policy, column) => {
    const line = find(policy, column);
    if (column.dense) return { kind: "dense", tip: `layer ${column.layer}: kept dense` };
    if (!line || missing(line[state.metric])) return { kind: "empty", tip: `layer ${column.layer}, ${policy.label}: not measured` };
    const tip = `${policy.label}, layer ${column.layer}\n${metric.label} ${withError(line[state.metric], line[`${state.metric}_se`])}\n${tokens(line.budget_tokens)}, ${prompts(line.n)}`;
    return { colour: viridis(share(line[state.metric])), tip, click: () => choose({ layer: state.layer === column.layer ? null : column.layer }) };
  };
  const ends = metric.best === 1 ? VIRIDIS : [...VIRIDIS].reverse();
  const scale = scaleBar(fixed(low, 1), fixed(high, 1), ends, ["hatched", "kept dense, or not measured"]);
  at("layers-hint").textContent = `${metric.label}${missing(budget) ? "" : ` at ${tokens(budget)}`} by layer; choose a layer to see its curves above`;
  heat(at("layer-heat"), rows, columns, cellOf, scale);
}

function marginSection() {
  const cells = setting().margins[state.main] ?? [];
  const lost = cells.filter((c) => c.margin < 0), layered = cells.filter((c) => c.layer !== null);
  const lostLayers = layered.filter((c) => c.margin < 0), overall = lost.filter((c) => c.layer === null);
  const budgets = cells.filter((c) => c.layer === null).length, worst = overall.sort((a, b) => a.margin - b.margin)[0];
  at("losses-sum").textContent = !cells.length
    ? `No realisable policy in these rows reads as little as ${state.main}.`
    : `${state.main} has the lower recall in ${lostLayers.length} of ${layered.length} cells of budget × layer` +
      (worst
        ? `. In the mean of the layers it trails at ${overall.length} of ${budgets} budgets, most at ${tokens(worst.budget_tokens)}: by ${fixed(-worst.margin)} to ${worst.rival} (${tokens(worst.rival_budget)}).`
        : "; in the mean of the layers it is ahead at every budget.");
  at("margin-heat").hidden = !cells.length;
  if (cells.length) marginHeat(cells);
  losingTable(lost, `Show all ${lostLayers.length} losing cells` + (overall.length ? ` and ${overall.length} mean${overall.length > 1 ? "s" : ""} of the layers` : ""));
}

function marginHeat(cells) {
  const most = Math.max(0.01, ...cells.map((c) => Math.abs(c.margin)));
  const limit = Math.ceil(most * 20) / 20;
  const budgets = [...new Set(cells.map((c) => c.budget_tokens))];
  const rows = budgets.map((b) => ({ budget: b, name: tokens(b) }));
  const columns = [{ layer: null, name: "mean", always: true }, ...setting().layers.map((l) => ({ ...l, name: String(l.layer) }))];
  const cellOf = (row, column) => {
    const cell = cells.find((c) => c.budget_tokens === row.budget && c.layer === column.layer);
    const where = column.layer === null ? "mean of the layers" : `layer ${column.layer}`;
    if (!cell) return { kind: "empty", tip: `${where}: ${column.dense ? "kept dense" : "no rival reads as little"}` };
    const tip = `${where}, ${row.name}\n${state.main} ${fixed(cell.recall)}, ${cell.rival} ${fixed(cell.rival_recall)} (${tokens(cell.rival_budget)})\nmargin ${withError(cell.margin, cell.margin_se)}, ${prompts(cell.n)}`;
    return { colour: diverging(cell.margin / limit), tip, kind: cell.margin < 0 ? "loss" : "" };
  };
  const ends = [-1, -0.5, 0, 0.5, 1].map(diverging);
  const scale = scaleBar(`loses ${fixed(-limit, 2)}`, `wins ${fixed(limit, 2)}`, ends, ["loss", "lower recall than a rival"], ["hatched", "dense, or no rival"]);
  heat(at("margin-heat"), rows, columns, cellOf, scale);
}

function losingTable(lost, all) {
  const shown = 8;
  const heads = [
    ["budget_tokens", "Budget", "tokens"], ["layer", "Layer", ""], ["recall", "Recall", state.main], ["rival_recall", "Recall", "rival"],
    ["margin", "Margin", "± standard error"], ["rival", "Rival", ""], ["rival_budget", "Its budget", "tokens"],
    ["read", "Read", `${state.main}, KiB`], ["rival_read", "Read", "rival, KiB"], ["n", "n", "prompts"],
  ];
  const text = {
    budget_tokens: (c) => tokens(c.budget_tokens).replace(" tokens", ""), layer: (c) => (c.layer === null ? "mean" : String(c.layer)), recall: (c) => fixed(c.recall),
    rival_recall: (c) => fixed(c.rival_recall), margin: (c) => withError(c.margin, c.margin_se), rival: (c) => c.rival,
    rival_budget: (c) => tokens(c.rival_budget).replace(" tokens", ""), read: (c) => fixed(c.read / 1024, 1), rival_read: (c) => fixed(c.rival_read / 1024, 1), n: (c) => String(c.n),
  };
  const order = [...lost].sort((a, b) => (a.layer !== null) - (b.layer !== null) || a.margin - b.margin);
  const rows = order.map((cell, i) => element("tr", { hidden: !state.all && i >= shown },
    ...heads.map(([key]) => element("td", { "data-key": key, "data-sort": missing(cell[key]) ? (key === "layer" ? "-1" : "") : String(cell[key]) }, text[key](cell)))));
  const head = element("tr", {}, ...heads.map(([key, label, unit]) =>
    element("th", { "data-key": key, scope: "col" }, element("button", { type: "button" }, label, element("small", {}, unit || "\u00a0")))));
  const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
  at("losing").replaceChildren(...(lost.length ? [table] : []));
  if (lost.length) sortable(table);
  at("more").hidden = lost.length <= shown || state.all;
  at("more").textContent = all;
}
