// Polls the router for its state and shows it; pauses while the page is hidden.
import { showModels } from "./ask.js";
import { decisionsShown, onMoreDecisions, showDecisions } from "./decisions.js";
import { bytes, count, el, percent, setClass, setShown, setText, sumOf, time, UNKNOWN, whole } from "./dom.js";
import { showEngines } from "./engines.js";
import { placeOf, showFleet } from "./fleet.js";
import { ask, Refused, token, Unreachable, useToken } from "./router.js";
import { showServing } from "./serving.js";
import { costText, isCrossing, showFlows, showLinks, showRefusals } from "./traffic.js";

const PAUSE_MS = 1000; // between an answer and the next request
const PAUSE_SHARE = 10; // or this many times the duration of the answer, for large fleets

const dot = document.getElementById("state-dot");
const state = document.getElementById("state");
const updated = document.getElementById("updated");
const tokenForm = document.getElementById("token-form");
const tokenButton = document.getElementById("token-button");
const totals = new Map();
let lostSince = null;
let wake = () => {};

// The state of the page

function showState(kind, text) {
  for (const each of ["live", "lost", "closed"]) setClass(dot, each, each === kind);
  setText(state, text);
  document.body.dataset.state = kind;
}

function showWarning(text) {
  const node = document.getElementById("warning");
  setText(node, text);
  setShown(node, text !== "");
}

function showTokenForm(isShown) {
  setShown(tokenForm, isShown);
  tokenButton.setAttribute("aria-expanded", String(isShown));
}

tokenButton.addEventListener("click", () => {
  showTokenForm(tokenForm.hidden);
  if (!tokenForm.hidden) document.getElementById("token").focus();
});

tokenForm.addEventListener("submit", (event) => {
  event.preventDefault();
  useToken(document.getElementById("token").value.trim());
  showTokenForm(false);
  tokenButton.focus();
  wake();
});

function failed(error) {
  if (!(error instanceof Refused || error instanceof Unreachable)) {
    showState("lost", "This page failed");
    showWarning(`A mistake of this page: ${error.message}`);
    console.error(error);
    return;
  }
  if (error instanceof Refused && error.status === 401) {
    lostSince = null;
    showState("closed", "Needs the admin token");
    showWarning(token() ? `The router refuses the token that was entered: ${error.message}` : `This page needs the admin token: ${error.message}`);
    showTokenForm(true);
    return;
  }
  lostSince ??= new Date();
  showState("lost", `Not reachable since ${time(lostSince)}`);
  const why = error instanceof Refused ? `The router answers ${error.status}: ${error.message}.` : "The router does not answer.";
  showWarning(`${why} What stands below is from before; the page goes on asking.`);
}

// Rendering

function total(name, value, more) {
  let node = totals.get(name);
  if (node === undefined) {
    node = el("div", {}, el("dt", {}, name), el("dd"), el("dd", { class: "more" }));
    totals.set(name, node);
    document.getElementById("totals").append(node);
  }
  setText(node.children[1], value);
  setText(node.children[2], more);
}

function showTotals(fleet, flows) {
  const { workers, models } = fleet;
  const able = workers.filter((worker) => worker.alive && !worker.draining && !worker.engine_silent && !worker.cordons.length).length;
  const ranks = workers.flatMap((worker) => worker.ranks);
  const blocks = sumOf(ranks, (rank) => rank.total_blocks);
  const active = sumOf(ranks, (rank) => Math.max(rank.active_blocks, rank.report?.active_blocks ?? 0));
  const indexed = models.filter((model) => model.index !== null);
  const handoffs = sumOf(flows, (flow) => flow.handoffs);
  const crossing = sumOf(flows.filter(isCrossing), (flow) => flow.handoffs);
  const costs = flows.map((flow) => flow.cost).filter((cost) => cost !== null);
  total("Workers", whole(workers.length), `${whole(able)} take requests`);
  total("Running requests", whole(fleet.running_requests), `${whole(sumOf(models, (model) => model.waiting_requests))} wait for a worker`);
  total("KV memory in use", blocks ? percent(active / blocks) : UNKNOWN, `${count(active)} of ${count(blocks)} blocks`);
  total("Index", indexed.length ? count(sumOf(indexed, (model) => sumOf(Object.values(model.index.blocks), (n) => n))) : UNKNOWN,
    indexed.length ? `blocks, in ${bytes(sumOf(indexed, (model) => model.index.bytes))}` : "no index is kept");
  if (handoffs) {
    total("KV moving now", `${bytes(sumOf(flows, (flow) => flow.bytes_per_s))}/s`, `${bytes(sumOf(flows, (flow) => flow.bytes))} since the start`);
    total("Handoffs", whole(handoffs), `${whole(crossing)} crossed their domain`);
  }
  if (costs.length) total("Cost of KV", costText(sumOf(costs, (cost) => cost)), "in the fleet file's currency");
}

function warningOf(fleet) {
  if (fleet.draining) return "This router is draining: it takes no new requests.";
  if (!fleet.discovery.reachable) return `Discovery is not reachable, so the fleet is frozen: ${fleet.discovery.why}`;
  return "";
}

function show(fleet, decisions, { flows, ...rest }, refusals) {
  const byId = new Map(fleet.workers.map((worker) => [worker.worker_id, worker]));
  showEngines(fleet);
  showServing(fleet);
  showTotals(fleet, flows);
  showFleet(fleet);
  showDecisions(decisions, (id) => placeOf(byId.get(id)));
  showFlows({ flows, ...rest });
  showLinks(fleet.models);
  showRefusals(refusals);
  showModels(fleet.models.map((model) => model.model));
  showWarning(warningOf(fleet));
}

// Polling

async function askAll() {
  const answers = await Promise.all([
    ask("v1/fleet"), ask(`v1/decisions?limit=${decisionsShown()}`), ask("v1/flows"), ask("v1/refusals"),
  ]);
  show(...answers);
  lostSince = null;
  if (document.body.dataset.state === "closed") showTokenForm(false);
  showState("live", "Live");
  setText(updated, `at ${time(new Date())}`);
}

function pause(ms) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, ms);
    wake = () => {
      clearTimeout(timer);
      resolve();
    };
  });
}

function visible() {
  return new Promise((resolve) => {
    if (!document.hidden) resolve();
    else document.addEventListener("visibilitychange", resolve, { once: true });
  });
}

async function follow() {
  for (;;) {
    await visible();
    const began = performance.now();
    try {
      await askAll();
    } catch (error) {
      failed(error);
    }
    await pause(Math.max(PAUSE_MS, PAUSE_SHARE * (performance.now() - began)));
  }
}

onMoreDecisions(() => wake());
follow();
