// Asks the server for its state every two seconds while the tab is seen, and shows it.

const EVERY_MS = 2000;
const MISSES = {
  hit: "hit", absent: "not there", expired: "expired", lost: "tensors lost", unmarked: "nothing to cache", refused: "policy cannot reuse",
};
const $ = (id) => document.getElementById(id);
const count = (value) => value.toLocaleString("en");
const percent = (part, whole) => (whole ? `${(100 * part / whole).toFixed(part && part < whole / 10 ? 1 : 0)} %` : "–");
const key = { get: () => sessionStorage.getItem("kvfold-key"), set: (value) => sessionStorage.setItem("kvfold-key", value) };
let timer = null, chosen = null, drawn = null, kept = null;

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

function element(name, facts = {}, ...inside) {
  const made = Object.assign(document.createElement(name), facts);
  made.append(...inside);
  return made;
}

function drawing(name, facts = {}, ...inside) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [fact, value] of Object.entries(facts)) made.setAttribute(fact, value);
  made.append(...inside);
  return made;
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
  $("login").hidden = true;
  $("board").hidden = false;
  tiles(state);
  for (const [id, found] of [["first-token", state.first_token_ms], ["each-token", state.token_ms]]) {
    ["p50", "p95", "p99"].forEach((name, i) => { $(id).cells[i + 1].textContent = time(found?.[name]); });
  }
  $("timed").textContent = `of the latest ${count(state.first_token_ms?.num_samples ?? 0)} replies`;
  const looked = sum(Object.values(state.lookups));
  $("lookups").replaceChildren(...Object.keys(MISSES).filter((name) => name === "hit" || state.lookups[name]).map(
    (name) => bar(MISSES[name], count(state.lookups[name] ?? 0), (state.lookups[name] ?? 0) / (looked || 1), name === "hit" ? "good" : "")));
  $("no-reuse").textContent = state.no_reuse ? `Prompts are not cached: ${state.no_reuse}` : "";
  const { bytes: held, limit_bytes: limit } = state.arena;
  $("arena").replaceChildren(bar("arena", `${bytes(held)} of ${bytes(limit)}`, held / limit, "heat"));
  const hits = sum(state.tiers.map((tier) => tier.hits));
  $("tiers").replaceChildren(...state.tiers.map((tier) => element("tr", {}, element("th", {}, tier.name),
    ...[bytes(tier.bytes), count(tier.hits), percent(tier.hits, hits)].map((text) => element("td", {}, text)))));
  rows(state.requests);
}

const sum = (values) => values.reduce((total, value) => total + value, 0);

function tiles(state) {
  const { tokens, lookups, usd } = state, looked = sum(Object.values(lookups));
  const texts = {
    model: state.model, policy: state.policy, version: state.version,
    running: count(state.running), waiting: `${count(state.waiting)} waiting`,
    done: count(state.done), failed: `${count(state.refused)} refused or failed`,
    "hit-rate": percent(lookups.hit ?? 0, looked), hits: `${count(lookups.hit ?? 0)} of ${count(looked)}`,
    reused: count(tokens.reused), "reused-share": `${percent(tokens.reused, tokens.input)} of what was read`,
    written: count(tokens.output), read: `${count(tokens.input)} read`,
    saved: usd ? dollars(usd.saved) : "–", cost: usd ? `${dollars(usd.cost)} spent` : "needs --price",
  };
  for (const [id, text] of Object.entries(texts)) $(id).textContent = text;
}

function bar(name, text, share, kind) {
  const track = drawing("svg", { class: "track", "aria-hidden": "true" }, drawing("rect", { width: `${100 * share}%`, height: "100%", rx: 2.5 }));
  return element("li", { className: kind }, element("span", {}, name), element("span", {}, text), track);
}

