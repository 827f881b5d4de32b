"use strict";
// What is chosen on the page, and how numbers and colours are written.

const DATA = JSON.parse(document.getElementById("data").textContent);
const state = { setting: 0, budget: null, metric: "recall", layer: null, hidden: new Set(), main: null, all: false };
const at = (id) => document.getElementById(id);
const setting = () => DATA.settings[state.setting];
const isDark = () => matchMedia("(prefers-color-scheme: dark)").matches;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colourOf = (policy) => (isDark() ? policy.dark : policy.light);
const missing = (x) => x === null || x === undefined;

const fixed = (x, digits = 3) => (missing(x) ? "n/a" : x.toFixed(digits).replace("-", "−"));
const withError = (x, error) => fixed(x) + (missing(error) ? "" : `\u00a0±\u00a0${fixed(error)}`);
const percent = (x) => (missing(x) ? "n/a" : `${(100 * x).toFixed(1)}\u00a0%`);
const count = (x) => (missing(x) ? "n/a" : Math.round(x).toLocaleString("en-US"));
const kib = (x) => (missing(x) ? "n/a" : `${(x / 1024).toLocaleString("en-US", { maximumFractionDigits: 1 })} KiB`);
const tokens = (x) => (missing(x) ? "adaptive" : `${count(x)} tokens`);
const prompts = (n) => `n\u00a0=\u00a0${n}\u00a0prompt${n === 1 ? "" : "s"}`;

const METRICS = {
  recall: { label: "recall", axis: "recall (share of mass)", best: 1 },
  contested: { label: "contested recall", axis: "contested recall (share of the rest)", best: 1 },
  output_error: { label: "output error", axis: "output error (relative L2)", best: 0 },
  lse_error: { label: "LSE error", axis: "error of the log-sum-exp (nats)", best: 0 },
};

const MARKERS = {
  circle: "M6 2a4 4 0 1 0 .01 0z", square: "M2.5 2.5h7v7h-7z", diamond: "M6 1l5 5-5 5-5-5z",
  x: "M3.6 2L6 4.4 8.4 2 10 3.6 7.6 6 10 8.4 8.4 10 6 7.6 3.6 10 2 8.4 4.4 6 2 3.6z",
  cross: "M4.6 1.5h2.8v3.1h3.1v2.8H7.4v3.1H4.6V7.4H1.5V4.6h3.1z",
  "triangle-up": "M6 1.5l4.8 8.5H1.2z", "triangle-down": "M6 10.5L1.2 2h9.6z",
  "triangle-left": "M1.5 6L10 1.2v9.6z", "triangle-right": "M10.5 6L2 1.2v9.6z",
  star: "M6 .8l1.5 3.5 3.8.3-2.9 2.5.9 3.7L6 8.8l-3.3 2 .9-3.7L.7 4.6l3.8-.3z",
  pentagon: "M6 1l5 3.7-1.9 5.9H2.9L1 4.7z", hexagon: "M6 1l4.5 2.5v5L6 11 1.5 8.5v-5z",
};
const SVG_DASH = { solid: "none", dash: "5 3", dashdot: "6 2 1.5 2", dot: "1.5 2.5" };

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "style") made[key] = value;
    else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function badge(policy) {
  const colour = colourOf(policy);
  const fill = policy.realisable ? colour : css("--panel");
  const dash = policy.realisable ? SVG_DASH[policy.dash] : "4 2.5";
  const holder = element("span", { style: "display:inline-flex" });
  holder.innerHTML =
    `<svg width="26" height="12" viewBox="-7 0 26 12" aria-hidden="true">` +
    `<path d="M-7 6h26" stroke="${colour}" stroke-width="1.8" stroke-dasharray="${dash}"/>` +
    `<path d="${MARKERS[policy.marker]}" fill="${fill}" stroke="${policy.realisable ? css("--panel") : colour}"/></svg>`;
  return holder;
}
