// The latest decisions, newest first. The list is not updated while one is open, or while it is paused.
import { el, reconcile, setShown, setText, time, UNKNOWN } from "./dom.js";
import { costText, legTables, pickTable, rankName } from "./candidates.js";
import { ask, Refused } from "./router.js";

export const DECISIONS_SHOWN = 14;

const list = document.getElementById("decision-list");
const hold = document.getElementById("hold");
const newer = document.getElementById("newer");

const items = new Map();
let placeOf = () => "";
let latest = [];
let shown = [];

const keyOf = (row) => `${row.request_id} ${row.decided_at}`;

// `find` finds a worker's place by its id.
export function showDecisions(answer, find) {
  placeOf = (pick) => find(pick.worker_id);
  latest = answer.decisions;
  show();
}

function show() {
  const isHeld = hold.getAttribute("aria-pressed") === "true" || list.querySelector("[aria-expanded=true]") !== null;
  if (!isHeld || shown.length === 0) shown = latest;
  const known = new Set(shown.map(keyOf));
  const n = latest.filter((row) => !known.has(keyOf(row))).length;
  setText(newer, n >= DECISIONS_SHOWN ? `Show ${n} or more newer` : `Show ${n} newer`);
  setShown(newer, n > 0);
  setShown(document.getElementById("decisions-empty"), shown.length === 0);
  reconcile(list, items, shown, keyOf, makeItem, () => {});
}

hold.addEventListener("click", () => {
  hold.setAttribute("aria-pressed", String(hold.getAttribute("aria-pressed") !== "true"));
  show();
});

newer.addEventListener("click", () => {
  const hadFocus = document.activeElement === newer;
  shown = latest;
  show();
  if (hadFocus) list.querySelector("button")?.focus();
});

function way(row) {
  const named = (pick) => [rankName(pick), placeOf(pick)].filter(Boolean).join(" ");
  if (row.prefill === null) return named(row.decode);
  return row.decode === null ? named(row.prefill) : `${named(row.prefill)} → ${named(row.decode)}`;
}

// The expected time to the first token under the cost rule of time; else the cost.
function expected(row) {
  const picks = [row.prefill, row.decode].filter((pick) => pick !== null);
  if (picks.every((pick) => pick.times !== null)) {
    const ms = picks.reduce((sum, pick) => sum + pick.times.expected_ms, 0);
    return `${ms.toFixed(ms < 10 ? 1 : 0)} ms`;
  }
  return costText(picks[0]);
}

function flags(row) {
  const found = [];
  if (row.attempt > 0) found.push(`attempt ${row.attempt + 1}`);
  if (row.fallback_used) found.push("fell back: no decode worker was left in the domain");
  if (row.cross_domain) found.push("KV crosses the domain");
  if (row.last_resort) found.push("last resort: every circuit is open");
  return found.join(" · ");
}

function makeItem(row) {
  const id = `decision-${CSS.escape(keyOf(row)).replace(/\W/g, "_")}`;
  const region = el("div", { id, class: "opened", hidden: true });
  const button = el("button", { type: "button", class: "decision", "aria-expanded": "false", "aria-controls": id },
    el("time", { datetime: new Date(1000 * row.decided_at).toISOString() }, time(new Date(1000 * row.decided_at))),
    el("span", { class: "id", title: row.request_id }, row.request_id),
    el("span", { class: "way" }, way(row)),
    el("span", { class: "cost", title: "expected to the first token, or the cost" }, expected(row)),
    el("span", { class: "pill", hidden: !row.has_table, title: "its candidates were written down" }, "candidates"),
    el("span", { class: "flags" }, flags(row)));
  button.addEventListener("click", () => toggle(row, button, region));
  return el("li", {}, button, region);
}

function toggle(row, button, region) {
  const opens = button.getAttribute("aria-expanded") !== "true";
  button.setAttribute("aria-expanded", String(opens));
  setShown(region, opens);
  if (opens) open(row, region);
  else show();
}

async function open(row, region) {
  region.replaceChildren(el("p", { class: "soft" }, "Asking the router"));
  try {
    const answer = await ask(`v1/decisions/${encodeURIComponent(row.request_id)}`);
    region.replaceChildren(...answer.attempts.flatMap((attempt) => attemptNodes(attempt, answer.attempts.length, row)));
  } catch (error) {
    const isForgotten = error instanceof Refused && error.code === "decision_not_found";
    const text = isForgotten ? "The router keeps this decision no longer." : `The router did not answer: ${error.message}`;
    region.replaceChildren(el("p", { class: "warning" }, text));
  }
}

function attemptNodes(attempt, n, row) {
  const details = [
    n > 1 ? `attempt ${attempt.attempt + 1}` : null,
    `model ${row.model}`,
    `mode ${attempt.mode}`,
    attempt.constraint ? `KV ${attempt.constraint.enforcement} in ${attempt.constraint.domain} ${attempt.constraint.value ?? UNKNOWN}` : null,
    attempt.pair_cost === null ? null : `pair ${costText(attempt.prefill, attempt.pair_cost)}`,
    attempt.trace_id ? `trace ${attempt.trace_id}` : null,
  ].filter(Boolean);
  const head = el("p", { class: "soft" }, details.join(" · "));
  if (attempt.table) return [head, ...legTables(attempt.table, attempt.mode)];
  const why = "The candidates of this decision were not written down: the router does so for some decisions while this "
    + "page follows them. The box “Where would this prompt go?” shows every candidate.";
  const scroll = el("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "What was chosen" }, pickTable(attempt));
  return [head, scroll, el("p", { class: "soft" }, why)];
}
