// Asking: a held-out query, a training example, a text, a picture or a prompt; alone, or as part of a set.

import { get, post, send } from "./api.js";
import { $, field, fragment, h } from "./dom.js";
import { state } from "./state.js";

const PAGE = 24;
const NAMES = {
  eval: "Held-out query", learn: "Query for learning", text: "Text", picture: "Picture", prompt: "Prompt",
  train: "Training example",
};
const MODES = { one: "alone", plus: "+ add to the mean", minus: "− subtract" };
let mode = "one";
let asking; // what to do with a question
let about; // the session
let failing; // what to do with an error

/** The tabs and their panes; `chosen(question)` is called for whatever is asked. */
export function prepare(session, chosen, fail) {
  about = session;
  failing = fail;
  asking = (question) => chosen(question, mode);
  const order = about.kind === "text" ? ["text", "eval", "learn", "train"] : ["eval", "picture", "prompt", "learn", "train"];
  const ways = [...order, ...Object.keys(NAMES).filter((way) => !order.includes(way))].filter((way) => about.asks[way]);
  const panes = { eval: strip, learn: strip, train: strip, text: typed, picture: dropped, prompt: wished };
  for (const way of ways) {
    const tab = h("button", {
      type: "button", role: "tab", id: `tab-${way}`, "aria-controls": `pane-${way}`, onclick: () => open(way),
      onkeydown: (event) => arrows(event, ways, way),
    }, NAMES[way]);
    $("tabs").append(tab);
    $("panes").append(h("div", { role: "tabpanel", id: `pane-${way}`, "aria-labelledby": `tab-${way}`, hidden: true }, panes[way](way)));
  }
  $("panes").after(modes());
  open(ways[0]);
  droppable();
}

function arrows(event, ways, way) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const next = ways[(ways.indexOf(way) + step + ways.length) % ways.length];
  open(next);
  $(`tab-${next}`).focus();
}

function open(way) {
  for (const tab of $("tabs").children) {
    const chosen = tab.id === `tab-${way}`;
    tab.setAttribute("aria-selected", chosen);
    tab.tabIndex = chosen ? 0 : -1;
    const pane = $(tab.id.replace("tab", "pane"));
    pane.hidden = !chosen;
    if (chosen) pane.firstElementChild.dispatchEvent(new Event("opened"));
  }
}

function modes() {
  const choices = Object.entries(MODES).map(([name, words]) =>
    h("label", {}, h("input", {
      type: "radio", name: "mode", value: name, checked: name === mode, onchange: () => (mode = name),
    }), h("span", {}, words)));
  return h("fieldset", { class: "modes" }, h("legend", { class: "note" }, "Ask about it"), choices);
}

/** Queries or training examples in pages, each a button. */
function strip(role) {
  const all = about.asks[role];
  let start = 0;
  const list = h("ol", { class: "picks" });
  const where = h("span", { class: "note", role: "status" });
  const turn = (by) => {
    start = Math.max(0, Math.min(Math.floor((all - 1) / PAGE) * PAGE, start + by));
    show();
  };
  const back = h("button", { type: "button", class: "quiet", "aria-label": "earlier ones", onclick: () => turn(-PAGE) }, "‹");
  const on = h("button", { type: "button", class: "quiet", "aria-label": "later ones", onclick: () => turn(PAGE) }, "›");
  const any = h("button", {
    type: "button", class: "quiet", onclick: () => asking({ kind: role, at: Math.floor(Math.random() * all) }),
  }, "any");
  async function show() {
    try {
      const entries = await get(`/api/queries?role=${role}&from=${start}`);
      list.replaceChildren(...entries.map((entry) => h("li", {}, pick(entry, role))));
      where.textContent = `${start + 1}–${start + entries.length} of ${all.toLocaleString("en")}`;
      back.disabled = start === 0;
      on.disabled = start + PAGE >= all;
    } catch (error) {
      failing(error);
    }
  }
  const pane = h("div", {}, role === "train" ? finder() : null, list, h("div", { class: "pager" }, back, where, on, any));
  pane.addEventListener("opened", show, { once: true });
  return pane;
}

function pick(entry, role) {
  const shown = fragment(entry.html);
  const picture = shown.querySelector(".picture");
  const words = shown.querySelector(".passage")?.textContent ?? "";
  return h("button", {
    type: "button", class: picture ? "pick" : "pick words", data: { at: entry.at },
    "aria-label": `${NAMES[role]} ${entry.name}${entry.label === null ? "" : `, label ${entry.label}`}`,
    onclick: () => asking({ kind: role, at: entry.at }),
  }, picture, picture ? h("span", { class: "label" }, entry.label ?? entry.name)
    : [h("span", { class: "id" }, entry.name), h("span", { class: "snippet", dir: "auto" }, words.slice(0, 110))]);
}

