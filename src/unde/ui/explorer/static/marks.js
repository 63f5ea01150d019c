// Marked examples: the same in all tabs, kept by the server and, for its next run, by this browser.

import { get, post, text } from "./api.js";
import { $, h, plural } from "./dom.js";

const SIGNS = { label: "!", duplicate: "⧉", remove: "✕" };
let about;
let opening;
let failing;
let known = {};
let version = -1;
const kept = () => `unde-marks-${about.index}`;

export async function prepare(session, open, fail) {
  about = session;
  opening = open;
  failing = fail;
  await refresh();
  if (!Object.keys(known).length) await bringBack();
}

/** Marks of an earlier run of the server, if this browser remembers some. */
async function bringBack() {
  let old = {};
  try {
    old = JSON.parse(localStorage.getItem(kept())) ?? {};
  } catch {
    return; // nothing that could be read
  }
  for (const [at, mark] of Object.entries(old)) {
    await post("/api/mark", { at: Number(at), mark }).catch(() => {});
  }
  if (Object.keys(old).length) await refresh();
}

export const markOf = (at) => known[at] ?? null;

export async function refresh() {
  const said = await get("/api/marks");
  version = said.version;
  known = said.marks;
  show(said.listed);
  try {
    localStorage.setItem(kept(), JSON.stringify(known));
  } catch {
    // a browser that keeps nothing
  }
  document.dispatchEvent(new Event("marks"));
}

/** The server has told how many changes there were. */
export async function heard(now) {
  if (now !== version) await refresh();
}

export async function put(at, mark) {
  await post("/api/mark", { at, mark });
  await refresh();
}

/** The sign of a mark on an example. */
export function signOf(at) {
  const kind = markOf(at);
  if (!kind) return null;
  return h("span", { class: `mark marked ${kind}`, title: `marked: ${about.marks[kind]}` },
    h("span", { class: "sign", "aria-hidden": "true" }, SIGNS[kind]), h("span", { class: "word" }, about.marks[kind]));
}

function show(listed) {
  $("marked-list").replaceChildren();
  if (!listed.length) return;
  const rows = listed.map((row) => h("tr", {},
    h("td", {}, h("button", { type: "button", class: "quiet", onclick: () => opening(row.index) }, String(row.id))),
    h("td", {}, row.mark), h("td", {}, row.label ?? ""),
    h("td", { class: "snippet", dir: "auto" }, (row.text ?? "").slice(0, 120)),
    h("td", { class: "number" }, h("button", {
      type: "button", class: "quiet", "aria-label": `take the mark of ${row.id} away`,
      onclick: () => put(row.index, null).catch(failing),
    }, "×"))));
  const heads = ["example", "mark", "label", "text", ""].map((name) => h("th", { scope: "col" }, name));
  const save = (format, words) => h("button", { type: "button", onclick: () => download(format), data: { format } }, words);
  $("marked-list").append(
    h("div", { class: "scroll" }, h("table", { class: "data results" },
      h("thead", {}, h("tr", {}, heads)), h("tbody", {}, rows))),
    h("p", { class: "exports" }, `${plural(listed.length, "example")}: `, save("csv", "Save as CSV"), save("jsonl", "Save as JSON lines")));
}

async function download(format) {
  try {
    const content = new Blob([await text(`/api/export?format=${format}`)]);
    const link = h("a", { href: URL.createObjectURL(content), download: `marked.${format}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  } catch (error) {
    failing(error);
  }
}
