// How to look at an answer: method, damping, weights, how many, and filters.

import { $, field, h, later } from "./dom.js";
import { state } from "./state.js";

let about;
const inputs = {};

/** `again` asks anew (another method), `weighed` and `ranked` look again at what is held. */
export function prepare(session, again, weighed, ranked) {
  about = session;
  const choose = (name, choices, changed) => (inputs[name] = h("select", { name, onchange: changed },
    choices.map(([value, words]) => h("option", { value }, words))));
  const soon = later(ranked, 200);
  const filter = (name, placeholder) => (inputs[name] = h("input", {
    type: "search", name, placeholder, autocomplete: "off", spellcheck: "false",
    oninput: (event) => { state[name] = event.target.value; soon(); },
  }));
  const method = choose("method", about.methods.map((m) => [m.name, m.name]), (event) => {
    state.method = event.target.value === about.methods[0].name ? null : event.target.value;
    state.damping = null;
    show();
    again();
  });
  inputs.damping = h("input", {
    type: "number", name: "damping", min: 0, step: "any", inputmode: "decimal", list: "dampings",
    onchange: (event) => {
      const value = event.target.valueAsNumber;
      state.damping = Number.isNaN(value) || value === built() ? null : value;
      show();
      again();
    },
  });
  const weights = choose("weights", Object.keys(about.weights).map((name) => [name, name]), (event) => {
    state.weights = event.target.value === "unweighted" ? null : event.target.value;
    state.values = null;
    weighed();
  });
  const count = choose("count", [5, 10, 20, 50].map((n) => [n, String(n)]), (event) => {
    state.count = Number(event.target.value);
    ranked();
  });
  inputs.damped = field("damping", inputs.damping);
  const label = about.classes
    ? choose("label", [["", "any"], ...about.classes.map((name) => [name, name])], (event) => {
        state.label = event.target.value;
        ranked();
      })
    : about.kind === "text" ? null : filter("label", "");
  inputs.baselines = about.baselines.map((name) => h("input", {
    type: "checkbox", name: "baseline", value: name,
    onchange: () => {
      state.baselines = inputs.baselines.filter((box) => box.checked).map((box) => box.value);
      ranked();
    },
  }));
  $("controls").addEventListener("submit", (event) => event.preventDefault());
  $("controls").replaceChildren(
    h("div", { class: "line" }, field("method", method), inputs.damped,
      Object.keys(about.weights).length > 1 ? field("weights", weights) : null, field("on each side", count)),
    h("div", { class: "line filters" },
      label ? field("label", label) : null,
      field(about.named ? "id" : "position", filter("id", about.named ? "part of an id" : "12, 40")),
      about.kind === "image" && !about.asks.prompted ? null : field("text", filter("text", "holds …"), "wide"),
      h("output", { class: "note", id: "matched" })),
    h("div", { class: "line baselines", role: "group", "aria-label": "baselines", hidden: !inputs.baselines.length },
      inputs.baselines.map((box) => h("label", {}, box, ` show ${box.value}`))),
    h("datalist", { id: "dampings" }, [0.01, 0.03, 0.1, 0.3, 1, 3, 10].map((value) => h("option", { value }))));
  show();
}

const current = () => about.methods.find((m) => m.name === state.method) ?? about.methods[0];
const built = () => current().damping;

/** The controls as the state has them. */
export function show() {
  inputs.method.value = current().name;
  inputs.damped.hidden = built() === null;
  inputs.damping.value = state.damping ?? built() ?? "";
  inputs.weights.value = state.weights ?? "unweighted";
  if (![...inputs.count.options].some((option) => option.value === String(state.count))) {
    inputs.count.append(h("option", { value: state.count }, String(state.count)));
  }
  inputs.count.value = String(state.count);
  for (const box of inputs.baselines) box.checked = state.baselines.includes(box.value);
  for (const name of ["label", "id", "text"]) if (inputs[name]) inputs[name].value = state[name];
}

export const filters = () => Object.fromEntries(["label", "id", "text"].map((name) => [name, state[name]]));
