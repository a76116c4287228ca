// What all scenarios share: a Chromium, a page that is watched, and the questions put to it.

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";

const [, , scenario, modules, settingsJson] = process.argv;
const require = createRequire(`${modules}/node_modules/`);
const { chromium } = require("playwright-core");
const axe = readFileSync(require.resolve("axe-core/axe.min.js"), "utf8");

export const settings = JSON.parse(settingsJson);
export const PATIENCE_MS = 30_000;
export const QUESTION = "Dan has 73 flowers. Maya has 63 fewer flowers than Dan. How many flowers do they have together?";
export { assert, scenario };

/** Run `story(page, watched)` in a browser of its own; `watched` is what must stay empty. */
export async function withPage(story, { url = settings.url, ...options } = {}) {
  const browser = await chromium.launch({ executablePath: settings.chromium, args: ["--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"] });
  try {
    const context = await browser.newContext({ viewport: { width: 1280, height: 900 }, acceptDownloads: true, locale: "en-US", ...options });
    const page = await context.newPage();
    page.setDefaultTimeout(PATIENCE_MS);
    const watched = { foreign: [], errors: [], served: new Map() };
    page.on("request", (request) => {
      const at = new URL(request.url());
      if (at.protocol !== "blob:" && at.origin !== new URL(url).origin) watched.foreign.push(request.url());
    });
    page.on("console", (message) => message.type() === "error" && watched.errors.push(message.text()));
    page.on("pageerror", (error) => watched.errors.push(String(error)));
    await page.addInitScript(() => {
      window.longTasks = [];
      new PerformanceObserver((list) => window.longTasks.push(...list.getEntries().map((entry) => Math.round(entry.duration)))).observe({ type: "longtask", buffered: true });
    });
    for (let tries = 0; ; tries += 1) {
      try {
        await page.goto(url);
        break;
      } catch (error) {
        if (tries === (settings.tries ?? 0)) throw error; // else the server is not there yet
        await new Promise((go) => setTimeout(go, 100));
      }
    }
    const result = await story(page, watched, browser);
    assert.deepEqual(watched.foreign, [], "a request left the origin");
    return result;
  } finally {
    await browser.close();
  }
}

export async function ready(page) {
  await page.waitForFunction(() => document.querySelector("#state").dataset.level === "ok" && document.querySelector("#mode").options.length > 1);
}

/** Ask and wait until the answer, or all of several, have ended. */
export async function ask(page, prompt = QUESTION) {
  const before = await page.locator(".answer").count();
  await page.fill("#prompt", prompt);
  await page.press("#prompt", "Enter");
  await page.waitForFunction((n) => document.querySelectorAll(".answer").length > n, before);
  await page.waitForFunction(() => document.querySelector("#stop").disabled && !document.querySelector(".answer.still"));
}

/** What the page saves as JSON. */
export async function saved(page) {
  const [download] = await Promise.all([page.waitForEvent("download"), page.click("#export")]);
  return JSON.parse(readFileSync(await download.path(), "utf8"));
}

/** Tokens on the page by model, of the answer with this number. */
export function shown(page, answer) {
  return page.evaluate((n) => {
    const text = document.querySelectorAll(".answer")[n];
    return [0, 1].map((model) => text.querySelectorAll(`.t.m${model}`).length);
  }, answer);
}

/** Violations that axe calls serious or critical. */
export async function serious(page) {
  // The page's own policy allows no script to be put in: axe comes by the debugger.
  await page.evaluate(axe);
  const found = await page.evaluate(async () => (await window.axe.run(document, { resultTypes: ["violations"] })).violations);
  return found
    .filter((each) => ["serious", "critical"].includes(each.impact))
    .map((each) => `${each.id}: ${each.nodes.slice(0, 3).map((node) => `${node.target} ${node.failureSummary}`).join("; ")}`);
}

export async function shot(page, name, options = {}) {
  if (settings.shots) await page.screenshot({ path: `${settings.shots}/${name}.png`, fullPage: true, ...options });
}
