// The table of a leg's candidates, with the reason why each was not picked.
import { el, longTable, plural, scrolling, short, table, UNKNOWN } from "./dom.js";

const ROWS_SHOWN = 40;

const REASONS = {
  wrong_role: "has another role",
  pinned_elsewhere: "the request is pinned to another worker",
  taint_missing: "lacks a required taint",
  domain_mismatch: "KV may not leave the prefill worker's domain",
  domain_unknown: "publishes no value of the domain that KV may not leave",
  cannot_transfer: "KV cannot be handed between it and the other leg's worker: another engine, version or connector",
  excluded: "failed this request before",
  busy: "is over its busy threshold",
  not_alive: "does not answer",
  draining: "is leaving",
  cordoned: "is cordoned",
  engine_silent: "its engine does not answer it",
  context_too_short: "its context does not hold the request",
  prompt_out_of_range: "prefills prompts of other lengths",
  far_from_frontend: "is not near the frontend",
  circuit_open: "its circuit is open: it failed again and again",
  kv_lost: "KV between it and the other leg's worker was lost lately",
  too_late: "its first token would come too late",
};

const TERMS = {
  queue_ms: "queue",
  prefill_ms: "prefill",
  memory_ms: "memory",
  transfer_ms: "transfer",
  decode_ms: "decode",
  others_ms: "others wait",
  turnover_ms: "cache turnover",
  price_ms: "price",
};

const BLOCKS = { prefill_blocks: "prefill", decode_blocks: "decode", transfer_blocks: "transfer" };

export const reasonText = (reason) => REASONS[reason] ?? reason.replaceAll("_", " ");

export const rankName = (of) => `${of.worker_id}/${of.dp_rank}`;

export const places = (domains) => Object.entries(domains).map(([name, value]) => `${name} ${value}`).join(" · ");

// The cost, in milliseconds under the cost rule of time, else in blocks.
export function costText(of, cost = of.cost) {
  return of.times === null ? `${short(cost)} blocks` : `${short(1000 * cost)} ms`;
}

function costOf(row) {
  return row.pair_cost ?? row.cost;
}

// The named parts of a cost; the cost is their sum times the multiplier.
function partsOf(row) {
  if (row.times) return Object.fromEntries(Object.entries(TERMS).map(([key, name]) => [name, row.times[key]]));
  const prefill = row.cost / row.multiplier - row.decode_blocks - row.transfer_blocks; // includes the overlap weight
  return { prefill, decode: row.decode_blocks, transfer: row.transfer_blocks };
}

// The differences of the parts to the chosen candidate's, the largest first; their sum is the difference in cost.
// Empty for a cost that is not a sum, such as LMetric's product.
function differences(row, chosen) {
  const cost = (of) => (of.times ? 1000 : 1) * of.cost;
  const [parts, chosenParts] = [partsOf(row), partsOf(chosen)];
  const sum = (of) => Object.values(of).reduce((total, part) => total + part, 0);
  const isSum = row.times
    ? Math.abs(sum(parts) * row.multiplier - cost(row)) < 0.02 + 0.001 * cost(row)
    : [row, chosen].every((of) => (of.prefill_blocks > 0 ? partsOf(of).prefill >= 0 : Math.abs(partsOf(of).prefill) < 1e-6));
  if (!isSum) return [];
  const found = Object.keys(parts).map((name) => [name, chosen.multiplier * (parts[name] - chosenParts[name])]);
  found.push(["preference", (row.multiplier - chosen.multiplier) * sum(parts)]);
  return found
    .filter(([, by]) => Math.abs(by) >= 0.0005)
    .sort((one, other) => Math.abs(other[1]) - Math.abs(one[1]))
    .map(([name, by]) => `${name} ${by > 0 ? "+" : "−"}${short(Math.abs(by))}`);
}

function why(row, chosen, mode) {
  const isPair = row.pair_cost !== null;
  if (row.chosen) return mode !== "kv" ? `chosen by ${mode}` : isPair ? "chosen: the lowest cost in all" : "chosen: the lowest cost";
  if (!row.eligible) return `refused, ${row.reason}: ${reasonText(row.reason)}`;
  if (chosen === undefined) return "could take this leg, but the request was refused";
  if (mode !== "kv") return `${mode} chose another one: costs are not weighed`;
  const by = costOf(row) - costOf(chosen);
  const parts = differences(row, chosen).join(", ");
  if (Math.abs(by) < 1e-9) return "costs the same: the draw among equals decided";
  if (by < 0) return `costs less: the draw of a temperature above 0 decided${parts ? ` (${parts})` : ""}`;
  if (isPair) return `costs ${costText(row, by)} more in all${row.partner ? ` with ${rankName(row.partner)}` : ", by itself"}`;
  return `costs ${costText(row, by)} more${parts ? `: ${parts}` : ""}`;
}

