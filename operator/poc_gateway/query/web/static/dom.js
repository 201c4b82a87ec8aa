// SPDX-License-Identifier: Apache-2.0
// Small helpers: elements without markup in strings, texts for numbers and times, and tables that change in place.

export const $ = (id) => document.getElementById(id);

/** Make an element; properties that are functions are listeners, the others attributes. */
export function h(tag, properties = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value === true) element.setAttribute(name, "");
    else if (value !== false && value !== null && value !== undefined) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined && child !== ""));
  return element;
}

const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });
const some = new Intl.NumberFormat("en", { maximumSignificantDigits: 3 });
const close = new Intl.NumberFormat("en", { maximumSignificantDigits: 6 });

export const NONE = "–";
export const count = (value) => (value === null || value === undefined ? NONE : whole.format(value));
export const figure = (value) => (value === null || value === undefined ? NONE : value >= 1000 ? whole.format(value) : some.format(value));
/** One of several values that lie close together. */
export const edge = (value) => close.format(value);
export const percent = (share) => `${(100 * share).toFixed(share < 0.1 ? 1 : 0)} %`;
export const clock = (at) => new Date(at).toLocaleTimeString("en-GB", { hour: "2-digit", minute: "2-digit" });
export const moment = (at) => new Date(at).toLocaleTimeString("en-GB");

export const sentence = (text) => (text && !text.endsWith(".") ? `${text}.` : text);

const STEPS = [[172800, 86400, "d"], [7200, 3600, "h"], [120, 60, "min"], [0, 1, "s"]];

export function period(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  const [, size, unit] = STEPS.find(([from]) => seconds >= from) ?? STEPS[3];
  return `${Math.max(0, Math.floor(seconds / size))} ${unit}`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  const power = value < 1024 ? 0 : Math.min(4, Math.floor(Math.log2(value) / 10));
  return `${some.format(value / 1024 ** power)} ${["B", "KiB", "MiB", "GiB", "TiB"][power]}`;
}

const KIND = {
  Running: "good", Complete: "good", Ready: "good", Passed: "good", Done: "good",
  Failed: "bad", Failing: "bad", NotReady: "bad", Stalled: "bad",
};

/** A state as a word with a sign, so that colour is not all that tells. */
export function state(word) {
  const kind = KIND[word] ?? "dim", sign = { good: "✓", bad: "✕" }[kind] ?? "·";
  return { key: word, node: () => (word ? [h("span", { class: kind }, `${sign} ${word}`)] : [NONE]) };
}

/** A share as a bar with its text beside it: the text is what a screen reader reads. */
export function meter(share, text) {
  const inner = h("i");
  inner.style.width = `${Math.min(100, Math.max(0, 100 * share))}%`;
  return [h("span", { class: "meter", "aria-hidden": "true" }, inner), text];
}

/**
 * A table whose rows are kept by key and whose cells change only when they differ, so that focus, selection and
 * scrolling stay. A column is {title, number, cell(row), head, kind}: `cell` returns a text, or {key, node()} to make nodes.
 */
export class Table {
  #rows = new Map();

  constructor(parent, caption, columns) {
    this.columns = columns;
    this.caption = h("caption", {}, caption);
    this.body = h("tbody");
    const heads = columns.map((one) => h("th", { scope: "col", class: one.number ? "number" : null }, one.title));
    this.element = h("table", {}, this.caption, h("thead", {}, h("tr", {}, ...heads)), this.body);
    parent.replaceChildren(this.element);
  }

  update(rows, keyOf, isCurrent = () => false) {
    const seen = new Set();
    let place = this.body.firstElementChild;
    for (const row of rows) {
      const key = keyOf(row);
      seen.add(key);
      let held = this.#rows.get(key);
      if (!held) {
        held = this.#made();
        this.#rows.set(key, held);
      }
      this.#fill(held, row);
      if (isCurrent(row)) held.element.setAttribute("aria-current", "true");
      else held.element.removeAttribute("aria-current");
      if (held.element === place) place = place.nextElementSibling;
      else this.body.insertBefore(held.element, place);
    }
    for (const [key, held] of this.#rows) {
      if (!seen.has(key)) {
        held.element.remove();
        this.#rows.delete(key);
      }
    }
  }

  #made() {
    const cells = this.columns.map((one) => {
      const style = [one.number ? "number" : "", one.kind ?? ""].filter(Boolean).join(" ");
      return h(one.head ? "th" : "td", { scope: one.head ? "row" : null, class: style || null });
    });
    return { element: h("tr", {}, ...cells), cells, texts: cells.map(() => null) };
  }

  #fill(held, row) {
    this.columns.forEach((column, index) => {
      const value = column.cell(row), text = typeof value === "object" ? value.key : String(value);
      if (held.texts[index] === text) return;
      held.texts[index] = text;
      if (typeof value === "object") held.cells[index].replaceChildren(...value.node());
      else held.cells[index].textContent = text;
    });
  }
}
