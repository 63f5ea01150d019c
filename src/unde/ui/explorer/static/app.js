// The page: asks, ranks what came back, and keeps the address in step.

import { Problem, get, job, post } from "./api.js";
import * as ask from "./ask.js";
import * as controls from "./controls.js";
import * as detail from "./detail.js";
import { $, fragment, h, plural, sign } from "./dom.js";
import * as marks from "./marks.js";
import * as rows from "./rows.js";
import * as sliders from "./sliders.js";
import * as sources from "./sources.js";
import { address, note, restore, state } from "./state.js";

let about;
let answer = null; // what is shown
let running = null; // the question that is being answered
let comparing = null; // the baseline that is being computed
const computed = new Set(); // "answer baseline"

function fail(error) {
  if (error.name === "AbortError") return;
  $("error").textContent = error.message;
  $("error").hidden = false;
  $("error").scrollIntoView({ block: "nearest" });
}
const fine = () => ($("error").hidden = true);

function busy(now) {
  const cancel = h("button", { type: "button", class: "quiet", onclick: cancelled }, "cancel");
  const line = now.state === "waiting" && now.ahead ? `${plural(now.ahead, "question")} before yours` : now.doing || "asking";
  const bar = now.total ? h("progress", { max: now.total, value: now.done }) : h("progress");
  $("busy").replaceChildren(h("span", {}, `${line} …`), bar, cancel);
  $("busy").hidden = false;
  queue(now.queue);
}

/** Stops what is shown as busy: the question, or else the baseline, which is switched off. */
function cancelled() {
  if (running) running.abort();
  else if (comparing) {
    leaveOut(comparing.name);
    comparing.abort();
  }
}

function queue(length) {
  $("queue").textContent = length ? `${plural(length, "question")} in line` : "";
}

/** Asks what the state says, and shows the answer. */
async function inquire() {
  running?.abort();
  comparing?.abort();
  const mine = (running = new AbortController());
  fine();
  ask.chips(changed);
  controls.show();
  if (!state.plus.length && state.reverse === null) {
    $("result").hidden = $("busy").hidden = true;
    answer = null;
    return;
  }
  busy({ state: "asking", total: 0, queue: 0 });
  $("result").setAttribute("aria-busy", "true");
  try {
    const how = { method: state.method, damping: state.damping };
    const [path, what] = state.reverse === null
      ? ["/api/ask", { plus: state.plus, minus: state.minus }] : ["/api/influenced", { at: state.reverse }];
    const found = await job(path, { ...what, ...how }, (now) => mine === running && busy(now), mine.signal);
    if (mine !== running) return;
    answer = found;
    const hidden = $("result").hidden;
    await rank();
    header();
    $("result").hidden = false;
    if (hidden) $("answer").scrollIntoView({ block: "start" });
  } catch (error) {
    if (mine === running) fail(error);
  } finally {
    if (mine === running) {
      running = null;
      $("busy").hidden = true;
      $("result").removeAttribute("aria-busy");
      queue(0);
      compare();
    }
  }
}

const changed = () => { note(true); inquire(); };

/** A question from one of the panes, alone or into the set. */
function chosen(question, mode) {
  state.reverse = null;
  if (mode === "one" || (mode === "minus" && !state.plus.length)) [state.plus, state.minus] = [[question], []];
  else state[mode].push(question);
  changed();
}

function reverse(at) {
  [state.plus, state.minus, state.reverse] = [[], [], at];
  changed();
}

// --- ranking: one request at a time, and always a last one ------------------------------------------------

let ranking = false;
let once = false;

async function rank() {
  if (!answer) return;
  if (ranking) {
    once = true;
    return;
  }
  ranking = true;
  try {
    do {
      once = false;
      const now = answer;
      const ranked = await asked(now);
      if (now !== answer || !ranked) continue;
      await rows.show(now, ranked);
      sources.show(about.by, ranked.sources);
      $("matched").textContent = ranked.matched === now.count ? "" : `${plural(ranked.matched, "example")} of ${now.count.toLocaleString("en")} match`;
      marks.heard(ranked.marks).catch(() => {});
      fine();
    } while (once);
  } catch (error) {
    if (error instanceof Problem && error.more.gone) {
      answer = null;
      ranking = false;
      inquire(); // the server has forgotten it
      return;
    }
    fail(error);
  } finally {
    ranking = false;
  }
  compare();
}

async function asked(now) {
  const said = {
    answer: now.answer, weights: state.weights, values: state.values, count: state.count, filter: controls.filters(),
    baselines: wanted(now).filter((name) => computed.has(`${now.answer} ${name}`)),
  };
  try {
    return await post("/api/rank", said);
  } catch (error) {
    if (error instanceof Problem && error.more.baseline) {
      computed.delete(`${now.answer} ${error.more.baseline}`); // the server has forgotten it
      return await asked(now);
    }
    if (!(error instanceof Problem) || !error.more.read) throw error;
    await job("/api/read", { what: error.more.read, where: now.where, answer: now.answer }, busy);
    $("busy").hidden = true;
    return await post("/api/rank", said);
  }
}

