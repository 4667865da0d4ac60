// Tables of KV between domains, of learned links, and of refusals.
import { bar, bytes, el, longTable, percent, setPart, short, showIfChanged, sumOf, UNKNOWN, whole } from "./dom.js";
import { reasonText } from "./candidates.js";

const flowTable = document.getElementById("flow-table");
const linkTable = document.getElementById("link-table");
const refusalTables = document.getElementById("refusal-tables");
let refusedBefore = null;

export function isCrossing(flow) {
  return flow.domain !== null && flow.prefill_value !== flow.decode_value;
}

export function costText(cost) {
  return cost === null ? UNKNOWN : short(cost);
}

function rateText(flow) {
  return flow.recent_handoffs > 0 && flow.recent_handoffs <= flow.unsized_handoffs && flow.bytes === 0 ? UNKNOWN
    : `${bytes(flow.bytes_per_s)}/s`;
}

export function showFlows({ flows, recent_s: recentS }) {
  setPart("flows", flows.length > 0);
  showIfChanged(flowTable, flows, () => {
    const most = flows.reduce((largest, flow) => Math.max(largest, flow.bytes), 1);
    const total = sumOf(flows, (flow) => flow.handoffs);
    const hasModels = new Set(flows.map((flow) => flow.model)).size > 1;
    const columns = [["from → to", true], ...(hasModels ? [["model", true]] : []), ["handoffs"], ["share"], ["bytes"],
      [`last ${whole(recentS)} s`], ["cost"], [""]];
    const rows = flows.toSorted((one, other) => other.bytes - one.bytes || other.handoffs - one.handoffs).map((flow) => ({
      cells: [pairName(flow), ...(hasModels ? [flow.model] : []), whole(flow.handoffs), percent(flow.handoffs / total),
        flow.bytes === 0 && flow.unsized_handoffs ? UNKNOWN : bytes(flow.bytes), rateText(flow), costText(flow.cost), bar(flow.bytes / most)],
    }));
    const unsized = sumOf(flows, (flow) => flow.unsized_handoffs);
    const notes = [
      unsized ? `${whole(unsized)} handoffs are without bytes: their workers do not say how many a token has.` : null,
      flows.every((flow) => flow.cost === null) ? "No cost: no link here has a price." : null,
    ].filter(Boolean).join(" ");
    return [longTable("KV between domains", null, columns, rows), notes ? el("p", { class: "soft" }, notes) : null].filter(Boolean);
  });
}

function pairName(flow) {
  if (flow.domain === null) return el("span", {}, flow.prefill_value === null ? "workers without a place" : "all other pairs");
  const [from, to] = [flow.prefill_value ?? "unknown", flow.decode_value ?? "unknown"];
  const name = `${flow.domain} ${from} → ${to}`;
  return isCrossing(flow) ? el("span", {}, name, " ", el("span", { class: "crosses" }, "crosses")) : el("span", {}, name);
}

export function showLinks(models) {
  const data = models.map(({ model, router_cost: cost, links, parted_pairs: pairs }) => ({ model, cost, links, pairs }));
  const isShown = data.some(({ links, pairs }) => links?.learned.length || links?.engines || pairs.length);
  setPart("links", isShown);
  showIfChanged(linkTable, data, () => {
    const learned = data.flatMap(({ model, links }) => (links?.learned ?? []).map((link) => ({ model, ...link })));
    const hasModels = models.length > 1;
    const nodes = [];
    if (learned.length) {
      const columns = [["link", true], ...(hasModels ? [["model", true]] : []), ["latency"], ["bandwidth"], ["slowness"], ["interval"],
        ["transfers"], ["", true]];
      nodes.push(longTable("Links as learned", null, columns, learned.map((link) => ({ cells: [
        link.link, ...(hasModels ? [link.model] : []), `${short(1000 * link.latency_s)} ms`, `${short(link.bandwidth_bytes_per_s / 1e9)} GB/s`,
        `× ${short(link.slowness)}`, link.slowness_interval ? link.slowness_interval.map(short).join(" – ") : UNKNOWN,
        whole(link.transfers), link.slow ? el("span", { class: "crosses" }, "slow") : "",
      ] }))));
    }
    for (const { model, links } of data) {
      if (links?.engines) nodes.push(el("p", { class: "soft" }, `${model}: by its engines' own counts KV travels at `
        + `${short(links.engines.bandwidth_bytes_per_s / 1e9)} GB/s, by the router's at ${short(links.engines.seen_bytes_per_s / 1e9)} GB/s`
        + `${links.engines.agree ? "" : ": they disagree"}.`));
    }
    const broken = data.flatMap(({ pairs }) => pairs);
    if (broken.length) {
      const columns = [["prefill worker", true], ["decode worker", true], ["circuit", true], ["reason", true]];
      nodes.push(longTable("broken pairs", "Pairs whose KV was lost lately", columns, broken.map((pair) => ({ cells: [
        `#${pair.prefill_worker_id}`, `#${pair.decode_worker_id}`, pair.circuit.replace("_", " "), pair.reason] }))));
    }
    return nodes;
  });
}

const rankKey = (row) => `${row.reason} ${row.role}`;
const answerKey = (row) => `${row.model} ${row.code}`;

export function showRefusals(answer) {
  // counts since the page was opened start at its first answer, or at a restart of the router
  const counts = new Map([...answer.worker_ranks.map((row) => [rankKey(row), row.count]), ...answer.answers.map((row) => [answerKey(row), row.count])]);
  const hasRestarted = refusedBefore !== null && [...refusedBefore].some(([key, n]) => (counts.get(key) ?? 0) < n);
  if (refusedBefore === null || hasRestarted) refusedBefore = counts;
  const since = (key, n) => {
    const more = n - (refusedBefore.get(key) ?? 0);
    return more ? `+${whole(more)}` : "";
  };
  setPart("refusals", counts.size > 0);
  showIfChanged(refusalTables, answer, () => {
    const ranks = answer.worker_ranks.toSorted((one, other) => other.count - one.count);
    const most = Math.max(ranks[0]?.count ?? 1, 1);
    const answers = answer.answers.toSorted((one, other) => other.count - one.count);
    return [
      ranks.length ? longTable("refused ranks", "Worker ranks, by the reason", [["reason", true], ["leg", true], ["refused"], ["since opened"], [""]], ranks.map((row) => ({
        cells: [el("span", { title: reasonText(row.reason) }, row.reason), row.role, whole(row.count), since(rankKey(row), row.count), bar(row.count / most)],
      }))) : null,
      answers.length ? longTable("error answers", "Requests answered with an error, by its code", [["code", true], ["model", true], ["answers"], ["since opened"]], answers.map((row) => ({
        cells: [row.code, row.model, whole(row.count), since(answerKey(row), row.count)],
      }))) : null,
    ].filter(Boolean);
  });
}
