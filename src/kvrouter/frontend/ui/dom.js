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
  const text = Math.max(0, Math.min(1, share || 0)).toFixed(5);
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
      const title = typeof cell === "string" && cell.length > 20 ? cell : null; // long names are cut
      if (at === 0) return el("th", { scope: "row", title }, cell);
      return el("td", { class: columns[at][1] ? "left" : null, title }, cell);
    })));
  return el("table", {}, caption === null ? null : el("caption", {}, caption),
    el("thead", {}, el("tr", {}, ...head)), el("tbody", {}, ...body));
}

// A region in which a wide table scrolls; it shows that the table goes on to the right.
export function scrolling(label, content) {
  const region = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": label }, content);
  const frame = el("div", { class: "frame" }, region);
  const update = () => setClass(frame, "goes-on", region.scrollWidth - region.clientWidth - region.scrollLeft > 2);
  region.addEventListener("scroll", update, { passive: true });
  new ResizeObserver(update).observe(region);
  return frame;
}

const ROWS_SHOWN = 20;
const shownWhole = new Set(); // names of the tables that show all of their rows

// A scrolling table of `rows`; of many only the first, how many there are, and a button for all of them. `rest`,
// if given, says what the other rows are. `name` names the table over redrawings.
export function longTable(name, caption, columns, rows, { rowsShown = ROWS_SHOWN, rest = null } = {}) {
  const node = el("div");
  const draw = () => {
    const isWhole = shownWhole.has(name);
    const shown = isWhole ? rows : rows.slice(0, rowsShown);
    const nodes = [scrolling(caption ?? name, table(caption, columns, shown))];
    if (rows.length > rowsShown) {
      const text = isWhole ? `All ${whole(rows.length)} rows.` : `${whole(shown.length)} of ${whole(rows.length)} rows${rest ? `; the others: ${rest}` : ""}.`;
      const toggle = () => {
        if (!shownWhole.delete(name)) shownWhole.add(name);
        draw();
        node.querySelector(".rest button").focus();
      };
      nodes.push(el("p", { class: "rest" }, el("span", { class: "soft" }, text), " ",
        el("button", { type: "button", onclick: toggle }, isWhole ? `Show ${rowsShown}` : "Show all")));
    }
    node.replaceChildren(...nodes);
  };
  draw();
  return node;
}

// Shows or hides a part of the page, and its entry in the navigation.
export function setPart(id, isShown) {
  setShown(document.getElementById(id), isShown);
  const entry = document.querySelector(`nav a[href="#${id}"]`);
  if (entry) setShown(entry, isShown);
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

// A number of blocks, tokens or requests: exact below a million.
export const count = (n) => (Math.abs(n) < 1e6 ? whole(n) : short(n));

export function percent(share) {
  if (share < 1 && share > 0.99) return "99%"; // 100% is all
  if (share >= 0.1 || share === 0) return `${Math.round(100 * share)}%`;
  return `${Math.max(0.1, 100 * share).toFixed(1)}%`;
}

// A share of hits, with a digit more than others.
export const hitRate = (part, all) => (all ? `${(100 * part / all).toFixed(1)}%` : UNKNOWN);

export function duration(seconds) {
  if (seconds === null || seconds === undefined) return UNKNOWN;
  if (seconds >= 1) return `${short(seconds)} s`;
  const ms = 1000 * seconds;
  return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
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
