// A slider for each group of parameters, or block of groups, which opens to those of its groups; moving one ranks the
// examples anew. A value is a number, or the numbers of a block whose groups were moved one by one.

import { $, h, later } from "./dom.js";
import { note, state } from "./state.js";

let about;
let places = []; // [input, output, () => value] of each slider
const written = later(() => note(), 300); // browsers refuse many changes of the address in a second

const stands = () => about.weights[state.weights] ?? about.weights.unweighted;
export const values = () => state.values ?? stands().values;
const mean = (numbers) => numbers.reduce((a, b) => a + b, 0) / numbers.length;
const blockValue = (b) => (Array.isArray(values()[b]) ? mean(values()[b]) : values()[b]);
const scaled = (now, to) => (Array.isArray(now) && mean(now) > 0 ? now.map((w) => (w * to) / mean(now)) : to);

/** The weights of the groups of a block, which keep their proportions when the block is moved. */
function groupValues(b) {
  const value = values()[b], base = stands().groups[b], before = stands().values[b];
  if (Array.isArray(value)) return value;
  return base.map((w) => (value === before ? w : before > 0 ? (w * value) / before : value));
}

/** A dotted name that may break after its dots. */
const broken = (name) => name.split(".").flatMap((word, i) => (i ? [".", h("wbr"), word] : [word]));

/** The panel of sliders; `moved` is called at every move. */
export function prepare(session, moved) {
  about = session;
  places = [];
  const highest = Math.max(
    ...Object.values(about.weights).flatMap((w) => w.groups.flat()), ...(state.values ?? []).flat(), 1);
  const top = Math.max(3, Math.ceil(highest * 1.5));
  const set = (all) => {
    state.values = all;
    show();
    written();
    moved();
  };
  const replaced = (b, value) => values().map((v, i) => (i === b ? value : v));
  const alone = (b, value) => values().map((_, i) => (i === b ? value : 0));
  const slider = (id, name, read, move, only, ...more) => {
    const output = h("output", { for: id });
    const input = h("input", {
      type: "range", id, min: 0, max: top, step: 0.01, oninput: (event) => move(Number(event.target.value)),
    });
    places.push([input, output, read]);
    return h("li", { class: "slider" },
      h("label", { for: id, title: name }, broken(name)), output, input,
      h("button", {
        type: "button", class: "quiet only", "aria-label": `${name} alone`, title: "this one alone", onclick: only,
      }, "only"), ...more);
  };
  const members = (b, names) => {
    const list = h("ul", { class: "sliders" });
    const open = () => {
      if (list.childElementCount) return;
      const changed = (k, value) => groupValues(b).map((v, i) => (i === k ? value : v));
      list.replaceChildren(...names.map((name, k) => slider(
        `slider-${b}-${k}`, name, () => groupValues(b)[k], (value) => set(replaced(b, changed(k, value))),
        () => set(alone(b, names.map((_, i) => (i === k ? 1 : 0)))))));
      show();
    };
    return h("details", { ontoggle: open }, h("summary", {}, `${names.length} groups`), list);
  };
  const rows = about.sliders.map(({ name, groups }, b) => slider(
    `slider-${b}`, name, () => blockValue(b), (value) => set(replaced(b, scaled(values()[b], value))), () => set(alone(b, 1)),
    ...(groups.length > 1 ? [members(b, groups)] : [])));
  const blocks = about.sliders.some((s) => s.groups.length > 1);
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
  for (const [input, output, read] of places) {
    const value = read();
    input.max = Math.max(input.max, value);
    input.value = value;
    output.textContent = value.toFixed(2);
  }
  $("reset").disabled = state.values === null;
}