function rows(requests) {
  $("none").hidden = requests.length > 0;
  $("requests").hidden = requests.length === 0;
  const body = $("requests").tBodies[0], known = new Map([...body.rows].map((row) => [row.dataset.id, row]));
  const latest = requests.find((request) => request.has_map);
  const shown = requests.find((request) => request.request === chosen && request.has_map) ?? latest;
  const names = [...$("requests").tHead.rows[0].cells].map((cell) => cell.textContent);
  body.append(...requests.map((request) => {
    const row = known.get(request.request) ?? newRow(request, names);
    known.delete(request.request);
    row.setAttribute("aria-selected", request === shown);
    return fill(row, request);
  }));
  for (const row of known.values()) row.remove();
  if (shown && shown.request !== drawn) choose(shown);
}

function newRow(request, names) {
  const row = element("tr");
  row.dataset.id = request.request;
  names.forEach((name, i) => {
    const cell = row.insertCell();
    if (i > 0) cell.dataset.name = name;
  });
  const button = element("button", { type: "button", title: `${request.request}: show the slots kept of its prompt` }, request.request.slice(4, 14));
  button.addEventListener("click", () => { chosen = request.request; poll(); });
  row.cells[0].append(button);
  return row;
}

function fill(row, request) {
  const is_done = request.now === "done", is_bad = request.status >= 400 || request.end === "failed" || request.end === "late";
  const known = (value) => (value === undefined ? "–" : count(value));
  const texts = [
    new Date(1000 * request.at).toLocaleTimeString(), request.tenant, request.path, is_done ? `${request.status} ${request.end ?? request.why ?? ""}` : request.now,
    known(request.tokens_in), known(request.tokens_reused), is_done ? known(request.tokens_out) : "…",
    time(request.first_token_ms), time(request.token_ms), MISSES[request.lookup] ?? "–",
  ];
  texts.forEach((text, i) => { if (row.cells[i + 1].textContent !== text) row.cells[i + 1].textContent = text; });
  row.cells[4].className = is_bad ? "bad" : "";
  row.cells[4].title = request.why ?? "";
  row.cells[10].className = request.lookup === "hit" ? "ok" : "";
  row.cells[0].firstChild.disabled = !request.has_map;
  return row;
}

// The map: a column for each layer, a row for each head

async function choose(request) {
  drawn = request.request;
  const { found } = await ask(`dashboard/kept/${request.request}`);
  if (found === null || drawn !== found.id) return;
  kept = found;
  draw();
}

function draw() {
  const { id, num_tokens: all, slots } = kept, flat = slots.flat(), most = Math.max(...flat) / all;
  const numHeads = Math.max(...slots.map((heads) => heads.length));
  $("map-section").hidden = false;
  $("map-about").textContent = `${id}: a prompt of ${count(all)} tokens, of which a head keeps ${percent(sum(flat), all * flat.length)} on average ` +
    `(${percent(Math.min(...flat), all)} to ${percent(Math.max(...flat), all)}).`;
  $("most").textContent = `${percent(most, 1)} of the prompt's tokens`;
  const width = Math.max($("map").clientWidth, 200), left = 46, step = (width - left) / slots.length, tall = Math.min(Math.max(step, 16), 26);
  const gap = Math.min(1.5, step / 6), every = Math.ceil(36 / step), below = tall * numHeads + 15;
  const view = drawing("svg", { height: below + 5, role: "img", "aria-label": $("map-about").textContent });
  for (let head = 0; head < numHeads; head++) view.append(drawing("text", { x: 0, y: tall * (head + 0.5) + 4 }, `head ${head}`));
  view.append(drawing("text", { x: 0, y: below }, "layer"));
  slots.forEach((heads, layer) => {
    const x = left + layer * step;
    if (layer % every === 0) view.append(drawing("text", { x, y: below }, String(layer)));
    heads.forEach((num, head) => view.append(...cell(x, head * tall, step - gap, tall - gap, num / all / most,
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
new ResizeObserver(() => { if (kept) draw(); }).observe($("map-section"));
document.addEventListener("visibilitychange", () => { clearTimeout(timer); if (!document.hidden) poll(); });
poll();
