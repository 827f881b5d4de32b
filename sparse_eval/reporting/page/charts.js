// The two curves: a metric against the share of KV read, and against bytes.

function pointsOf(policy) {
  const source = state.layer === null ? setting().headline : setting().byLayer.filter((l) => l.layer === state.layer);
  const points = source
    .filter((l) => l.policy === policy.label && !missing(l[state.metric]))
    .map((l) => {
      const metadata = missing(l.bytes_metadata) ? 0 : l.bytes_metadata;
      const whole = missing(l.model_read_fraction) ? l.model_kv_fraction : l.model_read_fraction;
      return {
        ...l,
        y: l[state.metric],
        error: l[`${state.metric}_se`],
        share: state.layer === null ? whole : (l.bytes_kv + metadata) / l.bytes_dense,
        bytes: policy.realisable ? l.bytes_kv + metadata : null,
      };
    });
  return policy.readsAll ? points.slice(0, 1) : points;
}

function hoverText(policy, p) {
  const cost = policy.realisable ? `KV ${kib(p.bytes_kv)} + metadata ${kib(p.bytes_metadata)}` : `KV ${kib(p.bytes_kv)}, not realisable`;
  return [
    `${policy.label} ${policy.readsAll ? "(reads everything)" : missing(p.budget_tokens) ? `adaptive: reads ${percent(p.density)} of the tokens` : `at ${tokens(p.budget_tokens)}`}`,
    `${METRICS[state.metric].label} ${withError(p.y, p.error)}, n = ${p.n}`,
    `${count(p.tokens_read)} tokens read per KV head and step`,
    `${cost} per KV head`,
    `${percent(p.share)} of ${state.layer === null ? "the model's" : "this layer's"} KV`,
  ].join("\n");
}

function tracesOf(x) {
  return setting().policies.filter((p) => !state.hidden.has(p.label)).map((policy) => {
    const points = pointsOf(policy).filter((p) => !missing(p[x])).sort((a, b) => a[x] - b[x]);
    const colour = colourOf(policy);
    return {
      name: policy.label, mode: "lines+markers", x: points.map((p) => p[x]), y: points.map((p) => p.y),
      text: points.map((p) => hoverText(policy, p)), hoverinfo: "none",
      line: { color: colour, width: policy.realisable ? 2.2 : 1.5, dash: policy.realisable ? policy.dash : "dash" },
      marker: {
        symbol: policy.marker, size: policy.marker === "star" ? 13 : 9, color: policy.realisable ? colour : css("--panel"),
        line: { width: policy.realisable ? 1 : 1.6, color: policy.realisable ? css("--panel") : colour },
      },
      error_y: {
        type: "data", array: points.map((p) => p.error || 0), visible: points.some((p) => p.error > 0),
        color: colour, thickness: 1.3, width: 3,
      },
      cliponaxis: false,
    };
  });
}

function yRange() {
  const shown = setting().policies.filter((p) => !state.hidden.has(p.label)).flatMap(pointsOf);
  if (!shown.length) return [0, 1];
  const low = Math.min(...shown.map((p) => p.y - (p.error || 0)));
  const high = Math.max(...shown.map((p) => p.y + (p.error || 0)));
  if (METRICS[state.metric].best === 0) return [0, Math.max(0.05, high * 1.08)];
  const floor = Math.min(0.9, Math.floor(low * 10 - 0.2) / 10);
  return [floor, 1 + 0.03 * (1 - floor)];
}

function bytesAxis() {
  const values = setting().policies.flatMap(pointsOf).map((p) => p.bytes).filter((b) => b > 0);
  if (!values.length) return {};
  const [low, high] = [Math.min(...values) / 1.25, Math.max(...values) * 1.25];
  const first = Math.ceil(Math.log2(low)), last = Math.floor(Math.log2(high));
  const step = Math.max(1, Math.ceil((last - first + 1) / (at("bytes").clientWidth < 480 ? 5 : 7)));
  const ticks = [];
  for (let power = first; power <= last; power += step) ticks.push(2 ** power);
  const name = (b) => (b >= 2 ** 20 ? `${b / 2 ** 20} MiB` : b >= 1024 ? `${b / 1024} KiB` : `${b} B`);
  return { type: "log", range: [Math.log10(low), Math.log10(high)], tickvals: ticks, ticktext: ticks.map(name) };
}

function layoutOf(xaxis, title) {
  const axis = {
    gridcolor: css("--grid"), linecolor: css("--line"), zeroline: false, automargin: true,
    tickfont: { size: 12 }, ticks: "outside", ticklen: 4, tickcolor: css("--line"),
  };
  const font = { family: getComputedStyle(document.body).fontFamily, size: 12.5, color: css("--muted") };
  return {
    font, showlegend: false, hovermode: "closest", paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
    margin: { l: 52, r: 14, t: 10, b: 48 }, dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom",
    xaxis: { ...axis, ...xaxis, title: { text: title, font: { size: 12.5 }, standoff: 8 } },
    yaxis: { ...axis, range: yRange(), tickformat: ".2f", nticks: 8, title: { text: METRICS[state.metric].axis, font: { size: 12.5 }, standoff: 6 } },
  };
}

function charts() {
  const name = METRICS[state.metric].label;
  const where = state.layer === null ? "mean of the non-dense layers" : `layer ${state.layer}`;
  const narrow = at("share").clientWidth < 480;
  const what = state.layer !== null ? "this layer's KV read per step" : `the model's KV read per step${narrow ? "" : ", dense layers included"}`;
  const cost = narrow ? "bytes per step, layer and KV head (log)" : "KV + metadata read per step, layer and KV head (log scale)";
  at("share-title").textContent = `${name[0].toUpperCase()}${name.slice(1)} against the share of KV read, ${where}`;
  at("bytes-title").textContent = `… against bytes read, realisable policies only`;
  const config = { responsive: true, displayModeBar: false };
  Plotly.react("share", tracesOf("share"), layoutOf({ range: [0, 1.03], tickformat: ".0%" }, `share of ${what}`), config);
  Plotly.react("bytes", tracesOf("bytes"), layoutOf(bytesAxis(), cost), config);
}

function chartTips() {
  for (const chart of [at("share"), at("bytes")]) {
    chart.on("plotly_hover", ({ points, event }) => {
      const here = { left: event.clientX + 12, top: event.clientY - 8, bottom: event.clientY + 8 };
      showTip(here, points[0].text);
    });
    chart.on("plotly_unhover", hideTip);
  }
}

function legend() {
  at("legend").replaceChildren(...setting().policies.map((policy) => {
    const toggle = () => {
      if (!state.hidden.delete(policy.label)) state.hidden.add(policy.label);
      choose({});
    };
    const text = policy.realisable ? policy.label : `${policy.label} (not realisable)`;
    return element("button", { type: "button", onclick: toggle, "aria-pressed": String(!state.hidden.has(policy.label)) }, badge(policy), text);
  }));
}
