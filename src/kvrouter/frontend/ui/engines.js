// Engines that are awaited or refused, and announced workers that cannot be routed to: where, since when, and why.
import { el, plural, setShown, setText, showIfChanged, time } from "./dom.js";

const part = document.getElementById("engines");
const list = document.getElementById("engine-list");

function engineItem(engine) {
  const where = engine.engine_url || engine.written_at || "an engine";
  const about = [engine.kind, engine.role, engine.model, engine.pod && `pod ${engine.pod}`,
    engine.engine_url && engine.written_at ? engine.written_at : null].filter(Boolean).join(" · ");
  const since = engine.since_s === null ? "" : ` since ${time(new Date(1000 * engine.since_s))}`;
  return { where, state: `${engine.state}${since}`, about, reason: engine.reason ?? "no reason is known" };
}

function refusedItem(refused) {
  const about = [refused.engine, refused.role, refused.model, refused.pod && `pod ${refused.pod}`].filter(Boolean).join(" · ");
  const field = refused.field ? `${refused.field}: ` : "";
  return { where: refused.address, state: `worker ${refused.worker_id} refused`, about, reason: refused.why.startsWith(field) ? refused.why : field + refused.why };
}

export function showEngines(fleet) {
  const engines = (fleet.expected_engines ?? []).filter((engine) => engine.state !== "joined" || engine.reason !== null);
  const items = [...engines.map(engineItem), ...(fleet.refused_workers ?? []).map(refusedItem)];
  setShown(part, items.length > 0);
  const awaited = engines.filter((engine) => engine.state !== "joined").length;
  const expected = fleet.expected_engines?.length ?? 0;
  setText(document.getElementById("engines-title"), awaited ? `${expected - awaited} of ${plural(expected, "engine")} joined`
    : `${plural(items.length, "engine")} to look at`);
  showIfChanged(list, items, () => items.map(({ where, state, about, reason }) =>
    el("li", {}, el("p", {}, el("b", {}, where), " ", el("span", { class: "trouble" }, state), " ", el("span", { class: "soft" }, about)), el("p", {}, reason))));
}
