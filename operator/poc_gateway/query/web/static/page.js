// SPDX-License-Identifier: Apache-2.0
// The page: asks for the token if need be, follows the stream, and shows what it tells.

import { $, moment } from "./dom.js";
import { follow, Unauthorized } from "./stream.js";
import { View } from "./view.js";

const TOKEN = "poc-gateway-token", THEME = "poc-theme", MOST_POINTS = 240;

const state = { sections: {}, points: [] };
const view = new View(state, () => sessionStorage.getItem(TOKEN) ?? "");
let planned = false, wasAway = false, toldAt = 0;

/** Draw at the next frame, however many events come until then. */
function draw() {
  if (planned) return;
  planned = true;
  requestAnimationFrame(() => {
    planned = false;
    view.draw();
  });
}

function told(name, content) {
  if (name === "snapshot") {
    state.sections = content.sections;
    state.points = content.points;
  } else if (name === "changes") {
    Object.assign(state.sections, content.sections);
    for (const gone of content.gone) delete state.sections[gone];
    const last = state.points.at(-1)?.at ?? 0;
    state.points.push(...(content.points ?? []).filter((point) => point.at > last));
    state.points.splice(0, state.points.length - MOST_POINTS);
  }
  toldAt = Date.now();
  $("content").hidden = false;
  draw();
}

function connection(kind, text) {
  const status = $("status");
  status.dataset.state = kind === "live" ? "live" : "off";
  const shown = toldAt ? ` What is shown is of ${moment(toldAt)}.` : "";
  status.textContent = kind === "live" ? "Live" : `${text}.${shown} Trying again …`;
  // The clock must not be announced with each try.
  if (kind === "away" && wasAway) status.setAttribute("aria-live", "off");
  else status.setAttribute("aria-live", "polite");
  wasAway = kind === "away";
}

function askForToken(error) {
  $("content").hidden = true;
  $("forget").hidden = true;
  $("login").hidden = false;
  $("token-error").textContent = error;
  $("status").dataset.state = "off";
  $("status").textContent = "The gateway asks for its token";
  $("token").focus();
}

async function start() {
  const token = sessionStorage.getItem(TOKEN) ?? "";
  $("forget").hidden = !token;
  try {
    await follow({ token, told, state: connection });
  } catch (error) {
    if (!(error instanceof Unauthorized)) throw error;
    sessionStorage.removeItem(TOKEN);
    askForToken(token ? "The gateway does not accept this token. Read it anew from the Secret." : "");
  }
}

$("login-form").addEventListener("submit", (event) => {
  event.preventDefault();
  // The Secret's value may hold two tokens while it is changed: either is right.
  sessionStorage.setItem(TOKEN, $("token").value.split(",")[0].trim());
  $("token").value = "";
  $("login").hidden = true;
  $("main").focus();
  start();
});
$("forget").addEventListener("click", () => {
  sessionStorage.removeItem(TOKEN);
  location.reload();
});

const theme = $("theme");
function setTheme(value) {
  if (value) document.documentElement.dataset.theme = value;
  else delete document.documentElement.dataset.theme;
}
theme.value = localStorage.getItem(THEME) ?? "";
setTheme(theme.value);
theme.addEventListener("change", () => {
  localStorage.setItem(THEME, theme.value);
  setTheme(theme.value);
});

start();
