// A slider for each group of parameters, or block of groups; moving one ranks the examples anew.

import { $, h, later } from "./dom.js";
import { note, state } from "./state.js";

let about;
let outputs = [];
let inputs = [];
const written = later(() => note(), 300); // browsers refuse many changes of the address in a second

const stands = () => about.weights[state.weights ?? "unweighted"]?.values ?? about.weights.unweighted.values;
export const values = () => state.values ?? stands();

/** A dotted name that may break after its dots. */
const broken = (name) => name.split(".").flatMap((word, i) => (i ? [".", h("wbr"), word] : [word]));

/** The panel of sliders; `moved` is called at every move. */
export function prepare(session, moved) {
  about = session;
  const highest = Math.max(...Object.values(about.weights).flatMap((w) => w.values), ...(state.values ?? []), 1);
  const top = Math.max(3, Math.ceil(highest * 1.5));
  const set = (all) => {
    state.values = all;
    show();
    written();
    moved();
  };
  const rows = about.sliders.map((slider, b) => {
    const id = `slider-${b}`;
    const output = h("output", { for: id });
    const input = h("input", {
      type: "range", id, min: 0, max: top, step: 0.01,
      oninput: (event) => set(values().map((v, i) => (i === b ? Number(event.target.value) : v))),
    });
    outputs.push(output);
    inputs.push(input);
    const size = slider.groups > 1 ? ` (${slider.groups} groups)` : "";
    return h("li", { class: "slider" },
      h("label", { for: id, title: slider.name + size }, broken(slider.name)), output, input,
      h("button", {
        type: "button", class: "quiet only", "aria-label": `${slider.name} alone`, title: "this one alone",
        onclick: () => set(values().map((_, i) => (i === b ? 1 : 0))),
      }, "only"));
  });
  const blocks = about.sliders.some((s) => s.groups > 1);
  $("weighing").replaceChildren(
    h("summary", {}, h("h3", {}, "Weights"), h("button", {
      type: "button", class: "quiet", id: "reset", onclick: () => set(null),
    }, "reset")),
    h("p", { class: "note" }, blocks
      ? `${about.groups.toLocaleString("en")} groups in ${about.sliders.length} blocks; a block keeps the proportions of its weights.`
      : "How much each group of parameters counts; 1 is the unweighted method."),
    h("ul", { class: "sliders" }, rows));
  $("weighing").open = matchMedia("(min-width: 75rem)").matches;
  show();
}

/** Where the sliders stand. */
export function show() {
  values().forEach((value, b) => {
    if (!inputs[b]) return;
    inputs[b].max = Math.max(inputs[b].max, value);
    inputs[b].value = value;
    outputs[b].textContent = value.toFixed(2);
  });
  $("reset").disabled = state.values === null;
}
