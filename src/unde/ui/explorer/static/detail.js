// One training example in full: what influenced it, what it influences, and what is wrong with it.

import { get } from "./api.js";
import { $, fragment, h } from "./dom.js";
import { markOf, put } from "./marks.js";

let about;
let asking;
let failing;

/** `ask(question)` asks about the example, `reverse(at)` what it influences. */
export function prepare(session, ask, reverse, fail) {
  about = session;
  asking = { ask, reverse };
  failing = fail;
  $("detail").addEventListener("click", (event) => event.target === $("detail") && $("detail").close());
}

export async function open(at, score = null) {
  try {
    show(await get(`/api/example?at=${at}`), score);
  } catch (error) {
    failing(error);
  }
}

function show(entry, score) {
  const dialog = $("detail");
  const go = (run) => () => { dialog.close(); run(); };
  const facts = [["position", String(entry.at)], ["label", entry.label], ["score", score]];
  dialog.replaceChildren(
    h("div", { class: "detail-head" },
      h("h3", { id: "detail-title" }, h("span", { class: "faint" }, "Training example "), entry.name),
      h("button", { type: "button", class: "quiet", "aria-label": "close", onclick: () => dialog.close() }, "×")),
    h("div", { class: "whole" }, fragment(entry.whole)),
    h("dl", { class: "facts" }, facts.filter(([, value]) => value !== null).map(([term, value]) =>
      h("div", {}, h("dt", {}, term), h("dd", {}, value)))),
    h("div", { class: "line" },
      h("button", { type: "button", class: "primary", onclick: go(() => asking.ask({ kind: "train", at: entry.at })) }, "What influenced it?"),
      h("button", { type: "button", onclick: go(() => asking.reverse(entry.at)) }, "What does it influence?")),
    marking(entry.at));
  if (!dialog.open) dialog.showModal();
}

function marking(at) {
  const choices = [["", "nothing"], ...Object.entries(about.marks)].map(([kind, words]) =>
    h("label", {}, h("input", {
      type: "radio", name: "mark", value: kind, checked: (markOf(at) ?? "") === kind,
      onchange: () => put(at, kind || null).catch(failing),
    }), h("span", {}, words)));
  return h("fieldset", { class: "modes" }, h("legend", { class: "note" }, "Mark it as"), choices);
}