function finder() {
  const input = h("input", { type: "text", name: "name", autocomplete: "off", spellcheck: "false", required: true });
  return h("form", {
    class: "line",
    onsubmit: async (event) => {
      event.preventDefault();
      try {
        asking({ kind: "train", at: (await post("/api/find", { name: input.value })).at });
      } catch (error) {
        failing(error);
      }
    },
  }, field(about.named ? "id or position" : "position", input), h("button", { type: "submit", class: "primary" }, "Ask"));
}

function typed() {
  const area = h("textarea", { id: "text", rows: 3, dir: "auto", placeholder: "What should the model be asked about?" });
  const form = h("form", {
    onsubmit: (event) => {
      event.preventDefault();
      if (area.value.trim()) asking({ kind: "text", text: area.value });
      else failing(new Error("nothing was asked: type a text"));
    },
  }, field("a text, whose loss is asked about", area), h("button", { type: "submit", class: "primary" }, "Ask"));
  area.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
  });
  return form;
}

/** Sends a file, and asks about the picture in it. */
async function bring(file) {
  if (!file) return;
  try {
    const { picture } = await send("/api/picture", file);
    const words = $("picture-prompt")?.value.trim();
    asking({ kind: "picture", picture, ...(words ? { text: words } : {}) });
  } catch (error) {
    failing(error);
  }
}

function dropped() {
  const file = h("input", { type: "file", accept: "image/png,image/jpeg", id: "picture", class: "sr",
    onchange: (event) => { bring(event.target.files[0]); event.target.value = ""; } });
  const size = about.asks.sides ? ` Training pictures are ${about.asks.sides.join(" × ")}; another size is resized.` : "";
  return h("div", {},
    about.asks.prompted ? field("the prompt it goes with", h("input", { type: "text", id: "picture-prompt", dir: "auto" })) : null,
    h("label", { class: "drop", for: "picture" }, file, h("strong", {}, "Choose a picture"),
      h("span", { class: "note" }, `PNG or JPEG; or drop it anywhere on this page.${size}`)));
}

function droppable() {
  if (!about.asks.picture) return;
  const held = (event) => [...(event.dataTransfer?.types ?? [])].includes("Files");
  document.addEventListener("dragover", (event) => {
    if (!held(event)) return;
    event.preventDefault();
    document.body.classList.add("dropping");
  });
  for (const end of ["dragleave", "drop"]) document.addEventListener(end, () => document.body.classList.remove("dropping"));
  document.addEventListener("drop", (event) => {
    if (!held(event)) return;
    event.preventDefault();
    open("picture");
    bring(event.dataTransfer.files[0]);
  });
}

function wished() {
  const words = h("input", { type: "text", id: "prompt", dir: "auto", autocomplete: "off" });
  const seed = h("input", { type: "number", id: "seed", min: 0, step: 1, value: 0 });
  return h("form", {
    class: "line",
    onsubmit: (event) => {
      event.preventDefault();
      asking({ kind: "prompt", text: about.asks.prompted ? words.value : "", seed: Number(seed.value) || 0 });
    },
  }, about.asks.prompted ? field("a prompt, from which an image is generated", words, "wide") : null, field("seed", seed),
    h("button", { type: "submit", class: "primary" }, "Generate and ask"));
}

const CALLED = { eval: "held-out", learn: "learning", train: "training" };
const brief = (question) =>
  question.kind in CALLED ? `${CALLED[question.kind]} #${question.at}` : question.text ? `“${question.text.slice(0, 40)}”` : NAMES[question.kind].toLowerCase();

/** The queries of a set as chips, each of which can be taken out. */
export function chips(changed) {
  const set = $("set");
  set.hidden = state.plus.length + state.minus.length < 2;
  const of = (side, mark) => state[side].map((question, i) =>
    h("li", { class: `chip ${side}` }, h("span", {}, `${mark} ${brief(question)}`), h("button", {
      type: "button", class: "quiet", "aria-label": `take ${brief(question)} out of the set`,
      onclick: () => { state[side].splice(i, 1); changed(); },
    }, "×")));
  set.replaceChildren(...of("plus", "+"), ...of("minus", "−"));
}
