// SPDX-License-Identifier: Apache-2.0
// What is told as tables, tiles and curves. Nothing here asks for anything: `detail.js` does, when a round is opened.

import { Curves } from "./chart.js";
import { Detail } from "./detail.js";
import { $, bytes, clock, count, figure, h, meter, NONE, percent, period, sentence, state, Table } from "./dom.js";

const sum = (values) => values.reduce((total, value) => total + (value ?? 0), 0);

export class View {
  #fleets = new Map();
  #attention = "";

  constructor(told, token) {
    this.told = told;
    this.detail = new Detail(told, token, () => this.draw());
    this.rate = new Curves($("rate-chart"), "results per second");
    this.chat = new Curves($("chat-chart"), "chat");
    this.rounds = new Table($("rounds"), "Rounds, those that are not over first", this.#columns());
  }

  draw() {
    const { gateway, attention, fleets, rounds } = this.told.sections;
    if (!gateway) return;
    this.#problems(gateway.problems);
    this.#tiles(gateway, rounds);
    this.#attend(attention);
    $("rounds-none").hidden = rounds.length > 0;
    $("rounds").hidden = !rounds.length;
    this.rounds.caption.textContent = `Rounds, those that are not over first${gateway.rounds_left_out ? `; ${gateway.rounds_left_out} older ones are not shown` : ""}`;
    this.rounds.update(rounds, (one) => one.uid, (one) => one.uid === this.detail.uid);
    this.detail.draw();
    this.#curves(gateway);
    this.#drawFleets(fleets);
    $("about").textContent = `Gateway ${gateway.version}, database ${bytes(gateway.database_bytes)}. The page only shows: nothing can be changed here.`;
  }

  #columns() {
    const stored = (one, name) => (one.stored ? one.stored[name] : null);
    const alarm = (value) => ({ key: count(value), node: () => [value ? h("b", { class: "bad" }, `! ${count(value)}`) : count(value)] });
    return [
      { title: "Round", head: true, cell: (one) => ({ key: one.name, node: () => [this.#opener(one)] }) },
      { title: "State", cell: (one) => state(one.state) },
      { title: "Progress", kind: "progress", cell: progress },
      { title: "Rate /s", number: true, cell: (one) => figure(one.over ? one.rate : this.#measured(one.uid) ?? one.rate) },
      { title: "Slots", number: true, cell: (one) => (one.desired === null ? NONE : `${one.running}/${one.desired}`) },
      { title: "Stored", number: true, cell: (one) => count(stored(one, "results")) },
      { title: "To forward", number: true, cell: (one) => (one.stored?.receiver ? count(one.stored.backlog) : NONE) },
      { title: "Conflicts", number: true, cell: (one) => alarm(stored(one, "conflicts")) },
      { title: "Dead", number: true, cell: (one) => alarm(stored(one, "dead")) },
      { title: "Expired", number: true, cell: (one) => alarm(stored(one, "expired")) },
      { title: "Message", kind: "message", cell: (one) => one.message },
    ];
  }

  #opener(one) {
    const name = `${one.namespace}/${one.name}`;
    return h("button", { type: "button", class: "plain", "data-uid": one.uid, click: () => this.detail.open(one.uid), "aria-label": `${name}: show slots and results` }, name);
  }

  #measured(uid) {
    const point = this.told.points.at(-1);
    return point ? point.rates[uid] ?? 0 : null;
  }

  #problems(texts) {
    $("problems").replaceChildren(...texts.map((text) => h("li", {}, text)));
  }

  #tiles(gateway, rounds) {
    const open = rounds.filter((one) => !one.over), point = this.told.points.at(-1);
    const held = rounds.map((one) => one.stored).filter(Boolean);
    const tiles = [
      ["Rounds not over", count(open.length), `${sum(open.map((one) => one.running))} slots compute`],
      ["Results per second", figure(point ? sum(Object.values(point.rates)) : sum(open.map((one) => one.rate))), point ? "stored here, mean of 15 s" : "as the operator has it"],
      ["Results stored", count(sum(held.map((one) => one.results))), `rounds with results: ${held.length}`],
      ["To be forwarded", count(sum(held.map((one) => one.backlog))), `${count(sum(held.map((one) => one.forwarded)))} accepted`],
      ["Dead or expired", count(sum(held.map((one) => one.dead + one.expired))), "results that did not arrive"],
      ["Chat", point && point.chat_rate ? `${figure(point.chat_p95)} s` : NONE, point && point.chat_rate ? `95 % begin sooner; ${figure(point.chat_rate)} answers/s` : "no answers through this gateway"],
    ];
    if (!this.tileCells) {
      this.tileCells = tiles.map(([title]) => ({ title, value: document.createTextNode(""), note: h("small") }));
      $("tiles").replaceChildren(...this.tileCells.map((cell) => h("div", {}, h("dt", {}, cell.title), h("dd", {}, cell.value, cell.note))));
    }
    tiles.forEach(([, value, note], index) => {
      this.tileCells[index].value.data = value;
      this.tileCells[index].note.textContent = note;
    });
  }

  #attend(items) {
    const key = JSON.stringify(items);
    if (key === this.#attention) return;
    this.#attention = key;
    $("attention-none").hidden = items.length > 0;
    $("attention-count").textContent = items.length ? `(${items.filter((one) => one.act).length} to act on, ${items.filter((one) => !one.act).length} to watch)` : "";
    $("attention").replaceChildren(...items.map((one) => h("li", {},
      h("span", { class: `mark ${one.act ? "act" : "look"}` }, one.act ? "! Act" : "○ Watch"),
      h("div", { class: "what" }, h("b", {}, one.reason), h("span", {}, one.subject)),
      h("div", {}, h("p", {}, one.seen), one.remedy && h("p", {}, h("b", {}, "What to do: "), one.remedy), one.command && h("p", {}, h("code", {}, one.command))),
    )));
  }

  #curves(gateway) {
    const points = this.told.points, times = points.map((point) => point.at);
    $("curves-since").textContent = `Measured by this gateway since ${clock(gateway.since)}, in steps of 15 s.`;
    this.rate.draw(times, [{ name: "all rounds", values: points.map((point) => sum(Object.values(point.rates))) }]);
    this.chat.draw(times, [
      { name: "half begin within", values: points.map((point) => point.chat_median) },
      { name: "95 % begin within", values: points.map((point) => point.chat_p95) },
    ]);
  }

  #drawFleets(fleets) {
    $("fleets-none").hidden = fleets.length > 0;
    const seen = new Set(), parent = $("fleets");
    for (const fleet of fleets) {
      const name = `${fleet.namespace}/${fleet.name}`;
      seen.add(name);
      let held = this.#fleets.get(name);
      if (!held) {
        held = new Fleet(name);
        this.#fleets.set(name, held);
        parent.append(held.element);
      }
      held.draw(fleet);
    }
    for (const [name, held] of this.#fleets) {
      if (!seen.has(name)) {
        held.element.remove();
        this.#fleets.delete(name);
      }
    }
  }
}

