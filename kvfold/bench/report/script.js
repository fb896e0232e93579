"use strict";
// Buttons choose one of several views, legends hide policies, and lost answers are browsed. All content stands in the
// page without this script; whatever a model wrote is set as text, never as markup.

const choose = (group, button) => {
  for (const other of group.children) other.setAttribute("aria-pressed", String(other === button));
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

const made = (name, content, className) => {
  const element = document.createElement(name);
  if (className) element.className = className;
  if (content !== undefined) element.textContent = content;
  return element;
};

const article = (lost) => {
  const head = made("h4");
  const scores = `${Math.round(100 * lost.full_score)} → ${Math.round(100 * lost.score)}`;
  head.append(made("code", lost.policy), ` in ${lost.memory}, question ${lost.mode}: ${scores}`);
  const facts = made("dl");
  const said = [["asked", lost.question], ["expected", lost.expected.join(" | ")], ["full cache", lost.full_answer],
    [lost.resolved, lost.answer]];
  for (const [name, content] of said) facts.append(made("dt", name), made("dd", content.trim() || "(nothing)"));
  const context = made("details");
  context.append(made("summary", "the prompt"), made("p", `${lost.begin} […] ${lost.end}`));
  const whole = made("article");
  whole.append(head, made("p", lost.sample, "note"), facts, context);
  return whole;
};

const mostShown = 20;
for (const part of document.querySelectorAll("[data-regressions]")) {
  const all = JSON.parse(document.getElementById(`regressions-${part.dataset.regressions}`).textContent);
  const articles = part.querySelector(".articles");
  const worst = [...articles.children];
  const filters = made("div", undefined, "filters");
  const chosen = {};
  const show = () => {
    const names = Object.keys(chosen).filter((name) => chosen[name]);
    const found = all.filter((lost) => names.every((name) => lost[name] === chosen[name]));
    articles.replaceChildren(...(names.length ? found.slice(0, mostShown).map(article) : worst));
    if (names.length && found.length === 0) articles.append(made("p", "None among the worst that this page carries."));
  };
  for (const [name, label] of [["policy", "every policy"], ["memory", "every memory"], ["mode", "known or not"]]) {
    const select = made("select");
    select.setAttribute("aria-label", name);
    select.append(new Option(label, ""), ...[...new Set(all.map((lost) => lost[name]))].map((v) => new Option(v, v)));
    select.addEventListener("change", () => { chosen[name] = select.value; show(); });
    filters.append(select);
  }
  articles.before(filters);
}
