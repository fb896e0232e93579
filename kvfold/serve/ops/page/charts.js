// Line charts of the last one, five or ten minutes, as SVG. A value is read under the pointer.

const SPANS_S = [60, 300, 600], GAP_S = 20, HEIGHT = 84, TOP = 12;

export function drawing(name, facts = {}, ...inside) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [fact, value] of Object.entries(facts)) made.setAttribute(fact, value);
  made.append(...inside);
  return made;
}

export function element(name, facts = {}, ...inside) {
  const made = Object.assign(document.createElement(name), facts);
  made.append(...inside);
  return made;
}

// Samples are the server's: [at, running, waiting, output, hits, lookups], the last one of now.

export function samples(history) {
  return history.map(([at, running, waiting, output, hits, lookups]) => ({ at, running, waiting, output, hits, lookups }));
}

// The change of totals up to each sample, over `seconds` or the time that there is.
function changes(found, seconds, value) {
  let first = 0;
  return found.map((sample, i) => {
    while (first + 1 < i && found[first + 1].at <= sample.at - seconds) first++;
    return [sample.at, i ? value(found[first], sample) : null];
  });
}

export const tokensPerSecond = (found) => changes(found, 5, (a, b) => Math.max(b.output - a.output, 0) / Math.max(b.at - a.at, 0.1));
export const hitRate = (found) => changes(found, 60, (a, b) => (b.lookups > a.lookups ? (b.hits - a.hits) / (b.lookups - a.lookups) : null));
export const level = (found, name) => found.map((sample) => [sample.at, sample[name]]);

// `lines`: {name, kind, points}; `text` writes a value; `top`: the largest value of the axis, or undefined.
export function chart(figure, title, lines, { text, top, empty = "" }) {
  const now = lines[0].points.at(-1)[0], age = now - lines[0].points[0][0];
  const span = SPANS_S.find((seconds) => seconds >= age) ?? SPANS_S.at(-1);
  const shown = lines.map((line) => ({ ...line, points: line.points.filter(([at]) => at >= now - span) }));
  const values = shown.flatMap((line) => line.points.map(([, value]) => value)).filter((value) => value !== null);
  const most = top ?? nice(Math.max(...values, 1)), width = Math.max(figure.clientWidth, 120);
  const x = (at) => width * (1 - (now - at) / span), y = (value) => TOP + (HEIGHT - TOP - 1) * (1 - value / most);
  const view = drawing("svg", { height: HEIGHT, role: "img" });
  for (const value of [most, most / 2, 0]) view.append(drawing("line", { class: "grid", x1: 0, x2: width, y1: y(value), y2: y(value) }));
  for (const line of shown) view.append(...strokes(line, x, y));
  view.append(drawing("text", { x: 0, y: TOP - 3 }, text(most)));
  if (!values.length) view.append(drawing("text", { class: "empty", x: width / 2, y: HEIGHT / 2 + 8, "text-anchor": "middle" }, empty));
  const cursor = drawing("line", { class: "cursor", y1: TOP, y2: HEIGHT, visibility: "hidden" });
  view.append(cursor);
  const caption = element("figcaption"), say = (at) => caption.replaceChildren(...told(title, shown, at, now, text));
  say(now);
  view.setAttribute("aria-label", caption.textContent);
  view.addEventListener("pointermove", (event) => {
    const at = now - span * (1 - event.offsetX / width);
    cursor.setAttribute("visibility", "visible");
    cursor.setAttribute("x1", event.offsetX);
    cursor.setAttribute("x2", event.offsetX);
    say(at);
  });
  view.addEventListener("pointerleave", () => { cursor.setAttribute("visibility", "hidden"); say(now); });
  figure.replaceChildren(caption, view, element("p", { className: "axis" }, element("span", {}, `${span / 60} min ago`), element("span", {}, "now")));
}

function told(title, lines, at, now, text) {
  const values = lines.map((line) => {
    const value = line.points.findLast(([when]) => when <= at)?.[1] ?? null;
    return element("span", { className: `key ${line.kind}` }, `${line.name} ${value === null ? "–" : text(value)}`.trim());
  });
  const when = at === now ? "" : ` at ${new Date(1000 * at).toLocaleTimeString()}`;
  return [element("span", {}, title + when), element("span", { className: "values" }, ...values)];
}

function strokes(line, x, y) {
  const runs = [[]];
  line.points.forEach(([at, value], i) => {
    if (value === null || (i && at - line.points[i - 1][0] > GAP_S)) runs.push([]);
    if (value !== null) runs.at(-1).push([x(at), y(value)]);
  });
  return runs.filter((run) => run.length).flatMap((run) => {
    const path = run.map(([px, py], i) => `${i ? "L" : "M"}${px.toFixed(1)} ${py.toFixed(1)}`).join("");
    const tail = run.length === 1 ? "h2" : "";
    const area = drawing("path", { class: `area ${line.kind}`, d: `${path}V${y(0)}H${run[0][0].toFixed(1)}Z` });
    return [area, drawing("path", { class: `line ${line.kind}`, d: path + tail })];
  });
}

// The next of 1, 2, 5, 10, 20, …
function nice(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value);
}
