// The ranking: proponents and opponents, unweighted and weighted side by side, each example as the report shows it.

import { job, post } from "./api.js";
import { $, fragment, h, later, plural, sign } from "./dom.js";
import { signOf } from "./marks.js";
import { state } from "./state.js";

const entries = new Map(); // "where answer at" → {name, label, html as nodes}
let about;
let opening;
let shading = null; // what is being shaded can be stopped
let drawn = null; // what was drawn last: {answer, ranking}

export function prepare(session, open) {
  about = session;
  opening = open;
  document.addEventListener("marks", () => drawn && draw(drawn.answer, drawn.ranking));
}

const key = (answer, at) => `${answer.where === "train" ? "train" : answer.answer} ${at}`;

/** Fetches the examples that were not shown before. */
async function fetched(answer, ranking) {
  const all = ranking.rows.flatMap((row) => [...row.high, ...row.low]).map((one) => one.at);
  const missing = [...new Set(all)].filter((at) => !entries.has(key(answer, at)));
  for (let start = 0; start < missing.length; start += 100) {
    const wanted = missing.slice(start, start + 100);
    const found = await post("/api/examples", { where: answer.where, answer: answer.answer, at: wanted });
    for (const entry of found) entries.set(key(answer, entry.at), { ...entry, nodes: fragment(entry.html) });
  }
}

export async function show(answer, ranking) {
  await fetched(answer, ranking);
  drawn = { answer, ranking };
  draw(answer, ranking);
  shading?.abort();
  if (about.shaded && answer.where === "train") shadeSoon(answer, ranking);
}

function draw(answer, ranking) {
  const first = ranking.rows[0];
  const rows = ranking.rows.map((row) => rowOf(answer, row, row === first ? null : first));
  $("rows").classList.toggle("beside", rows.length > 1);
  $("rows").classList.toggle("several", rows.length > 2);
  $("rows").replaceChildren(...rows);
}

const own = (answer) => (answer.asked.length === 1 ? answer.asked[0].label ?? answer.asked[0].own : null);

function rowOf(answer, row, first) {
  const largest = Math.max(...[...row.high, ...row.low].map((one) => Math.abs(one.value)), 0);
  const reverse = answer.where !== "train";
  const sides = row.signed
    ? [["pro", "▲", reverse ? "It speaks for" : "Proponents"], ["opp", "▼", reverse ? "It speaks against" : "Opponents"]]
    : [["high", "▲", "Highest scores"], ["low", "▽", "Lowest scores"]];
  if (row.baseline) sides.pop();
  const lists = [row.high, row.low];
  return h("section", { class: row.baseline ? "row baseline" : "row", data: { row: row.name } },
    h("div", { class: "row-head" }, h("h4", {}, row.name), h("p", { class: "note" }, remarks(answer, row, first))),
    h("div", { class: "sides" }, sides.map(([tone, mark, title], i) =>
      h("div", { class: `side ${tone}` }, h("h5", {}, h("span", { "aria-hidden": "true" }, `${mark} `), title),
        lists[i].length
          ? h("ol", { class: `examples as-${answer.kind}` }, lists[i].map((one) => exampleOf(answer, one, largest)))
          : h("p", { class: "note" }, "none")))));
}

function remarks(answer, row, first) {
  const said = [];
  const asked = own(answer);
  if (asked !== null && asked !== undefined && answer.where === "train" && row.high.length) {
    const name = about.classes?.[asked] ?? String(asked);
    const same = row.high.filter((one) => entries.get(key(answer, one.at)).label === name).length;
    said.push(`${same} of ${plural(row.high.length, row.baseline ? "example" : "proponent")} with the label asked about`);
  }
  if (row.baseline) {
    const [[way, count], ...others] = Object.entries(row.baseline.shared);
    said.push([`shares ${count} of its top ${row.baseline.of} with “${way}”`,
      ...others.map(([other, amount]) => `${amount} with “${other}”`)].join(", "));
  } else if (first) {
    const fresh = (here, there) => here.filter((one) => !there.some((other) => other.at === one.at)).length;
    const high = fresh(row.high, first.high);
    const low = fresh(row.low, first.low);
    said.push(high + low ? `${high} above and ${low} below not in “${first.name}”` : `the same examples as “${first.name}”`);
  }
  return said.join(" · ");
}

function exampleOf(answer, one, largest) {
  const entry = entries.get(key(answer, one.at));
  const item = entry.nodes.firstElementChild.cloneNode(true);
  item.dataset.at = one.at;
  item.dataset.value = one.value;
  item.querySelector(".score").textContent = one.text;
  const bar = item.querySelector(".bar");
  bar.className = `bar ${one.value >= 0 ? "pro" : "opp"}`;
  bar.firstElementChild.style.width = `${largest ? (100 * Math.abs(one.value)) / largest : 0}%`;
  const asked = own(answer);
  const name = asked === null || asked === undefined ? null : about.classes?.[asked] ?? String(asked);
  const signs = [];
  if (answer.where === "train") {
    if (name !== null && entry.label !== null && entry.label !== name) signs.push(sign("differs"));
    const marked = signOf(one.at);
    if (marked) signs.push(marked);
  }
  const place = item.querySelector(".frame") ?? item.querySelector(".what");
  if (signs.length) {
    const holder = item.querySelector(".marks") ?? place.appendChild(h("span", { class: "marks" }));
    holder.append(...signs);
  }
  const what = answer.where === "train" ? "training example" : "query";
  const words = `${what} ${entry.name}${entry.label === null ? "" : `, label ${entry.label}`}, score ${one.text}`;
  const button = h("button", {
    type: "button", class: "open", "aria-label": words, "aria-haspopup": answer.where === "train" ? "dialog" : null,
    onclick: () => opening(answer, entry, one),
  });
  const id = item.querySelector(".about > .id");
  if (item.classList.contains("thumb")) {
    item.querySelector(".frame").append(button);
    item.title = `${entry.name}${entry.label === null ? "" : `, label ${entry.label}`}`;
  } else {
    button.classList.add("id");
    button.textContent = entry.name;
    id.replaceWith(button);
  }
  return item;
}

const shadeSoon = later((answer, ranking) => shade(answer, ranking).catch(() => {}), 350);

/** Shades the tokens of passages by what they add to the score, row by row. */
async function shade(answer, ranking) {
  shading?.abort();
  const mine = (shading = new AbortController());
  for (const row of ranking.rows.filter((one) => !one.baseline)) {
    const all = [...new Set([...row.high, ...row.low].map((one) => one.at))];
    const under = row.name === "unweighted" ? {} : { weights: state.weights, values: state.values };
    for (let start = 0; start < all.length; start += 6) {
      const at = all.slice(start, start + 6);
      const { passages } = await job("/api/shade", { answer: answer.answer, at, ...under }, () => {}, mine.signal);
      if (mine.signal.aborted || drawn.ranking !== ranking) return;
      const place = [...$("rows").children].find((section) => section.dataset.row === row.name);
      for (const item of place?.querySelectorAll("li.example") ?? []) {
        const passage = passages[item.dataset.at];
        if (passage) item.querySelector(".passage")?.replaceWith(fragment(passage));
      }
    }
  }
}
