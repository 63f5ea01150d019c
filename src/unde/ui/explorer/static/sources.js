// Influence by source: the share of each author, domain or label in this answer and in all of this session.

import { $, h } from "./dom.js";

const percent = (value) => `${(100 * value).toFixed(1)} %`;

/** The table of sources under the examples; hidden without any. */
export function show(column, sources) {
  $("sources").hidden = !sources.length;
  if (!sources.length) return;
  const questions = sources[0].questions;
  const heads = [column, "share", ...(questions > 1 ? [`mean of ${questions} questions`] : []), "of examples", "total"];
  const rows = sources.map((source) => h("tr", {},
    h("th", { scope: "row" }, source.name),
    h("td", {}, percent(source.share)),
    questions > 1 ? h("td", {}, `${percent(source.mean)} ± ${percent(source.ci95)}`) : null,
    h("td", {}, percent(source.examples)),
    h("td", {}, source.total.toPrecision(3))));
  $("sources").replaceChildren(
    h("summary", {}, `Influence by ${column}`),
    h("p", { class: "note" }, "The share of each in the positive scores, beside its share of the training examples, "
      + "which is what chance would give; ± half of the 95 % interval over the questions of this session."),
    h("table", { class: "data" }, h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))),
      h("tbody", {}, rows)));
}
