// SPDX-License-Identifier: Apache-2.0
// Curves and columns as SVG. Each has a text that says what it shows, and its figures as a table.

import { clock, count, edge, figure, h, moment, NONE, Table } from "./dom.js";

const SVG = "http://www.w3.org/2000/svg", WIDTH = 640, HEIGHT = 190, LEFT = 58, RIGHT = 8, TOP = 8, BOTTOM = 20;

function s(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

/** The next number of 1, 2 or 5 times a power of ten, so that the axis has round numbers. */
export function nice(value) {
  if (!(value > 0)) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((step) => step * power >= value) * power;
}

function frame(label, top) {
  const svg = s("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label });
  for (const share of [0, 0.5, 1]) {
    const y = yOf(share);
    svg.append(s("line", { class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y, y2: y }));
    svg.append(s("text", { x: LEFT - 6, y: y + 4, "text-anchor": "end" }, figure(top * share)));
  }
  return svg;
}

const yOf = (share) => TOP + (1 - share) * (HEIGHT - TOP - BOTTOM);

/** Curves over time. `series` is [{name, values}], of as many values as `times`; null is a gap. */
export class Curves {
  #figures = null;

  constructor(parent, unit) {
    this.unit = unit;
    this.plot = h("div");
    this.legend = h("p", { class: "legend" });
    this.table = h("div", { class: "scroll tall", role: "group", "aria-label": `Figures: ${unit}`, tabindex: "0" });
    this.details = h("details", { toggle: () => this.#list() }, h("summary", {}, "Figures"), this.table);
    parent.replaceChildren(this.plot, this.legend, this.details);
  }

  draw(times, series) {
    this.last = [times, series];
    const all = series.flatMap((one) => one.values).filter((value) => value !== null);
    if (all.length) this.plot.replaceChildren(this.#svg(times, series, all));
    else this.plot.replaceChildren(h("p", { class: "empty" }, times.length ? `No ${this.unit} in this time.` : "Measuring: the first figures come within half a minute."));
    this.details.hidden = !all.length;
    const names = series.map((one, index) => `${index ? "Dashed" : "Solid"}: ${one.name} ${figure(one.values.at(-1))}`);
    this.legend.textContent = all.length && series.length > 1 ? names.join(". ") : "";
    this.#list();
  }

  #svg(times, series, all) {
    const top = nice(Math.max(...all)), [first, end] = [times[0], times.at(-1)], span = Math.max(end - first, 60000);
    const latest = series.map((one) => `${one.name} now ${figure(one.values.at(-1))}`).join(", ");
    const label = `${this.unit}, from ${clock(first)} to ${clock(end)}: ${latest}, at most ${figure(Math.max(...all))}`;
    const svg = frame(label, top), xOf = (at) => LEFT + ((at - first) / span) * (WIDTH - LEFT - RIGHT);
    let before = "";
    for (const share of [0, 0.25, 0.5, 0.75, 1]) {
      const anchor = share === 0 ? "start" : share === 1 ? "end" : "middle", at = first + share * span, text = clock(at);
      if (text !== before) svg.append(s("text", { x: xOf(at), y: HEIGHT - 4, "text-anchor": anchor }, text));
      before = text;
    }
    series.forEach((one, index) => {
      const style = index ? " second" : "";
      for (const run of runs(times, one.values)) {
        const points = run.map(([at, value]) => `${xOf(at).toFixed(1)},${yOf(value / top).toFixed(1)}`);
        if (points.length > 1) svg.append(s("polyline", { class: `line${style}`, points: points.join(" ") }));
        const [x, y] = points.at(-1).split(",");
        svg.append(s("circle", { class: `dot${style}`, cx: x, cy: y, r: 2.5 }));
      }
    });
    return svg;
  }

  #list() {
    if (!this.details.open || !this.last) return;
    const [times, series] = this.last;
    this.#figures ??= new Table(this.table, `${this.unit}, the newest first`, [
      { title: "Time", head: true, cell: ([at]) => moment(at) },
      ...series.map((one, index) => ({ title: one.name, number: true, cell: (row) => figure(row[index + 1]) })),
    ]);
    const rows = times.map((at, index) => [at, ...series.map((one) => one.values[index])]);
    this.#figures.update(rows.reverse(), ([at]) => at);
  }
}

function runs(times, values) {
  const found = [[]];
  values.forEach((value, index) => {
    if (value === null) found.push([]);
    else found.at(-1).push([times[index], value]);
  });
  return found.filter((run) => run.length);
}

/** Columns of a histogram as the gateway's summary has it. */
export function histogram(parent, shown) {
  const most = Math.max(...shown.counts, 1), top = nice(most), left = shown.edges[0], right = shown.edges.at(-1);
  const wide = (WIDTH - LEFT - RIGHT) / shown.counts.length;
  const sample = shown.sampled ? `a sample of ${count(shown.counted)}` : `all ${count(shown.counted)}`;
  const above = shown.above ? `; ${count(shown.above)} lie at or above ${edge(right)}` : "";
  const below = shown.below ? `; ${count(shown.below)} lie below ${edge(left)}` : "";
  const text = `The ${shown.quantity} of ${sample} results, from ${edge(left)} to ${edge(right)}${below}${above}.`;
  const svg = frame(text, top);
  shown.counts.forEach((value, index) => {
    const y = yOf(value / top);
    svg.append(s("rect", { class: "column", x: LEFT + index * wide + 1, y, width: wide - 2, height: yOf(0) - y }));
  });
  shown.edges.forEach((value, index) => {
    if (index % 5 === 0) {
      const anchor = index === 0 ? "start" : index === shown.counts.length ? "end" : "middle";
      svg.append(s("text", { x: LEFT + index * wide, y: HEIGHT - 4, "text-anchor": anchor }, edge(value)));
    }
  });
  const table = h("div", { class: "scroll tall", role: "group", "aria-label": "Figures of the histogram", tabindex: "0" });
  new Table(table, text, [
    { title: `From ${shown.quantity}`, head: true, cell: (row) => edge(row[0]) },
    { title: "Results", number: true, cell: (row) => count(row[1]) },
  ]).update(shown.counts.map((value, index) => [shown.edges[index], value]), (row) => row[0]);
  parent.replaceChildren(svg, h("p", { class: "legend" }, text || NONE), h("details", {}, h("summary", {}, "Figures"), table));
}
