// The form that explains the decision for a prompt: POST /v1/route/explain, which sends and books nothing.
import { el, plural, setClass, whole } from "./dom.js";
import { legTables, places, reasonText } from "./candidates.js";
import { ask } from "./router.js";

const form = document.getElementById("ask-form");
const models = document.getElementById("ask-model");
const answerNode = document.getElementById("answer");
const verdictNode = document.getElementById("verdict");
const tablesNode = document.getElementById("answer-tables");
let modelsShown = "";
let asked = 0;

export function showModels(names) {
  const state = names.join("\n");
  if (state === modelsShown) return;
  modelsShown = state;
  const chosen = models.value;
  models.replaceChildren(...names.map((name) => el("option", { value: name }, name)));
  if (names.includes(chosen)) models.value = chosen;
}

form.addEventListener("submit", (event) => {
  event.preventDefault();
  explain();
});

document.getElementById("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) form.requestSubmit();
});

function body() {
  const text = document.getElementById("prompt").value;
  const taints = document.getElementById("ask-taints").value.split(/[\s,]+/).filter(Boolean);
  const prompt = document.getElementById("ask-kind").value === "chat" ? { messages: [{ role: "user", content: text }] } : { prompt: text };
  const nvext = taints.length ? { nvext: { routing_constraints: { required_taints: taints } } } : {};
  return { model: models.value, ...prompt, ...nvext };
}

async function explain() {
  const number = (asked += 1);
  answerNode.setAttribute("aria-busy", "true");
  let found;
  try {
    found = answer(await ask("v1/route/explain", body()));
  } catch (error) {
    found = { isRefused: true, verdict: [error.message], tables: [] };
  }
  if (number !== asked) return; // a later request is under way
  verdictNode.replaceChildren(...found.verdict);
  setClass(verdictNode, "refused", found.isRefused);
  tablesNode.replaceChildren(...found.tables);
  answerNode.removeAttribute("aria-busy");
}

function chosenText(leg) {
  const row = leg.candidates.find((each) => each.chosen);
  if (row === undefined) return "nobody";
  const where = places(row.domains);
  return `worker ${row.worker_id}${row.dp_rank ? `, rank ${row.dp_rank}` : ""}${where ? ` (${where})` : ""}`;
}

function expectedText(legs) {
  const rows = legs.flatMap((leg) => leg.candidates.filter((row) => row.chosen));
  if (rows.length === 0 || rows.some((row) => row.times === null)) return "";
  const ms = rows.reduce((sum, row) => sum + row.times.expected_ms, 0);
  return ` First token expected after ${ms.toFixed(ms < 10 ? 1 : 0)} ms.`;
}

function answer(explained) {
  const { prefill, decode, local_prefill: local, constraint, error } = explained;
  const size = `${plural(explained.isl_tokens, "token")}, ${plural(explained.blocks, "block")}.`;
  const tables = legTables(explained, explained.mode);
  if (error !== null) {
    const reasons = Object.entries(error.refusals).map(([reason, n]) => `${whole(n)} ${reasonText(reason)} (${reason})`);
    const more = reasons.length ? ` Worker ranks refused: ${reasons.join("; ")}.` : "";
    return { isRefused: true, verdict: [el("b", {}, "Nowhere. "), `${error.message}.${more} ${size}`], tables };
  }
  const isLocal = local !== null && local.chosen !== null;
  const legs = isLocal ? [local] : [prefill, decode].filter((leg) => leg !== null);
  const goesTo = legs.length === 1 ? chosenText(legs[0])
    : `${chosenText(prefill)} to prefill, then ${chosenText(decode)} to decode`;
  const held = constraint === null ? "" : ` KV is ${constraint.enforcement} in ${constraint.domain} ${constraint.value}.`;
  const fallback = explained.fallback_used ? " It falls back: no decode worker of the domain can take it." : "";
  const verdict = ["To ", el("b", {}, goesTo), `.${expectedText(legs)}${held}${fallback} ${size}`];
  return { isRefused: false, verdict, tables };
}
