// SPDX-License-Identifier: Apache-2.0
// One round: its slots, live, and the distribution and conflicts of its results, read when it is opened or asked for.

import { histogram } from "./chart.js";
import { $, count, h, moment, NONE, sentence, state, Table } from "./dom.js";
import { ask } from "./stream.js";

const MOST_CONFLICTS = 50;

export class Detail {
  uid = "";
  #reading = 0;

  constructor(told, token, changed) {
    this.told = told;
    this.token = token;
    this.changed = changed;
    this.slots = new Table($("slots"), "Slots", [
      { title: "Node", head: true, number: true, cell: (slot) => slot[0] },
      { title: "Group", number: true, cell: (slot) => slot[1] },
      { title: "State", cell: (slot) => state(slot[2]) },
      { title: "Pod", cell: (slot) => slot[3] || NONE },
      { title: "Delivered", number: true, cell: (slot) => count(slot[4]) },
      { title: "Stored", number: true, cell: (slot) => count(slot[5]) },
      { title: "Forwarded", number: true, cell: (slot) => count(slot[6]) },
      { title: "Conflicts", number: true, cell: (slot) => count(slot[7]) },
      { title: "Attempts", number: true, cell: (slot) => count(slot[8]) },
      { title: "Error", kind: "message", cell: (slot) => slot[9] },
    ]);
    $("close").addEventListener("click", () => this.close());
    $("refresh").addEventListener("click", () => this.#read());
  }

  get round() {
    return this.told.sections.rounds?.find((one) => one.uid === this.uid);
  }

  open(uid) {
    this.uid = uid;
    this.changed();
    this.#read();
    $("detail-title").focus();
  }

  close() {
    const opener = document.querySelector(`button[data-uid="${CSS.escape(this.uid)}"]`);
    this.uid = "";
    this.#reading += 1;
    this.changed();
    opener?.focus();
  }

  draw() {
    const round = this.round, rows = this.told.sections[`slots/${this.uid}`];
    $("detail").hidden = !round;
    if (!round) return;
    $("detail-title").textContent = `Round ${round.namespace}/${round.name}`;
    const more = round.stored ? ` Duplicates: ${count(round.stored.duplicates)}. Open conflicts: ${count(round.stored.undecided)}.` : "";
    $("detail-message").textContent = `${round.model}, block ${round.height}. ${sentence(round.message)}${more}`;
    $("slots-none").hidden = Boolean(rows?.length);
    $("slots").hidden = !rows?.length;
    $("slots-none").textContent = rows ? "It has no slots yet." : `Too many slots are shown already: use kubectl poc -n ${round.namespace} round watch ${round.name}.`;
    this.slots.caption.textContent = `${count(rows?.length ?? 0)} slots of ${round.namespace}/${round.name}`;
    this.slots.update(rows ?? [], (slot) => `${slot[0]}/${slot[1]}`);
  }

  async #read() {
    const round = this.round, reading = (this.#reading += 1);
    if (!round) return;
    if (!round.stored) {
      const text = "Nothing of it is stored yet.";
      for (const id of ["histogram", "conflicts"]) $(id).replaceChildren(h("p", { class: "empty" }, text));
      return;
    }
    const base = `../rounds/${encodeURIComponent(round.namespace)}/${encodeURIComponent(round.name)}`, uid = `uid=${encodeURIComponent(round.uid)}`;
    await Promise.all([
      this.#show("histogram", reading, `${base}/summary?${uid}`, (parent, body) => {
        const { quantity, counted } = body.histogram;
        $("histogram-title").textContent = `Distribution by ${quantity}, read at ${moment(Date.now())}`;
        if (counted) histogram(parent, body.histogram);
        else parent.replaceChildren(h("p", { class: "empty" }, "Nothing of it is stored yet."));
      }),
      this.#show("conflicts", reading, `${base}/conflicts?limit=${MOST_CONFLICTS}&${uid}`, conflicts),
    ]);
  }

  async #show(id, reading, path, show) {
    const parent = $(id);
    parent.replaceChildren(h("p", { class: "empty" }, "Reading …"));
    try {
      const body = await (await ask(path, this.token())).json();
      if (reading === this.#reading) show(parent, body);
    } catch (error) {
      if (reading === this.#reading) parent.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
    }
  }
}

function conflicts(parent, body) {
  if (!body.conflicts.length) {
    parent.replaceChildren(h("p", { class: "empty" }, "No nonce has two results."));
    return;
  }
  const title = `Nonces with two results${body.next ? `: the first ${count(body.conflicts.length)}` : ""}`;
  new Table(parent, title, [
    { title: "Nonce", head: true, number: true, cell: (one) => count(one.nonce) },
    { title: "First from", cell: (one) => one.stored_pod ?? NONE },
    { title: "Then from", cell: (one) => one.pod ?? NONE },
    { title: "Honest", cell: (one) => one.truth ?? "not known yet" },
  ]).update(body.conflicts, (one) => one.id);
}
