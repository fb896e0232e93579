// Asks the server for its state every two seconds while the tab is seen, and shows it.

import { chart, drawing, element, hitRate, level, samples, tokensPerSecond } from "./charts.js";

const EVERY_MS = 2000;
const LOOKUPS = { hit: "hit", absent: "stored now", expired: "expired", lost: "evicted", unmarked: "nothing to cache", refused: "cannot be reused" };
const ENDS = {
  eos: "end of turn", length: "length limit", stop: "stop sequence", read: "prompt read", cancelled: "client left", failed: "failed", late: "timed out",
};
const STAGES = { reading: "being read", queue: "waiting", prefill: "prefill", decode: "decoding" };
const PERCENTILES = [["median", "p50", 1], ["p95", "p95", 20], ["p99", "p99", 100]];  // heading, field, replies that it needs
const phone = matchMedia("(max-width: 999px)");
const $ = (id) => document.getElementById(id);
const count = (value) => value.toLocaleString("en");
const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(part && part < whole / 10 ? 1 : 0)} %` : "–");
const plural = (number, name) => `${count(number)} ${name}${number === 1 ? "" : "s"}`;
const sum = (values) => values.reduce((total, value) => total + value, 0);
const key = { get: () => sessionStorage.getItem("kvfold-key"), set: (value) => sessionStorage.setItem("kvfold-key", value) };
let timer = null, chosen = null, drawn = null, kept = null, last = null, is_long = false;

function bytes(value) {
  if (value === null) return "–";
  const step = Math.min(Math.floor(Math.log10(Math.max(value, 1)) / 3), 4);
  return `${(value / 1000 ** step).toFixed(step && value < 100 * 1000 ** step ? 1 : 0)} ${["B", "kB", "MB", "GB", "TB"][step]}`;
}

function time(ms) {
  if (ms === undefined || ms === null) return "–";
  return ms < 10 ? `${ms.toFixed(1)} ms` : ms < 1000 ? `${ms.toFixed(0)} ms` : `${(ms / 1000).toFixed(ms < 1e4 ? 2 : 1)} s`;
}

function dollars(value) {
  const digits = Math.abs(value) < 0.995 ? 4 : 2;
  return `${value < 0 ? "−" : ""}$${Math.abs(value).toFixed(digits)}`;
}

// Asking

async function ask(path) {
  const headers = key.get() ? { "x-api-key": key.get() } : {};
  const answer = await fetch(path, { headers, cache: "no-store" });
  return { status: answer.status, found: answer.ok ? await answer.json() : null };
}

async function poll() {
  clearTimeout(timer);
  try {
    const { status, found } = await ask("dashboard/state");
    if (status === 401) return login();
    if (found === null) throw new Error(`status ${status}`);
    show(found);
    say("live", "live");
  } catch (error) {
    say("lost", "no answer, trying again");
  }
  clearTimeout(timer);
  if (!document.hidden) timer = setTimeout(poll, EVERY_MS);
}

function say(kind, text) {
  $("state").className = kind;
  $("state").textContent = text;
}

function login() {
  $("login").hidden = false;
  $("board").hidden = true;
  $("refused").textContent = key.get() ? "This key is not known here." : "";
  say("", "needs a key");
  $("key").focus();
}

// Showing

function show(state) {
  last = state;
  $("login").hidden = true;
  $("board").hidden = false;
  tiles(state);
  charts(state.history);
  times(state);
  lookups(state);
  const { bytes: held, limit_bytes: limit } = state.arena;
  $("arena").replaceChildren(bar(`KV cache: ${bytes(held)} of ${bytes(limit)}`, [["heat", limit ? held / limit : 0]]));
  $("tiers").replaceChildren(...state.tiers.map((tier) => element("tr", {}, element("th", {}, tier.name),
    ...[bytes(tier.bytes), count(tier.hits)].map((text) => element("td", {}, text)))));
  rows(state);
}

function tiles(state) {
  const { tokens, lookups, usd, tenant } = state, looked = numLooked(lookups);
  const texts = {
    model: state.model, policy: state.policy, version: state.version, tenant: tenant === "default" ? "" : `tenant ${tenant}`,
    running: count(state.running), waiting: `${count(state.waiting)} waiting`,
    done: count(state.done), failed: `${count(state.refused)} without a reply`,
    "hit-rate": percent(lookups.hit ?? 0, looked), hits: `${count(lookups.hit ?? 0)} of ${plural(looked, "lookup")}`,
    reused: count(tokens.reused), "reused-share": `${percent(tokens.reused, tokens.input)} of prompt tokens`,
    written: count(tokens.output), read: `${plural(tokens.input, "prompt token")}`,
    saved: usd ? dollars(usd.saved) : "", cost: usd ? `${dollars(usd.cost)} spent` : "",
  };
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text;
  $("price").hidden = !usd;
}

function charts(history) {
  const found = samples(history);
  chart($("speed-chart"), "Generated tokens per second", [{ name: "", kind: "heat", points: tokensPerSecond(found) }],
    { text: (value) => (value < 10 ? value.toFixed(1).replace(".0", "") : value.toFixed(0)) });
  chart($("hits-chart"), "Hit rate, by the minute", [{ name: "", kind: "good", points: hitRate(found) }],
    { text: (value) => percent(value, 1), top: 1, empty: "no lookup in the last 10 minutes" });
  chart($("load-chart"), "Requests", ["running", "waiting"].map((name, i) => ({ name, kind: i ? "bad" : "heat", points: level(found, name) })), { text: count });
}

function times(state) {
  const replies = state.first_token_ms?.num_samples ?? 0;
  const enough = PERCENTILES.filter(([, , least]) => replies >= least);
  // With fewer than 100 replies p99 is the slowest of them.
  const columns = replies > 1 && replies < 100 ? [...enough, ["slowest", "p99", 2]] : enough;
  const head = $("first-token").closest("table").tHead.rows[0];
  for (let i = 0; i < PERCENTILES.length; i++) {
    const [heading, field, least] = columns[i] ?? ["", "", Infinity];
    head.cells[i + 1].textContent = heading;
    for (const [id, found] of [["first-token", state.first_token_ms], ["each-token", state.token_ms]]) {
      $(id).cells[i + 1].textContent = !heading ? "" : found?.num_samples >= least ? time(found[field]) : "–";
    }
  }
  $("timed").textContent = replies ? `of the latest ${count(replies)} ${replies === 1 ? "reply" : "replies"}` : "no replies yet";
}

const numLooked = (lookups) => sum(Object.values(lookups)) - (lookups.unmarked ?? 0) - (lookups.refused ?? 0);

function lookups(state) {
  const kinds = [["hit", "good"], ["absent", "heat"], ["expired", "soft"], ["lost", "bad"]], found = state.lookups, looked = numLooked(found);
  const parts = kinds.filter(([name]) => name === "hit" || found[name]);
  const legend = element("p", { className: "legend" }, ...parts.map(([name, kind]) => element("span", { className: `key ${kind}` }, `${LOOKUPS[name]} ${count(found[name] ?? 0)}`)));
  $("lookups").replaceChildren(bar("", parts.map(([name, kind]) => [kind, (found[name] ?? 0) / (looked || 1)])), legend);
  const none = found.unmarked ?? 0;
  $("no-reuse").textContent = state.no_reuse ? `Prompts are not cached: ${state.no_reuse}`
    : none ? `${plural(none, "more prompt")} had nothing to cache: no marker, or too short.` : "";
}

// `parts`: kinds and their shares, side by side.
function bar(text, parts) {
  let x = 0;
  const track = drawing("svg", { class: "track", "aria-hidden": "true" }, ...parts.map(([kind, share]) => {
    const part = drawing("rect", { class: kind, x: `${100 * x}%`, width: `${100 * share}%`, height: "100%" });
    x += share;
    return part;
  }));
  return element("div", { className: "bar" }, ...(text ? [element("span", {}, text)] : []), track);
}

// Requests

function rows(state) {
  const { requests } = state, limit = phone.matches ? 5 : 12;
  $("none").hidden = requests.length > 0;
  $("requests").hidden = requests.length === 0;
  $("more").hidden = requests.length <= limit;
  $("more").textContent = is_long ? `Show the latest ${limit} only` : `Show all ${count(requests.length)}`;
  const body = $("requests").tBodies[0], known = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  const mapped = requests.filter((request) => request.kept !== null);
  const shown = mapped.find((request) => request.request === chosen) ?? mapped.find((request) => request.kept < 1) ?? mapped[0];
  body.append(...requests.slice(0, is_long ? requests.length : limit).map((request) => {
    const row = known.get(request.request) ?? newRow(request);
    known.delete(request.request);
    row.setAttribute("aria-selected", request === shown);
    return fill(row, request);
  }));
  for (const row of known.values()) row.remove();
  if (shown) choose(shown, state);
}

function newRow(request) {
  const button = element("button", { type: "button", title: `${request.request}: show the slots kept of its prompt` }, request.request.slice(4, 14));
  button.addEventListener("click", () => { chosen = request.request; rows(last); });
  const row = element("tr", {}, element("td", {}, button));
  row.dataset.id = request.request;
  return row;
}

function fill(row, request) {
  const text = JSON.stringify(request);
  if (row.dataset.shown === text) return row;
  row.dataset.shown = text;
  const is_done = request.now === "done", is_bad = request.status >= 400 || request.end === "failed" || request.end === "late";
  const status = is_done ? `${request.status} ${ENDS[request.end] ?? ""}`.trim() : STAGES[request.now];
  const cells = [
    element("td", {}, new Date(1000 * request.at).toLocaleTimeString()),
    element("td", { className: "path" }, request.path),
    element("td", { className: request.status === 499 || !is_done ? "now" : is_bad ? "bad" : "" }, status),
    ...(request.why ? [element("td", { className: "why", colSpan: 7 }, request.why)] : figures(request, is_done)),
  ];
  row.firstChild.firstChild.disabled = request.kept === null;
  row.replaceChildren(row.firstChild, ...cells);
  return row;
}

function figures(request, is_done) {
  const known = (value) => (value === undefined ? "–" : count(value));
  const found = {
    prompt: known(request.tokens_in), reused: known(request.tokens_reused), kept: request.kept === null ? "–" : percent(request.kept, 1),
    generated: known(request.tokens_out), "first token": time(request.first_token_ms), "each token": time(request.token_ms), cache: LOOKUPS[request.lookup] ?? "–",
  };
  return Object.entries(found).map(([name, text]) => {
    const cell = element("td", { className: text === "–" ? "absent" : name === "cache" && request.lookup === "hit" ? "ok" : "" }, text);
    cell.dataset.name = name;
    return cell;
  });
}

// The map: a column for each layer, a row for each head

async function choose(request, state) {
  $("map-section").hidden = false;
  const is_whole = request.kept >= 1;
  $("map").hidden = $("scale").hidden = is_whole;
  if (is_whole) {
    const why = state.evicts ? "too short to be compressed" : `and ${state.policy} evicts nothing`;
    $("map-about").textContent = `${request.request}: a prompt of ${plural(request.tokens_in, "token")}, ${why}: all of its slots are kept.`;
    drawn = kept = null;
  } else if (request.request !== drawn) {
    drawn = request.request;
    const { found } = await ask(`dashboard/kept/${request.request}`);
    if (found === null || drawn !== found.id) return;
    kept = found;
    draw();
  }
}

function draw() {
  const { id, num_tokens: all, slots } = kept, flat = slots.flat(), least = Math.min(...flat), most = Math.max(...flat);
  const top = [0.0625, 0.125, 0.25, 0.5].find((share) => share * all >= 1.5 * most) ?? 1;  // the darkest shade
  const numHeads = Math.max(...slots.map((heads) => heads.length));
  $("map-about").textContent = `${id}: of a prompt of ${plural(all, "token")} ` + (least === most ? `every KV head keeps ${percent(most, all)}.`
    : `a KV head keeps ${percent(sum(flat), all * flat.length)} on average (${percent(least, all)} to ${percent(most, all)}).`);
  $("most").textContent = `${percent(top, 1)} of the prompt's tokens`;
  const width = Math.max($("map").clientWidth, 200), left = 46, step = (width - left) / slots.length, tall = Math.min(Math.max(step, 16), 26);
  const gap = Math.min(1.5, step / 6), every = Math.ceil(36 / step), below = tall * numHeads + 15;
  const view = drawing("svg", { height: below + 5, role: "img", "aria-label": $("map-about").textContent });
  for (let head = 0; head < numHeads; head++) view.append(drawing("text", { x: 0, y: tall * (head + 0.5) + 4 }, `head ${head}`));
  view.append(drawing("text", { x: 0, y: below }, "layer"));
  slots.forEach((heads, layer) => {
    const x = left + layer * step;
    if (layer % every === 0) view.append(drawing("text", { x, y: below }, String(layer)));
    heads.forEach((num, head) => view.append(...cell(x, head * tall, step - gap, tall - gap, num / all / top,
      `layer ${layer}, head ${head}: ${count(num)} of ${count(all)} (${percent(num, all)})`)));
  });
  $("map").replaceChildren(view);
}

function cell(x, y, width, height, share, text) {
  const place = { x, y, width, height, rx: Math.min(2, width / 4) };
  return [drawing("rect", { ...place, class: "under" }),
    drawing("rect", { ...place, class: "cell", "fill-opacity": share.toFixed(3) }, drawing("title", {}, text))];
}

$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  key.set($("key").value);
  $("key").value = "";
  poll();
});
$("more").addEventListener("click", () => { is_long = !is_long; rows(last); });
phone.addEventListener("change", () => { if (last) rows(last); });
new ResizeObserver(() => { if (last) charts(last.history); if (kept) draw(); }).observe($("board"));
document.addEventListener("visibilitychange", () => { clearTimeout(timer); if (!document.hidden) poll(); });
poll();
