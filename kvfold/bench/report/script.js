"use strict";
// Buttons choose one of several views, legends hide policies, and lost answers are browsed. All content stands in the
// page without this script; whatever a model wrote is set as text, never as markup.

const choose = (group, button) => {
  for (const other of group.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
  for (const view of document.querySelectorAll(`[data-view="${group.dataset.group}"]`)) {
    view.hidden = view.dataset.name !== button.dataset.choose;
  }
};

for (const group of document.querySelectorAll(".buttons")) {
  group.hidden = false;
  choose(group, group.querySelector('[aria-pressed="true"]'));
  group.addEventListener("click", (event) => {
    const button = event.target.closest("[data-choose]");
    if (button) choose(group, button);
  });
}

for (const legend of document.querySelectorAll(".legend")) {
  legend.addEventListener("click", (event) => {
    const button = event.target.closest("[data-toggle]");
    if (!button) return;
    const shown = button.getAttribute("aria-pressed") !== "true";
    button.setAttribute("aria-pressed", String(shown));
    const lines = legend.parentElement.querySelectorAll(`[data-policy="${button.dataset.toggle}"]`);
    for (const line of lines) line.style.display = shown ? "" : "none";
  });
}

// A sign on tables and figures that are wider than the page, until they have been scrolled to their end.
const sign = (area) => {
  const rest = area.scrollWidth - area.clientWidth - area.scrollLeft;
  area.parentElement.classList.toggle("more", area.clientWidth > 0 && rest > 4);
};
const watch = new ResizeObserver((entries) => entries.forEach((entry) => sign(entry.target)));
for (const area of document.querySelectorAll(".scroll")) {
  const frame = document.createElement("div");
  frame.className = "frame";
  area.replaceWith(frame);
  frame.append(area);
  area.addEventListener("scroll", () => sign(area), { passive: true });
  watch.observe(area);
}

// A copy of an article of the page, filled with another answer.
const article = (pattern, lost) => {
  const made = pattern.cloneNode(true);
  const scores = `${Math.round(100 * lost.full_score)} → ${Math.round(100 * lost.score)}`;
  made.querySelector("details").open = false;
  made.querySelector(".policy").textContent = lost.policy;
  made.querySelector(".head").textContent = `in ${lost.memory}, question ${lost.mode}: ${scores}`;
  made.querySelector(".sample").textContent = lost.sample;
  made.querySelectorAll("dt").forEach((name, i) => { name.textContent = lost.facts[i][0]; });
  made.querySelectorAll("dd").forEach((said, i) => { said.textContent = lost.facts[i][1]; });
  made.querySelector(".prompt").textContent = lost.prompt;
  return made;
};

const mostShown = 20;
for (const part of document.querySelectorAll("[data-regressions]")) {
  const all = JSON.parse(document.getElementById(`regressions-json-${part.dataset.regressions}`).textContent);
  const articles = part.querySelector(".articles");
  const worst = [...articles.children];
  const filters = document.createElement("div");
  filters.className = "filters";
  const chosen = {};
  const show = () => {
    const names = Object.keys(chosen).filter((name) => chosen[name]);
    const found = all.filter((lost) => names.every((name) => lost[name] === chosen[name])).slice(0, mostShown);
    articles.replaceChildren(...(names.length ? found.map((lost) => article(worst[0], lost)) : worst));
    if (names.length && found.length === 0) articles.append("None among the worst that this page carries.");
  };
  for (const [name, label] of [["policy", "every policy"], ["memory", "every memory"], ["mode", "known or not"]]) {
    const select = document.createElement("select");
    select.setAttribute("aria-label", name);
    select.append(new Option(label, ""), ...[...new Set(all.map((lost) => lost[name]))].map((v) => new Option(v, v)));
    select.addEventListener("change", () => { chosen[name] = select.value; show(); });
    filters.append(select);
  }
  articles.before(filters);
}
