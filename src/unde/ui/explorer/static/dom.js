// Elements. Text goes in as text; markup comes from the server's renderer alone, and only what it makes is let in.

export const $ = (id) => document.getElementById(id);

/** One element: properties that begin with "on" listen, `data` is a dictionary, the rest are attributes. */
export function h(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) made.addEventListener(key.slice(2), value);
    else if (key === "data") Object.assign(made.dataset, value);
    else if (key === "value" || key === "checked") made[key] = value;
    else made.setAttribute(key, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return made;
}

const TAGS = new Set(["LI", "SPAN", "IMG", "P", "DETAILS", "SUMMARY", "DIV", "WBR", "I", "S", "B", "BR"]);
const ATTRIBUTES = new Set(["class", "title", "alt", "src", "width", "height", "dir", "aria-hidden"]);
const PICTURE = /^data:image\/png;base64,[A-Za-z0-9+/=]+$/;

const policy = window.trustedTypes
  ? window.trustedTypes.createPolicy("unde", { createHTML: (markup) => markup })
  : { createHTML: (markup) => markup };

/** What the renderer of the report made, as nodes. It has escaped all that users wrote; this looks once more. */
export function fragment(markup) {
  const parsed = new DOMParser().parseFromString(policy.createHTML(markup), "text/html");
  for (const node of parsed.body.querySelectorAll("*")) {
    if (!TAGS.has(node.tagName)) {
      node.remove();
      continue;
    }
    for (const { name, value } of [...node.attributes]) {
      if (!ATTRIBUTES.has(name) || (name === "src" && !PICTURE.test(value))) node.removeAttribute(name);
    }
  }
  const out = document.createDocumentFragment();
  out.append(...[...parsed.body.childNodes].map((node) => document.importNode(node, true)));
  return out;
}

/** A small sign of the report, from its template. */
export const sign = (name) => $(`sign-${name}`).content.firstElementChild.cloneNode(true);

/** A labelled field of a form. */
export const field = (label, input, more = "") =>
  h("label", { class: `field ${more}`.trim() }, h("span", { class: "note" }, label), input);

export const plural = (amount, noun) =>
  `${amount.toLocaleString("en")} ${amount === 1 ? noun : noun.endsWith("y") ? noun.slice(0, -1) + "ies" : noun + "s"}`;

/** Calls the function when there was no call for a while. */
export function later(run, milliseconds) {
  let waiting;
  return (...given) => {
    clearTimeout(waiting);
    waiting = setTimeout(() => run(...given), milliseconds);
  };
}
