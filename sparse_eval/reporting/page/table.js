// Tables: sort by a click on a column's head, show one budget.

function sortable(table, key = null, direction = null) {
  const sort = (head, way) => {
    const column = [...head.parentNode.children].indexOf(head);
    const value = (row) => row.children[column].dataset.sort;
    const compare = (a, b) => {
      const [x, y] = [value(a), value(b)];
      if (x === "" || y === "") return (x === "") - (y === "");
      const order = isNaN(x) || isNaN(y) ? x.localeCompare(y) : x - y;
      return way === "ascending" ? order : -order;
    };
    for (const other of head.parentNode.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", way);
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  };
  for (const head of table.tHead.rows[0].cells) {
    head.querySelector("button").onclick = () => {
      const was = head.getAttribute("aria-sort");
      const first = head.dataset.key === "policy" || head.dataset.key === "rival" ? "ascending" : "descending";
      sort(head, was === first ? (first === "ascending" ? "descending" : "ascending") : first);
    };
    if (head.dataset.key === key) sort(head, direction);
  }
}

function showBudget() {
  document.querySelectorAll("table.headline").forEach((table) => {
    table.hidden = Number(table.dataset.setting) !== state.setting;
    for (const row of table.tBodies[0].rows) {
      const budget = row.dataset.budget;
      row.hidden = state.budget !== null && budget !== "" && Number(budget) !== state.budget;
    }
  });
  for (const button of at("budgets").children) {
    button.setAttribute("aria-pressed", String(button.value === String(state.budget)));
  }
}

function fillBudgets() {
  const choices = setting().budgets.map((b) => [b, count(b)]);
  if (choices.length > 1) choices.push([null, "All"]);
  at("budgets").replaceChildren(
    ...choices.map(([budget, text]) =>
      element("button", { type: "button", value: String(budget), onclick: () => choose({ budget }) }, text)),
  );
  at("budgets").hidden = choices.length < 2;
}

function lead() {
  const budget = chosenBudget();
  const lines = setting().headline.filter((l) => missing(l.budget_tokens) || l.budget_tokens === budget);
  const main = lines.find((l) => l.policy === state.main);
  if (!main) return at("lead").replaceChildren();
  const known = (label) => setting().policies.find((p) => p.label === label);
  const others = lines.filter((l) => l !== main && !known(l.policy).readsAll);
  const rivals = others.filter((l) => known(l.policy).realisable);
  const bounds = others.filter((l) => !known(l.policy).realisable);
  const strong = (text) => element("strong", {}, text);
  const own = missing(main.budget_tokens);
  const where = (l) => (missing(l.budget_tokens) ? ` (adaptive: reads ${percent(l.density)} of the tokens)` : own ? ` (at ${tokens(l.budget_tokens)})` : "");
  const list = (some) => some.map((l) => `${l.policy} ${fixed(l.recall)}${where(l)}`).join(", ");
  at("lead").replaceChildren(
    own ? "" : `At ${tokens(budget)} per KV head, `,
    strong(main.policy), " holds ", strong(withError(main.recall, main.recall_se)),
    ` of the attention mass and reads ${percent(main.model_read_fraction)} of the model's KV${own ? `, ${percent(main.density)} of the tokens, without a budget` : ""}`,
    rivals.length ? `; ${list(rivals)}` : "",
    bounds.length ? `; not realisable: ${list(bounds)}` : "", `. ${prompts(main.n)}.`,
  );
}
