// What the server is at, in one line: asked of /health, heard in the statistics. Knows no models' work.

import { health } from "./api.js";
import { t } from "./catalogue.js";
import { byId } from "./dom.js";

const OFTEN_MS = 1500;
const SELDOM_MS = 8000;

let level = "wait";
let words = () => "";
let isReady = false;

function show(newLevel, newWords) {
  level = newLevel;
  words = newWords;
  draw();
}

export function draw() {
  const text = words();
  const place = byId("state");
  if (place.textContent !== text) place.textContent = text;
  place.dataset.level = level;
}

export function ready() {
  return isReady;
}

// The server says these in English; the page has words of its own for them.
const SAID = { "the models are still loading": "loading", "the server is shutting down": "draining" };

function understand(told) {
  const up = told.status === "ok" || told.status === "degraded";
  const key = SAID[told.detail];
  if (told.status === "ok") show("ok", () => t("serving"));
  else if (up) show("bad", () => t("degraded", { why: told.detail.replace(/^serving; /, "") }));
  else if (key) show("wait", () => t(key));
  else show("bad", () => t("notReady", { why: told.detail }));
  return up;
}

/** Ask for as long as the page is there; `became` is called when the server becomes ready. */
export async function watch(became) {
  for (;;) {
    let up = false;
    try {
      up = understand(await health());
    } catch {
      show("bad", () => t("unreachable")); // whatever kept it from answering: it is asked again
    }
    const before = isReady;
    isReady = up;
    if (up && !before) became();
    await new Promise((go) => setTimeout(go, up ? SELDOM_MS : OFTEN_MS));
  }
}

/** An event of the statistics told of the phase. */
export function heard({ phase }) {
  if (phase === "serving") return;
  isReady = false;
  show("wait", () => t(phase));
}
