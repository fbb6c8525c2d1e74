// Makes elements. Texts of run files become text nodes and attributes, never markup.

function el(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const byId = (id) => document.getElementById(id);

// For screen readers alone.
const hidden = (text) => el("span", { class: "hidden" }, text);

// Text in which `code` is marked as in Markdown, as the requirements of the contract are written.
function prose(text) {
  return text.split("`").map((part, i) => (i % 2 ? el("code", {}, part) : part));
}

// What may be wider or higher than its place: the keyboard must reach it to scroll. A group is no landmark; there are many.
function scrolling(label, ...children) {
  return el("div", { class: "scroll", role: "group", "aria-label": label, tabindex: 0 }, ...children);
}

function table(caption, heads, rows, attributes = {}) {
  const head = el(
    "tr",
    {},
    heads.map((text) => el("th", { scope: "col" }, text)),
  );
  const body = rows.map((cells) =>
    el(
      "tr",
      {},
      cells.map((cell) => el("td", {}, cell)),
    ),
  );
  return el("table", attributes, el("caption", {}, caption), el("thead", {}, head), el("tbody", {}, body));
}

function definitions(pairs) {
  const shown = pairs.filter(([, value]) => value !== "" && value !== null && value !== undefined);
  return el(
    "dl",
    {},
    shown.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))),
  );
}

const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

function clear(element, ...children) {
  element.replaceChildren(...children);
  return element;
}
