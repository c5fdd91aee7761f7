// What does the page do? It asks the server every two seconds how things stand, and talks to it.
// Keeps the key in this tab alone. Charts are a few lines of SVG, so nothing is loaded from elsewhere.

import { chat } from "/ui/chat.js";
import { element, duration, size, count } from "/ui/shown.js";
import { Samples } from "/ui/samples.js";

const EVERY_MS = 2000, HISTORY = 60;
const TIERS = ["device", "host", "disk"];
const USES = ["entries", "rows", "fenced", "free"];
const by = (id) => document.getElementById(id);
const history = {};
let last = null;

const key = by("key");
key.value = sessionStorage.getItem("key") ?? "";
key.addEventListener("change", () => { sessionStorage.setItem("key", key.value); look(); });
by("key-form").addEventListener("submit", (event) => { event.preventDefault(); key.blur(); });

export function headers() {
  return key.value ? { Authorization: `Bearer ${key.value}` } : {};
}

async function get(path) {
  const answer = await fetch(path, { headers: headers() });
  if (!answer.ok) throw new Error(answer.status === 401 ? "a key is needed" : `HTTP ${answer.status}`);
  return answer;
}

async function look() {
  try {
    const [metrics, state, models] = await Promise.all([
      get("/metrics").then((a) => a.text()), get("/ui/state").then((a) => a.json()),
      get("/v1/models").then((a) => a.json()),
    ]);
    by("model").textContent = models.data[0]?.id ?? "";
    const now = new Samples(metrics);
    showCards(now, last ?? now);
    showMemory(now);
    showEvictions(now, state.evictions);
    showTree(state);
    last = now;
    status("ready", false);
  } catch (error) {
    status(error instanceof TypeError ? "no answer" : error.message, true);
  }
}

function status(text, bad) {
  by("status").textContent = text;
  by("status").classList.toggle("bad", bad);
}

function showCards(now, before) {
  const running = now.value("strata_requests", { state: "running" });
  const waiting = now.value("strata_requests", { state: "waiting" }) + now.value("strata_requests", { state: "preempted" });
  const asked = now.grown(before, "strata_lookup_tokens_total");
  const share = (n, of) => (of > 0 ? n / of : null);
  const all = share(now.sum("strata_reused_tokens_total"), now.sum("strata_lookup_tokens_total"));
  const percent = (x) => (x === null ? "–" : `${Math.round(100 * x)} %`);
  const first = now.quantile(before, "strata_time_to_first_token_seconds", 0.5);
  const gap = now.quantile(before, "strata_inter_token_latency_seconds", 0.5);
  by("cards").replaceChildren(
    card("hit-share", "prompt tokens reused", percent(all), "since the start",
      share(now.grown(before, "strata_reused_tokens_total"), asked), 1),
    card("first-token", "first token (median)", duration(first ?? now.quantile(null, "strata_time_to_first_token_seconds", 0.5)), "", first),
    card("token-time", "time a token (median)", duration(gap ?? now.quantile(null, "strata_inter_token_latency_seconds", 0.5)), "", gap),
    card("running", "running", count(running), `of ${count(now.value("strata_rows_capacity"))}`, running),
    card("waiting", "waiting", count(waiting), "", waiting),
    card("generated", "tokens generated", count(now.value("strata_generated_tokens_total")), "",
      now.grown(before, "strata_generated_tokens_total")),
  );
}

function card(id, name, value, note, point, top) {
  const line = (history[id] ??= []);
  line.push(point ?? null);
  if (line.length > HISTORY) line.shift();
  const made = element("div", "card", element("small", "", name), element("b", "", value), sparkline(line, top));
  made.id = `card-${id}`;
  if (note) made.append(element("small", "", note));
  return made;
}

function sparkline(values, top) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  svg.setAttribute("viewBox", `0 0 ${HISTORY} 20`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("aria-hidden", "true");
  const most = top ?? Math.max(...values.map((v) => v ?? 0), 1e-9);
  const path = document.createElementNS(svg.namespaceURI, "path");
  let drawn = "";
  values.forEach((v, i) => {
    if (v === null) return;
    const x = HISTORY - values.length + i, y = 19 - 18 * Math.min(v / most, 1);
    drawn += `${i && values[i - 1] !== null ? "L" : "M"}${x},${y.toFixed(1)}h.6`;
  });
  for (const [name, value] of Object.entries({ d: drawn, fill: "none", stroke: "currentColor", "stroke-width": 1.2, "vector-effect": "non-scaling-stroke" })) {
    path.setAttribute(name, value);
  }
  svg.append(path);
  return svg;
}