function order(one, other) {
  const rank = (row) => (row.chosen ? 0 : row.eligible ? 1 : 2);
  return rank(one) - rank(other) || costOf(one) - costOf(other);
}

function termColumns(isTime, rows) {
  const terms = isTime ? TERMS : BLOCKS;
  const valueOf = (row, key) => (isTime ? row.times?.[key] : row[key]);
  const columns = Object.entries(terms)
    .filter(([key]) => rows.some((row) => valueOf(row, key)))
    .map(([key, name]) => [isTime ? `${name} ms` : name, (row) => short(valueOf(row, key))]);
  if (rows.some((row) => row.multiplier !== 1)) columns.push(["multiplier", (row) => short(row.multiplier)]);
  return columns;
}

function legTable(title, leg, mode, winner) {
  const rows = leg.candidates.toSorted(order);
  const chosen = rows.find((row) => row.chosen) ?? winner;
  const isTime = rows.some((row) => row.times !== null);
  const terms = termColumns(isTime, rows);
  const isPaired = rows.some((row) => row.pair_cost !== null);
  const columns = [["worker", true], ["where", true], [isTime ? "cost ms" : "cost"], ...(isPaired ? [[isTime ? "pair ms" : "pair"]] : []),
    ["why", true], ["cached blocks"], ...terms.map(([name]) => [name])];
  const cost = (value) => (value === null ? UNKNOWN : short(isTime ? 1000 * value : value));
  const refused = rows.filter((row) => !row.eligible).length;
  const heading = `${title}: ${plural(rows.length - refused, "candidate")}` + (refused ? `, ${refused} refused` : "");
  const cells = rows.map((row) => ({
    class: row.chosen ? "chosen" : row.eligible ? null : "refused",
    cells: [rankName(row), places(row.domains) || UNKNOWN, cost(row.cost), ...(isPaired ? [cost(row.pair_cost)] : []),
      el("td", { class: "why" }, why(row, chosen, mode)), short(row.overlap_blocks), ...terms.map(([, text]) => text(row))],
  }));
  return longTable(`${title} candidates`, heading, columns, cells, { rowsShown: ROWS_SHOWN, rest: rest(rows.slice(ROWS_SHOWN)) });
}

// A summary of the rows that are not shown.
function rest(rows) {
  const counts = new Map();
  for (const row of rows) {
    const reason = row.eligible ? "not cheaper" : row.reason;
    counts.set(reason, (counts.get(reason) ?? 0) + 1);
  }
  return [...counts].map(([reason, n]) => `${n} ${reason}`).join(", ");
}

// The tables of every leg of an explanation, or of a kept decision.
export function legTables(legs, mode) {
  const titles = [["prefill", "Prefill"], ["decode", legs.prefill ? "Decode" : "Worker"], ["local_prefill", "Prefill where it is answered"]];
  const named = titles.filter(([key]) => legs[key]);
  // pairs and workers that prefill for themselves compete with each other
  const winner = named.flatMap(([key]) => legs[key].candidates).find((row) => row.chosen && row.pair_cost !== null);
  return named.map(([key, title]) => legTable(title, legs[key], mode, winner));
}

// The costs of the picks, for decisions without kept candidates.
export function pickTable(decision) {
  const picks = [["prefill", decision.prefill], ["decode", decision.decode]].filter(([, pick]) => pick !== null);
  const isTime = picks.some(([, pick]) => pick.times !== null);
  const terms = termColumns(isTime, picks.map(([, pick]) => pick));
  const columns = [["leg", true], ["worker", true], ["cached blocks"], ...terms.map(([name]) => [name]),
    [isTime ? "cost ms" : "cost"], ["candidates"]];
  return scrolling("What was chosen", table("What was chosen", columns, picks.map(([leg, pick]) => ({
    cells: [leg, rankName(pick), short(pick.overlap_blocks), ...terms.map(([, text]) => text(pick)),
      short(isTime ? 1000 * pick.cost : pick.cost), short(pick.candidates)],
  }))));
}