function progress(one) {
  if (one.share === null || one.share === undefined) return one.goal || NONE;
  const eta = one.eta_seconds === null ? "" : `, ${period(one.eta_seconds)} left`, text = `${percent(one.share)} of ${one.goal}${eta}`;
  return { key: text, node: () => meter(one.share, text) };
}

class Fleet {
  constructor(name) {
    this.title = h("h3", {}, name);
    this.line = h("p");
    this.holder = h("div", { class: "scroll tall", role: "group", "aria-label": `Pods of ${name}`, tabindex: "0" });
    this.summary = h("summary");
    this.element = h("div", { class: "fleet" }, this.title, this.line, h("details", { open: true }, this.summary, this.holder));
    this.pods = new Table(this.holder, `Pods of ${name}`, [
      { title: "Pod", head: true, cell: (pod) => pod[0] },
      { title: "Stage", cell: (pod) => state(pod[1]) },
      { title: "Self-check", cell: (pod) => state(pod[2]) },
      { title: "Works on", cell: (pod) => pod[4] || NONE },
      { title: "Kubernetes node", cell: (pod) => pod[3] || NONE },
      { title: "Finding", kind: "message", cell: (pod) => pod[5] },
    ]);
  }

  draw(fleet) {
    const whole = fleet.ready >= fleet.replicas, update = fleet.update === "Complete" ? "" : `, update ${fleet.update}: ${fleet.updated} updated`;
    this.line.replaceChildren(
      h("span", { class: whole ? "good" : "bad" }, `${whole ? "✓" : "✕"} ${fleet.ready} of ${fleet.replicas} pods ready`),
      ` · ${fleet.model}${fleet.gpu ? ` · ${fleet.gpu}` : ""}${update}. ${sentence(fleet.message)}`,
    );
    this.summary.textContent = `${fleet.pods.length} pods`;
    this.pods.update(fleet.pods, (pod) => pod[0]);
  }
}