function bar(parts, whole, label) {
  const made = element("div", "bar");
  made.setAttribute("role", "img");
  made.setAttribute("aria-label", label);
  for (const [name, n] of parts) {
    const part = element("span", name);
    part.style.width = whole > 0 ? `${(100 * n) / whole}%` : "0";
    part.title = `${name}: ${count(n)}`;
    made.append(part);
  }
  return made;
}

function showMemory(now) {
  const pages = USES.map((use) => [use, now.value("strata_pages", { use })]);
  const capacity = now.value("strata_pages_capacity");
  const said = pages.map(([use, n]) => `${use} ${count(n)}`).join(", ");
  const lines = [element("div", "memory-line", `device pages: ${said} of ${count(capacity)}`, bar(pages, capacity, said))];
  lines[0].id = "memory-pages";
  for (const tier of TIERS) {
    const [configured, reserved, resident] = ["configured", "reserved", "resident"].map((kind) => now.value("strata_tier_bytes", { tier, kind }));
    if (!configured) continue;
    const text = `${tier}: ${size(resident)} can be read, ${size(reserved - resident)} on the way, of ${size(configured)}`;
    const made = element("div", "memory-line", text, bar([[tier, resident], ["reserved", Math.max(0, reserved - resident)]], configured, text));
    made.id = `memory-${tier}`;
    lines.push(made);
  }
  by("memory").replaceChildren(...lines);
  const names = ["entries", "rows", "fenced", "host", "disk", "computed", "generated"];
  by("legend").replaceChildren(...names.flatMap((name) => [element("i", name), name === "entries" ? "device (entries)" : name]));
}

function showEvictions(now, latest) {
  const rows = now.all("strata_evictions_total").filter(([, n]) => n > 0).sort((a, b) => b[1] - a[1]);
  by("eviction-counts").tBodies[0].replaceChildren(...rows.map(([labels, n]) => element("tr", "",
    element("td", "", labels.tier), element("td", "", `for ${labels.cause}`), element("td", "", count(n)))));
  const lines = (latest ?? []).map((e) => element("li", "", `${duration(e.ago_s)} ago from ${e.tier}, for ${e.cause}`));
  by("evictions").replaceChildren(...(lines.length ? lines : [element("li", "", latest ? "none" : "not shown where keys are isolated")]));
}

function showTree(state) {
  if (state.tree === null) {
    by("tree").textContent = "Not shown where keys are isolated.";
    return;
  }
  const children = Map.groupBy ? Map.groupBy(state.tree, (b) => b.parent) : grouped(state.tree);
  const longest = Math.max(...state.tree.map((b) => b.end_tokens), 1);
  const lines = [];
  const add = (branch) => {
    lines.push(branchLine(branch, longest));
    (children.get(branch.id) ?? []).forEach(add);
  };
  (children.get(null) ?? []).sort((a, b) => (a.last_use_ago_s ?? 1e9) - (b.last_use_ago_s ?? 1e9)).forEach(add);
  if (!lines.length) lines.push(element("p", "note", "Nothing yet."));
  if (!state.tree_is_whole) lines.push(element("p", "note", "There is more than is shown here."));
  by("tree").replaceChildren(...lines);
}

function grouped(branches) {
  const groups = new Map();
  for (const branch of branches) groups.set(branch.parent, [...(groups.get(branch.parent) ?? []), branch]);
  return groups;
}

function branchLine(branch, longest) {
  const length = branch.end_tokens - branch.start_tokens;
  const where = TIERS.filter((tier) => branch.tokens_in[tier]).map((tier) => `${tier} ${count(branch.tokens_in[tier])}`).join(", ");
  // A page may lie in several tiers: the nearest one is where a request would take it from.
  let left = length;
  const parts = TIERS.map((tier) => { const n = Math.min(branch.tokens_in[tier], left); left -= n; return [tier, n]; });
  const shown = bar(parts, length, where);
  shown.style.marginLeft = `${(100 * branch.start_tokens) / longest}%`;
  shown.style.width = `${Math.max(1, (100 * length) / longest)}%`;
  for (const row of branch.rows) {
    const tick = element("i", "tick");
    tick.style.left = `calc(${(100 * (row.end_tokens - branch.start_tokens)) / length}% - 2px)`;
    tick.title = `state at ${row.end_tokens} in ${row.in.join(", ")}`;
    shown.append(tick);
  }
  const used = branch.last_use_ago_s === null ? "" : `, used ${duration(branch.last_use_ago_s)} ago`;
  return element("div", "branch", shown, element("span", "what", `${count(branch.start_tokens)} to ${count(branch.end_tokens)}: ${where || "nowhere"}${used}`));
}

chat(headers, look);
look();
setInterval(() => { if (!document.hidden) look(); }, EVERY_MS);
