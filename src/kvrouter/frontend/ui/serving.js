// What requests get: hit rates, times to the first token, requests, tokens and errors; of all models and of each.
import { duration, el, hitRate, longTable, setClass, setPart, setShown, setText, short, showIfChanged, UNKNOWN, whole } from "./dom.js";

const cardsNode = document.getElementById("serving-totals");
const modelTable = document.getElementById("model-table");
const cards = new Map();

const COLUMNS = [["model", true], ["hit rate, engines"], ["expected"], ["TTFT p50"], ["p99"], ["requests/s"], ["answer tokens/s"], ["prompt tokens/s"],
  ["errors"], ["requests since the start"]];

// A short text that no line break divides.
const unbroken = (text) => (text.length <= 20 ? text.replaceAll(" ", "\u00a0") : text);

function card(name, { title = name, value, more, isBad = false }) {
  let node = cards.get(name);
  if (node === undefined) {
    node = el("div", {}, el("dt"), el("dd"), el("dd", { class: "more" }));
    cards.set(name, node);
    cardsNode.append(node);
  }
  setText(node.children[0], title);
  setText(node.children[1], value);
  setText(node.children[2], more.filter(Boolean).map(unbroken).join(" · "));
  setClass(node, "bad", isBad);
}

const rateOf = (hits) => hitRate(hits.cached_tokens, hits.prompt_tokens);

const aSecond = (n, served) => short(served.window_s ? n / served.window_s : 0);

const windowsOf = (stats) => [stats.last_minute, stats.last_5_minutes, stats.since_start];

// How long a window is: as long as its name says, or as the router has run, or as its record of requests reaches.
function spanText(served) {
  const seconds = Math.round(served.window_s);
  if (seconds >= 120) return `last ${whole(Math.round(seconds / 60))} min`;
  return `last ${whole(seconds)} s`;
}

function hitCard(served, total) {
  const isCounted = served.reported.requests > 0 || total.reported.requests > 0;
  const [title, hits, since] = isCounted ? ["Cache hit rate, as engines count", served.reported, total.reported]
    : ["Cache hit rate, as the router expects", served.predicted, total.predicted];
  const partly = served.first_tokens - served.reported.requests;
  card("hits", { title, value: rateOf(hits), more: [
    isCounted ? `router expected ${rateOf(served.predicted)}` : total.first_tokens ? "engines do not count theirs" : "no request yet",
    isCounted && partly > 0 ? `counted in ${whole(served.reported.requests)} of ${whole(served.first_tokens)} answers` : null,
    spanText(served), since.requests ? `${rateOf(since)} since the start` : null,
  ] });
}

// Both percentiles, with one unit where it is the same.
function percentilesText(served) {
  const [p50, p99] = [duration(served.ttft_p50_s), duration(served.ttft_p99_s)];
  const unit = p99.replace(/^[\d.,]+/, "");
  if (p50 === UNKNOWN) return UNKNOWN;
  return `${p50.endsWith(unit) ? p50.slice(0, -unit.length) : p50} / ${p99}`;
}

function showCards(stats) {
  const [minute, served, total] = windowsOf(stats);
  hitCard(served, total);
  card("TTFT p50 / p99", { value: percentilesText(served),
    more: [`of ${whole(served.first_tokens)} first tokens`, spanText(served)] });
  card("Requests a second", { value: aSecond(minute.requests, minute), more: [spanText(minute), `${whole(total.requests)} since the start`] });
  card("Tokens a second", { value: aSecond(minute.completion_tokens, minute),
    more: [`of answers, and ${aSecond(minute.prompt_tokens, minute)} of prompts`, spanText(minute)] });
  card("Errors", { value: whole(served.errors), isBad: served.errors > 0,
    more: [`of ${whole(served.requests)} requests`, spanText(served), `${whole(total.errors)} of ${whole(total.requests)} since the start`] });
}

function modelRow(model, stats) {
  const [minute, served, total] = windowsOf(stats);
  return { cells: [model, rateOf(served.reported), rateOf(served.predicted), duration(served.ttft_p50_s), duration(served.ttft_p99_s),
    aSecond(minute.requests, minute), aSecond(minute.completion_tokens, minute), aSecond(minute.prompt_tokens, minute),
    `${whole(served.errors)} of ${whole(served.requests)}`, whole(total.requests)] };
}

export function showServing(fleet) {
  const stats = fleet.request_stats;
  setPart("serving", stats !== null);
  if (stats === null) return; // a standalone router decides, and serves no call
  showCards(stats);
  const isMany = fleet.models.length > 1;
  setShown(modelTable, isMany);
  if (!isMany) return;
  const rows = fleet.models.map(({ model, request_stats: each }) =>
    (each === null ? { cells: [model, ...COLUMNS.slice(1).map(() => UNKNOWN)] } : modelRow(model, each)));
  showIfChanged(modelTable, rows, () => [longTable("models", null, COLUMNS, rows)]);
}