// --- baselines: computed when they are switched on, one at a time -----------------------------------------

const wanted = (now) => (now.where === "train" ? about.baselines.filter((name) => state.baselines.includes(name)) : []);

function leaveOut(name) {
  state.baselines = state.baselines.filter((other) => other !== name);
  controls.show();
  note();
}

async function compare() {
  const now = answer;
  const name = now && wanted(now).find((one) => !computed.has(`${now.answer} ${one}`));
  if (!name || comparing || running) return;
  const mine = (comparing = Object.assign(new AbortController(), { name }));
  let problem = null;
  try {
    const tell = (state) => !running && busy(state);
    await job("/api/baseline", { answer: now.answer, baseline: name }, tell, mine.signal);
    computed.add(`${now.answer} ${name}`);
  } catch (error) {
    if (error.name !== "AbortError") {
      leaveOut(name);
      problem = error;
    }
  }
  comparing = null;
  if (!running) {
    $("busy").hidden = true;
    queue(0);
  }
  await rank();
  if (problem) fail(problem);
}

// --- what was asked ---------------------------------------------------------------------------------------

function header() {
  const reversed = answer.where !== "train";
  $("result").className = `query kind-${answer.kind}`;
  $("asked").replaceChildren(
    h("h3", {}, h("span", { class: "faint" }, reversed ? "What does it influence? " : "Query ")),
    ...answer.asked.map((one) => h("div", { class: `one ${one.minus ? "minus" : "plus"}` },
      h("p", { class: "name" }, answer.asked.length > 1 ? `${one.minus ? "− " : "+ "}${one.name}` : one.name),
      h("div", { class: "frame" }, fragment(one.html)), facts(one),
      one.notes.map((words) => h("p", { class: "note" }, words)))));
  $("notes").textContent = answer.notes.join(" ");
  $("warnings").replaceChildren(...answer.warnings.map((words) => h("li", {}, words)));
  $("warnings").hidden = !answer.warnings.length;
  $("legend").hidden = !about.shaded || reversed;
  $("subtitle").textContent = `${about.examples.toLocaleString("en")} training examples, ${answer.method} attributions`;
}

const called = (label) => about.classes?.[label] ?? String(label);

function facts(one) {
  const list = h("dl", { class: "facts" });
  const add = (term, ...value) => list.append(h("div", {}, h("dt", {}, term), h("dd", {}, ...value)));
  if (one.own !== null) add("label", called(one.own));
  if (one.predicted !== null) {
    add("predicted", called(one.predicted), one.own === null ? null : sign(one.own === one.predicted ? "right" : "wrong"));
  }
  if (one.label !== null && about.classes) {
    const single = state.plus.length === 1 && !state.minus.length;
    const choice = h("select", {
      "aria-label": "the label asked about", id: "asked-label",
      onchange: (event) => {
        const label = Number(event.target.value);
        const { label: _, ...question } = state.plus[0];
        state.plus = [label === one.own ? question : { ...question, label }];
        changed();
      },
    }, about.classes.map((name, value) => h("option", { value }, name)));
    choice.value = one.label;
    add("asked about", single ? choice : called(one.label));
  }
  return list.children.length ? list : null;
}

// --- start ------------------------------------------------------------------------------------------------

function opened(now, entry, one) {
  if (now.where === "train") detail.open(one.at, one.text);
  else if (entry.question) chosen(entry.question, "one");
}

async function start() {
  about = await get("/api/session");
  restore();
  if (state.weights && !(state.weights in about.weights)) state.weights = null;
  const fits = (v, b) => !Array.isArray(v) || v.length === about.sliders[b].groups.length;
  if (state.values && (state.values.length !== about.sliders.length || !state.values.every(fits))) state.values = null;
  rows.prepare(about, opened);
  sliders.prepare(about, rank);
  controls.prepare(about, changed, () => { sliders.show(); note(true); rank(); }, () => { note(); rank(); });
  detail.prepare(about, (question) => chosen(question, "one"), reverse, fail);
  ask.prepare(about, chosen, fail);
  await marks.prepare(about, (at) => detail.open(at), fail);
  addEventListener("popstate", () => { restore(); controls.show(); sliders.show(); inquire(); });
  $("copy").addEventListener("click", copy);
  for (const link of document.querySelectorAll("[data-jump]")) {
    link.addEventListener("click", (event) => { event.preventDefault(); $(link.dataset.jump).scrollIntoView(); });
  }
  setInterval(look, 1500);
  document.body.dataset.ready = "";
  await inquire();
}

/** How long the line is, and whether another tab has marked something. */
async function look() {
  if (document.hidden || running) return;
  const now = await get("/api/line").catch(() => null);
  if (!now) return;
  queue(now.queue);
  await marks.heard(now.marks).catch(() => {});
}

async function copy() {
  const where = location.origin + address();
  try {
    await navigator.clipboard.writeText(where);
    $("copy").textContent = "Copied";
  } catch {
    $("copy").textContent = "It is in the address bar";
  }
  setTimeout(() => ($("copy").textContent = "Copy link"), 2000);
}

start().catch(fail);
