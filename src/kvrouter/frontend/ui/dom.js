// Elements, texts and numbers. Text from the router only becomes text nodes, never markup.

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "onclick") node.addEventListener("click", value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

// Writes only differences: an unchanged page costs the browser nothing.
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

export function setShown(node, isShown) {
  if (node.hidden === isShown) node.hidden = !isShown;
}

export function setClass(node, name, isOn) {
  if (node.classList.contains(name) !== isOn) node.classList.toggle(name, isOn);
}

// A bar's length, from 0 to 1. The page's policy forbids style attributes, and allows this.
export function setShare(node, share) {
  const text = Math.max(0, Math.min(1, share || 0)).toFixed(3);
  if (node.style.getPropertyValue("--share") !== text) node.style.setProperty("--share", text);
}

// Gives `parent` one child per item, in order. Children of remaining items are kept, and moved only if their
// order changes: a moved element loses the focus.
export function reconcile(parent, kept, items, keyOf, make, update) {
  const wanted = new Set(items.map(keyOf));
  for (const [key, node] of kept) {
    if (wanted.has(key)) continue;
    node.remove();
    kept.delete(key);
  }
  let at = parent.firstElementChild;
  for (const item of items) {
    const key = keyOf(item);
    let node = kept.get(key);
    if (node === undefined) {
      node = make(item);
      kept.set(key, node);
    }
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
    update(node, item);
  }
}

// A table. `columns` are [title, is it text]; a row is {cells, class}, a cell a text or an element.
export function table(caption, columns, rows) {
  const head = columns.map(([title, isText]) => el("th", { scope: "col", class: isText ? "left" : null }, title));
  const body = rows.map((row) =>
    el("tr", { class: row.class }, ...row.cells.map((cell, at) => {
      if (cell instanceof HTMLTableCellElement) return cell;
      if (at === 0) return el("th", { scope: "row" }, cell);
      return el("td", { class: columns[at][1] ? "left" : null }, cell);
    })));
  return el("table", {}, caption === null ? null : el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
}

export function bar(share) {
  const cell = el("td", { class: "bar" }, el("i"));
  setShare(cell.firstChild, share);
  return cell;
}

// Shows `make()` in `parent` if `data` changed since the last call.
export function showIfChanged(parent, data, make) {
  const state = JSON.stringify(data);
  if (parent.shown === state) return;
  parent.shown = state;
  parent.replaceChildren(...make());
}

export const UNKNOWN = "–";

const WHOLE = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const MILLIONS = new Intl.NumberFormat("en", { maximumSignificantDigits: 3, notation: "compact" });
const SHORT = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });

export const whole = (n) => (n === null || n === undefined ? UNKNOWN : WHOLE.format(n));

export function short(n) {
  if (n === null || n === undefined) return UNKNOWN;
  return (Math.abs(n) < 1e6 ? SHORT : MILLIONS).format(n);
}

export function percent(share) {
  if (share >= 0.1 || share === 0) return `${Math.round(100 * share)}%`;
  return `${Math.max(0.1, 100 * share).toFixed(1)}%`;
}

export function plural(n, noun) {
  return `${whole(n)} ${noun}${n === 1 ? "" : "s"}`;
}

// Networks and clouds count bytes by thousands, and so does the router's price_per_gb.
export function bytes(n) {
  for (const [unit, size] of [["TB", 1e12], ["GB", 1e9], ["MB", 1e6], ["kB", 1e3]]) {
    if (n >= size) return `${short(n / size)} ${unit}`;
  }
  return `${whole(n)} B`;
}

export function time(date) {
  return date.toLocaleTimeString("en-GB");
}

export function sumOf(items, valueOf) {
  return items.reduce((sum, item) => sum + (valueOf(item) || 0), 0);
}
