// The fleet: zones, their workers in groups by role, and a dialog with the details of one worker.
import { bytes, count, el, longTable, percent, plural, reconcile, setClass, setShare, setShown, setText, short, showIfChanged, sumOf, UNKNOWN, whole } from "./dom.js";

const COMPACT_FROM = 24; // workers in a group from which they are drawn small
const SHOWN_MAX = 40; // workers of a group that are shown unless all are requested
const NOWHERE = "";
const ROLES = ["prefill", "decode", "both"];
const PREFILL_SCALE_TOKENS = 8192; // a full bar, unless a worker has more to prefill
const CACHE_SCALES = [0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1]; // shares of a worker's blocks that a full bar of its cache may mean

const RANK_COLUMNS = [["rank", true], ["feed", true], ["booked blocks"], ["reported"], ["of"], ["to prefill"], ["runs"], ["waits"],
  ["cached"], ["slowness"], ["KV fetched"]];

const zonesNode = document.getElementById("zones");
const grouping = document.getElementById("grouping");
const dialog = document.getElementById("worker-dialog");

const zones = new Map();
const groupsAll = new Set(); // groups that show all of their workers
let latest = { workers: [], models: [] };
let openedId = null;
let levelsShown = "";

// The worst problem of a worker; an empty text without one.
function trouble(worker) {
  if (!worker.alive) return "not alive";
  if (worker.engine_silent) return "engine silent";
  if (worker.several_engines) return "several engines";
  if (worker.draining) return "draining";
  if (worker.cordons.length) return "cordoned";
  if (worker.kv_partners === 0) return "no partner";
  if (worker.circuit !== "closed") return `circuit ${worker.circuit.replace("_", " ")}`;
  for (const rank of worker.ranks) {
    if (rank.feed?.kv_events_missing) return "no KV events";
    if (rank.feed && rank.feed.state !== "live") return rank.feed.state.replace("_", " ");
  }
  if (worker.ranks.some((rank) => rank.kv_transfers?.slow)) return "slow transfers";
  if (worker.ranks.some((rank) => rank.speed?.slow)) return "slow";
  return worker.lapsed ? "lease lapsed" : "";
}

function activeBlocks(rank) {
  return Math.max(rank.active_blocks, rank.report?.active_blocks ?? 0);
}

function readingOf(worker) {
  const total = sumOf(worker.ranks, (rank) => rank.total_blocks);
  const active = sumOf(worker.ranks, activeBlocks);
  const held = sumOf(worker.ranks, (rank) => rank.index_blocks);
  return {
    worker,
    trouble: trouble(worker),
    tokens: sumOf(worker.ranks, (rank) => rank.prefill_tokens),
    active,
    held,
    total,
    load: total ? active / total : 0,
    cache: total ? held / total : 0,
    at: worker.pod ?? hostOf(worker.engine_url),
    feeds: worker.ranks.some((rank) => rank.feed !== null),
  };
}

