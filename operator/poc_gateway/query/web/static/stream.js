// SPDX-License-Identifier: Apache-2.0
// Server-sent events by fetch: EventSource can send no header, and the token must not stand in an address.

export const TOKEN_HEADER = "X-PoC-Gateway-Token";
const FIRST_PAUSE = 1000, LONGEST_PAUSE = 30000, SILENCE = 45000;

export class Unauthorized extends Error {}

/** Splits text into events as it comes. */
export class Parser {
  #rest = "";

  * feed(text) {
    this.#rest += text;
    for (let end; (end = this.#rest.indexOf("\n\n")) >= 0;) {
      const event = { id: "", name: "message", data: [] };
      for (const line of this.#rest.slice(0, end).split("\n")) {
        const colon = line.indexOf(":"), field = line.slice(0, colon), value = line.slice(colon + 1).replace(/^ /, "");
        if (field === "id") event.id = value;
        else if (field === "event") event.name = value;
        else if (field === "data") event.data.push(value);
      }
      this.#rest = this.#rest.slice(end + 2);
      if (event.data.length) yield { ...event, data: event.data.join("\n") };
    }
  }
}

/** Ask a route of the gateway; raises Unauthorized on 401, else an Error with the gateway's sentence. */
export async function ask(path, token, options = {}) {
  const headers = { ...options.headers, ...(token ? { [TOKEN_HEADER]: token } : {}) };
  const answer = await fetch(path, { ...options, headers, cache: "no-store" });
  if (answer.ok) return answer;
  const body = await answer.json().catch(() => ({}));
  const text = body.detail || body.message || `HTTP ${answer.status}`;
  if (answer.status === 401) throw new Unauthorized(text);
  throw Object.assign(new Error(text), { seconds: Number(answer.headers.get("Retry-After")) || 0 });
}

/** Follow the stream for ever; `told` gets (name, content), `state` what became of the connection. */
export async function follow({ token, told, state }) {
  let last = "", pause = FIRST_PAUSE;
  for (;;) {
    let wait = 0;
    try {
      await once({ token, last, state, told: (event) => {
        last = event.id || last;
        pause = FIRST_PAUSE;
        told(event.name, JSON.parse(event.data));
      } });
      state("away", "The gateway has ended the stream");
    } catch (error) {
      if (error instanceof Unauthorized) throw error;
      wait = (error.seconds || 0) * 1000;
      state("away", error.name === "AbortError" ? "The gateway is silent" : error.message);
    }
    // Many pages must not come back at the same moment.
    wait = Math.max(wait, pause * (0.5 + Math.random() / 2));
    await new Promise((resolve) => setTimeout(resolve, wait));
    pause = Math.min(2 * pause, LONGEST_PAUSE);
  }
}

async function once({ token, last, state, told }) {
  const control = new AbortController();
  let timer = setTimeout(() => control.abort(), SILENCE);
  try {
    const headers = { Accept: "text/event-stream", ...(last ? { "Last-Event-ID": last } : {}) };
    const answer = await ask("events", token, { headers, signal: control.signal });
    state("live", "");
    const parser = new Parser(), reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      clearTimeout(timer);
      timer = setTimeout(() => control.abort(), SILENCE);
      for (const event of parser.feed(value)) told(event);
    }
  } finally {
    clearTimeout(timer);
  }
}
