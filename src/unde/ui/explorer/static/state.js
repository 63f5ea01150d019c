// What the page shows, in its address: a link brings it back.

const blank = () => ({
  plus: [], minus: [], reverse: null, method: null, damping: null, weights: null, values: null, count: 10,
  label: "", id: "", text: "", baselines: [],
});

export const state = blank();

/** Reads the address; what cannot be read is left out. */
export function restore() {
  Object.assign(state, blank());
  const said = new URLSearchParams(location.hash.slice(1));
  const parsed = (name, check) => {
    try {
      const value = JSON.parse(said.get(name));
      return check(value) ? value : null;
    } catch {
      return null;
    }
  };
  const questions = (value) => Array.isArray(value) && value.every((q) => q && typeof q === "object");
  state.plus = parsed("q", questions) ?? [];
  state.minus = parsed("less", questions) ?? [];
  state.reverse = parsed("from", Number.isInteger);
  state.damping = parsed("damping", (x) => typeof x === "number");
  const numbers = (x) => Array.isArray(x) && x.every((v) => typeof v === "number");
  state.values = parsed("values", (x) => Array.isArray(x) && x.every((v) => numbers([v]) || numbers(v)));
  const count = parsed("count", Number.isInteger);
  if (count !== null && count >= 1 && count <= 50) state.count = count;
  state.baselines = parsed("baselines", (x) => Array.isArray(x) && x.every((name) => typeof name === "string")) ?? [];
  for (const name of ["method", "weights"]) state[name] = said.get(name);
  for (const name of ["label", "id", "text"]) state[name] = said.get(name) ?? "";
}

/** The address of what is shown now. */
export function address() {
  const said = new URLSearchParams();
  if (state.plus.length) said.set("q", JSON.stringify(state.plus));
  if (state.minus.length) said.set("less", JSON.stringify(state.minus));
  if (state.reverse !== null) said.set("from", state.reverse);
  if (state.method) said.set("method", state.method);
  if (state.damping !== null) said.set("damping", state.damping);
  if (state.weights) said.set("weights", state.weights);
  if (state.values) said.set("values", JSON.stringify(state.values));
  if (state.count !== 10) said.set("count", state.count);
  if (state.baselines.length) said.set("baselines", JSON.stringify(state.baselines));
  for (const name of ["label", "id", "text"]) if (state[name]) said.set(name, state[name]);
  return `${location.pathname}${location.search}#${said}`;
}

/** Writes it down: as a new step of the browser's history, or in place of this one. */
export function note(step = false) {
  const where = address();
  if (where === location.pathname + location.search + location.hash) return;
  if (step) history.pushState(null, "", where);
  else history.replaceState(null, "", where);
}