function hostOf(url) {
  return url === null ? null : url.replace(/^\w+:\/\//, "").replace(/\/.*$/, "");
}

function levelsOf(workers) {
  const levels = new Set();
  for (const worker of workers) {
    for (const level of worker.levels) levels.add(level);
    for (const level of Object.keys(worker.domains)) levels.add(level);
  }
  return [...levels];
}

function showLevels(levels) {
  const state = levels.join(" ");
  if (state !== levelsShown) {
    levelsShown = state;
    const chosen = grouping.value;
    grouping.replaceChildren(...levels.map((level) => el("option", { value: level }, level)));
    if (levels.includes(chosen)) grouping.value = chosen;
  }
  setShown(document.getElementById("grouping-label"), levels.length > 1);
}

// A worker's value of the level by which the fleet is grouped.
export function placeOf(worker) {
  const value = worker?.domains[grouping.value];
  return value === undefined ? "" : `${grouping.value} ${value}`;
}

export function showFleet(fleet) {
  latest = fleet;
  showLevels(levelsOf(fleet.workers));
  const level = grouping.value;
  const byPlace = new Map();
  for (const worker of fleet.workers) {
    const place = worker.domains[level] ?? NOWHERE;
    if (!byPlace.has(place)) byPlace.set(place, []);
    byPlace.get(place).push(readingOf(worker));
  }
  const fullest = [...byPlace.values()].flat().reduce((most, reading) => Math.max(most, reading.cache), 0);
  const cacheScale = CACHE_SCALES.find((share) => fullest <= share) ?? 1;
  setText(document.getElementById("cache-scale"), cacheScale < 1 ? `; a full bar is ${100 * cacheScale}% of a worker's` : "");
  const scale = fleet.workers.reduce((most, worker) =>
    Math.max(most, sumOf(worker.ranks, (rank) => rank.prefill_tokens)), PREFILL_SCALE_TOKENS);
  const places = [...byPlace.keys()].sort((one, other) => one.localeCompare(other, "en", { numeric: true }));
  reconcile(zonesNode, zones, places, (place) => `${level}=${place}`, makeZone, (node, place) => {
    const title = place === NOWHERE ? (level ? `no ${level}` : "the fleet") : `${level} ${place}`;
    updateZone(node, title, byPlace.get(place), { level, scale, cacheScale, hasModels: fleet.models.length > 1 });
  });
  setShown(document.getElementById("fleet-empty"), fleet.workers.length === 0);
  if (openedId !== null) showWorker();
}

function makeZone() {
  const node = el("article", { class: "zone" });
  node.parts = { title: el("h3"), trouble: el("span", { class: "trouble" }), sums: el("span", { class: "soft" }) };
  node.groups = new Map();
  node.body = el("div");
  node.append(el("div", { class: "head" }, ...Object.values(node.parts)), node.body);
  return node;
}

function updateZone(node, title, readings, view) {
  const ill = readings.filter((reading) => reading.trouble).length;
  const total = sumOf(readings, (reading) => reading.total);
  setText(node.parts.title, title);
  setText(node.parts.trouble, ill ? `${ill} of ${readings.length} need attention` : "");
  const held = sumOf(readings, (reading) => reading.held);
  const load = total ? `${percent(sumOf(readings, (reading) => reading.active) / total)} in use, ` : "";
  setText(node.parts.sums, `${load}${count(held)} blocks cached`);
  const groups = new Map();
  for (const reading of readings) {
    const { role, model } = reading.worker;
    const key = view.hasModels ? `${role} ${model}` : role;
    if (!groups.has(key)) groups.set(key, { key, role, model: view.hasModels ? model : "", readings: [] });
    groups.get(key).readings.push(reading);
  }
  const ordered = [...groups.values()].sort(
    (one, other) => one.model.localeCompare(other.model) || ROLES.indexOf(one.role) - ROLES.indexOf(other.role));
  reconcile(node.body, node.groups, ordered, (group) => group.key, (group) => makeGroup(group, title),
    (groupNode, group) => updateGroup(groupNode, group, view));
}

function makeGroup(group, place) {
  const node = el("div", { class: group.role });
  const list = el("ul", { class: "workers", "aria-label": `${group.role} workers, ${place}` });
  const all = el("button", { type: "button", hidden: true, onclick: () => toggleAll(node) });
  node.parts = { count: el("span"), all, list };
  node.workers = new Map();
  node.key = `${place} ${group.key}`;
  list.addEventListener("keydown", moveFocus);
  node.append(el("p", { class: "role" }, el("b", {}, group.role === "both" ? "prefill + decode" : group.role),
    group.model ? el("span", {}, group.model) : null, node.parts.count, all), list);
  return node;
}

function toggleAll(node) {
  if (!groupsAll.delete(node.key)) groupsAll.add(node.key);
  showFleet(latest);
}

function updateGroup(node, group, view) {
  const { readings } = group;
  const isAll = groupsAll.has(node.key);
  // workers with problems come first, so that all of them are shown
  const ordered = [...readings.filter((reading) => reading.trouble), ...readings.filter((reading) => !reading.trouble)];
  const shown = readings.length <= SHOWN_MAX ? readings : isAll ? ordered : ordered.slice(0, SHOWN_MAX);
  setText(node.parts.count, plural(readings.length, "worker"));
  setText(node.parts.all, isAll ? `Show ${SHOWN_MAX}` : `Show all ${readings.length}`);
  setShown(node.parts.all, readings.length > SHOWN_MAX);
  setClass(node.parts.list, "many", readings.length > COMPACT_FROM);
  reconcile(node.parts.list, node.workers, shown, (reading) => String(reading.worker.worker_id), makeWorker,
    (item, reading) => updateWorker(item, reading, view));
  // the arrow keys move within a group: 1,000 workers must not be 1,000 tab stops
  const stops = [...node.parts.list.querySelectorAll("button")];
  if (stops.length && !stops.some((stop) => stop.tabIndex === 0)) stops[0].tabIndex = 0;
}

function meter(kind) {
  const node = el("span", { class: `meter ${kind}` }, el("i"), el("span"));
  return { node, share: node.firstChild, text: node.lastChild };
}

function makeWorker(reading) {
  const load = meter("load");
  const cache = meter("cache");
  const id = el("span", { class: "id" }, `#${reading.worker.worker_id}`);
  const mark = el("span", { class: "mark" });
  const button = el("button", { type: "button", class: "worker", tabindex: "-1", "aria-haspopup": "dialog" },
    el("span", { class: "name" }, id, mark), reading.at ? el("span", { class: "at", title: reading.at }, reading.at) : null, load.node, cache.node);
  button.addEventListener("click", () => openWorker(String(reading.worker.worker_id)));
  const item = el("li", {}, button);
  item.parts = { button, mark, load, cache };
  return item;
}

function updateWorker(item, reading, view) {
  const { button, mark, load, cache } = item.parts;
  const { worker } = reading;
  const isPrefill = worker.role === "prefill";
  const others = Object.entries(worker.domains).filter(([name]) => name !== view.level).map(([, value]) => value);
  const loadText = isPrefill ? `${count(reading.tokens)} tok` : percent(reading.load);
  const of = reading.total ? ` of ${count(reading.total)}` : "";
  const cacheText = reading.feeds || reading.held ? `${count(reading.held ?? 0)}${of}` : "no feed";
  const running = sumOf(worker.ranks, (rank) => rank.report?.running_requests);
  setText(mark, reading.trouble || [others.at(-1), running ? `${whole(running)} running` : null].filter(Boolean).join(" · "));
  setClass(button, "ill", reading.trouble !== "");
  setShare(load.share, isPrefill ? reading.tokens / view.scale : reading.load);
  setText(load.text, loadText);
  setShare(cache.share, reading.cache / view.cacheScale);
  setText(cache.text, cacheText);
  const label = `Worker ${worker.worker_id}, ${worker.role}, ${reading.trouble || "well"}, load ${loadText}, cache ${cacheText} blocks`;
  if (button.getAttribute("aria-label") !== label) button.setAttribute("aria-label", label);
}

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

function moveFocus(event) {
  const stops = [...event.currentTarget.querySelectorAll("button")];
  const at = stops.indexOf(document.activeElement);
  let to = at + (STEPS[event.key] ?? 0);
  if (event.key === "Home") to = 0;
  if (event.key === "End") to = stops.length - 1;
  if (at < 0 || to === at || to < 0 || to >= stops.length) return;
  event.preventDefault();
  stops[at].tabIndex = -1;
  stops[to].tabIndex = 0;
  stops[to].focus();
}

// One worker

function openWorker(id) {
  openedId = id;
  showWorker();
  dialog.showModal();
}

dialog.addEventListener("close", () => (openedId = null));
document.getElementById("worker-close").addEventListener("click", () => dialog.close());
grouping.addEventListener("change", () => showFleet(latest));

function showWorker() {
  const worker = latest.workers.find((each) => String(each.worker_id) === openedId);
  setText(document.getElementById("worker-title"), `Worker ${openedId}`);
  const body = document.getElementById("worker-body");
  if (worker === undefined) {
    showIfChanged(body, "left", () => [el("p", { class: "warning" }, "This worker has left the fleet.")]);
    return;
  }
  const details = {
    role: worker.role,
    state: trouble(worker) || "well",
    ...(worker.cordons.length ? { cordoned: worker.cordons.map(cordonText).join("; ") } : {}),
    circuit: worker.circuit.replace("_", " "),
    model: worker.model,
    engine: [worker.engine, worker.engine_url].filter(Boolean).join(" at ") || UNKNOWN,
    place: Object.entries(worker.domains).map(([name, value]) => `${name} ${value}`).join(", ") || UNKNOWN,
    "KV transfer": policyText(worker.kv_transfer),
    "KV format": Object.entries(worker.kv_format).map(([part, value]) => `${part} ${value}`).join(", ") || UNKNOWN,
    ...(worker.kv_partners === null ? {} : { "ranks to pair with": whole(worker.kv_partners) }),
    "KV events over": worker.event_lane ?? "none",
    taints: worker.taints.join(", ") || "none",
    pod: worker.pod ?? UNKNOWN,
    node: worker.node ?? UNKNOWN,
    address: worker.address,
  };
  const rows = worker.ranks.map((rank) => ({ cells: [
    String(rank.dp_rank), rank.feed?.state.replace("_", " ") ?? "none", whole(rank.active_blocks), whole(rank.report?.active_blocks),
    whole(rank.total_blocks), whole(rank.prefill_tokens), whole(rank.report?.running_requests),
    whole(rank.report?.waiting_requests), whole(rank.index_blocks),
    rank.speed ? `× ${short(rank.speed.slowness)}` : UNKNOWN, rank.kv_transfers ? bytes(rank.kv_transfers.bytes) : UNKNOWN,
  ] }));
  showIfChanged(body, [details, rows], () => {
    const list = el("dl", { class: "facts" });
    for (const [name, value] of Object.entries(details)) list.append(el("div", {}, el("dt", {}, name), el("dd", {}, value)));
    return [list, longTable("Ranks", null, RANK_COLUMNS, rows)];
  });
}

function cordonText(cordon) {
  const { level, name, reason, by, at, cluster } = cordon;
  const notes = [reason, by && `by ${by}`, at && `since ${at}`, cluster && `in cluster ${cluster}`].filter(Boolean);
  return [`${level} ${name}`, ...notes].join(", ");
}

function policyText(policy) {
  if (policy === null) return UNKNOWN;
  const weight = policy.enforcement === "preferred" ? `, weight ${policy.weight}` : "";
  return `${policy.enforcement} within ${policy.domain}${weight}`;
}
