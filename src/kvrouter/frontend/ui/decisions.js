// The latest decisions, newest first. The list is not updated while one is open, or while it is paused.
import { duration, el, percent, plural, reconcile, setShown, setText, time, UNKNOWN, whole } from "./dom.js";
import { costText, legTables, pickTable, rankName } from "./candidates.js";
import { ask, Refused } from "./router.js";

const SHOWN = [14, 50, 200]; // the router lists 200 at most

const list = document.getElementById("decision-list");
const hold = document.getElementById("hold");
const newer = document.getElementById("newer");
const older = document.getElementById("older");

const items = new Map();
let placeOf = () => "";
let latest = [];
let shown = [];
let kept = 0;
let size = 0; // which of SHOWN

export const decisionsShown = () => SHOWN[size];

const keyOf = (row) => `${row.request_id} ${row.decided_at}`;

// `find` finds a worker's place by its id.
export function showDecisions(answer, find) {
  placeOf = (pick) => find(pick.worker_id);
  latest = answer.decisions;
  kept = answer.kept;
  show();
}

// Calls `wanted` when more decisions than before are to be asked for.
export function onMoreDecisions(wanted) {
  older.addEventListener("click", () => {
    size += 1;
    shown = []; // the longer list comes whole, whatever is held
    wanted();
  });
}

function show() {
  const isHeld = hold.getAttribute("aria-pressed") === "true" || list.querySelector("[aria-expanded=true]") !== null;
  if (!isHeld || shown.length === 0) shown = latest;
  const known = new Set(shown.map(keyOf));
  const n = latest.filter((row) => !known.has(keyOf(row))).length;
  setText(newer, n >= decisionsShown() ? `Show ${n} or more newer` : `Show ${n} newer`);
  setShown(newer, n > 0);
  const isEmpty = shown.length === 0;
  setShown(document.getElementById("decisions-empty"), isEmpty);
  setShown(document.getElementById("decision-head"), !isEmpty);
  const isCut = shown.length < kept;
  setText(document.getElementById("decisions-shown"), isCut ? `The latest ${whole(shown.length)} of ${plural(kept, "request")} that the router keeps.` : "");
  setText(older, `Show ${SHOWN[size + 1]}`);
  setShown(older, isCut && size + 1 < SHOWN.length);
  const fresh = new Map(latest.map((row) => [keyOf(row), row]));
  reconcile(list, items, shown, keyOf, makeItem, (item, row) => updateItem(item, fresh.get(keyOf(row)) ?? row));
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

const placed = (pick) => [rankName(pick), placeOf(pick)].filter(Boolean);

// The worker ranks that were picked, each with its place.
function way(row) {
  const picks = [row.prefill, row.decode].filter((pick) => pick !== null).map(placed);
  const nodes = picks.flatMap(([rank, place], at) => [at ? " → " : null, rank, place ? el("span", { class: "place" }, ` ${place}`) : null]);
  return el("span", { class: "way", title: picks.map((parts) => parts.join(" ")).join(" → ") }, ...nodes.filter(Boolean));
}

// The expected time to the first token under the cost rule of time; else the cost.
function expected(row) {
  const picks = [row.prefill, row.decode].filter((pick) => pick !== null);
  if (picks.every((pick) => pick.times !== null)) return duration(picks.reduce((sum, pick) => sum + pick.times.expected_ms, 0) / 1000);
  return costText(picks[0]);
}

function shareText(tokens, row) {
  return tokens === null || !row.isl_tokens ? UNKNOWN : percent(tokens / row.isl_tokens);
}

const ttftOf = (row) => `${expected(row)} → ${row.ttft_ms === null ? UNKNOWN : duration(row.ttft_ms / 1000)}`;
const cachedOf = (row) => `${shareText(row.expected_cached_tokens, row)} → ${shareText(row.cached_tokens, row)}`;

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
  const cells = { cached: el("span", { class: "cached" }), ttft: el("span", { class: "ttft" }) };
  const button = el("button", { type: "button", class: "decision", "aria-expanded": "false", "aria-controls": id },
    el("time", { class: "time", datetime: new Date(1000 * row.decided_at).toISOString() }, time(new Date(1000 * row.decided_at))),
    el("span", { class: "id", title: row.request_id }, row.request_id),
    el("span", { class: "model", title: row.model }, row.model),
    el("span", { class: "prompt" }, plural(row.isl_tokens, "token")),
    cells.cached,
    way(row),
    cells.ttft,
    el("span", { class: "flags" }, flags(row)));
  button.addEventListener("click", () => toggle(row, button, region));
  const item = el("li", { class: row.has_table ? "has-table" : null }, button, region);
  item.cells = cells;
  return item;
}

function updateItem({ cells }, row) {
  setText(cells.cached, cachedOf(row));
  setText(cells.ttft, ttftOf(row));
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
  const head = [el("p", { class: "soft" }, details.join(" · "))];
  if (attempt.error) head.push(el("p", { class: "warning" }, `No worker could take it: ${attempt.error.message}`));
  if (attempt.table) return [...head, ...legTables(attempt.table, attempt.mode)];
  if (attempt.error) return head;
  const why = "The router keeps no candidates of this decision. The box “Where would this prompt go?” shows every candidate.";
  return [...head, pickTable(attempt), el("p", { class: "soft" }, why)];
}
