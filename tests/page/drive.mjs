// Scenarios with a real browser; each prints its findings as one line of JSON, or fails.
//
//   node drive.mjs SCENARIO MODULES_FOLDER '{"url": ..., "chromium": ..., "shots": folder or ""}'

import { PATIENCE_MS, QUESTION, ask, assert, ready, saved, scenario, serious, settings, shot, shown, withPage } from "./browser.mjs";

const scenarios = {
  /** The reduced form: an answer, the slider, side by side, the keyboard, axe. */
  async usual(page, watched) {
    await ready(page);
    await page.waitForFunction(() => document.querySelectorAll("#plots canvas").length === 6);
    await shot(page, "empty");
    await ask(page);
    const [turn] = (await saved(page)).turns;
    const [run] = turn.runs;
    const usage = run.usage.trserve.tokens;
    assert.deepEqual(await shown(page, 0), Object.values(usage), "styles are not as the usage says");
    assert.equal(run.tokens.length, run.usage.completion_tokens);
    assert.equal(run.tokens.map((token) => token.text).join(""), run.text);
    assert.equal(await page.locator(".answer").first().textContent(), run.text);
    assert.ok(run.tokens.every((token) => token.score !== null && token.alternatives.length === 5));
    const lines = await page.evaluate(() => [0, 1].map((n) => getComputedStyle(document.querySelector(`.answer .m${n}`)).textDecorationStyle));
    assert.notEqual(lines[0], lines[1], "colour alone tells the models apart");

    const card = await keyboard(page);
    const shares = await slider(page);
    const columns = await sideBySide(page);
    await shot(page, "side-by-side");
    assert.deepEqual(await serious(page), []);
    assert.deepEqual(watched.errors, []);
    return { usage, card, shares, columns, longest_task_ms: Math.max(0, ...(await page.evaluate(() => window.longTasks))) };
  },

  /** What the reduced form leaves out: widths, themes, languages, errors, stopping, copying. */
  async more(page, watched, browser) {
    await ready(page);
    await ask(page);
    const found = {};
    for (const [name, width, height] of [["narrow", 320, 640], ["zoomed", 640, 450], ["wide", 1280, 900]]) {
      await page.setViewportSize({ width, height });
      await page.locator(".answer").first().click({ position: { x: 8, y: 12 } });
      const over = await page.evaluate(() => document.documentElement.scrollWidth - document.documentElement.clientWidth);
      assert.ok(over <= 0, `${name}: the page is ${over} px too wide`);
      assert.deepEqual(await serious(page), [], name);
      await shot(page, name, { fullPage: name !== "narrow" });
      await page.keyboard.press("Escape");
    }
    await page.click("#theme");
    assert.equal(await page.evaluate(() => document.documentElement.dataset.theme), "dark");
    assert.deepEqual(await serious(page), [], "dark");
    await shot(page, "dark");
    await page.selectOption("#language", "ko");
    assert.equal(await page.getAttribute("html", "lang"), "ko");
    assert.equal(await page.innerText("#send"), "보내기");
    assert.deepEqual(await serious(page), [], "Korean");
    await shot(page, "korean");
    const korean = await page.innerText("body");
    assert.ok(!/\{\w+\}/.test(korean), "a place was not filled in");
    await page.selectOption("#language", "en");

    await ask(page, "flowers ".repeat(2000));
    found.refusal = await page.locator(".answer-error:visible").last().innerText();
    assert.match(await page.inputValue("#prompt"), /^flowers/);
    assert.match(found.refusal, /failed \(400\): .*tokens/);
    await shot(page, "refused", { fullPage: false });
    await page.locator("details summary").click();
    await page.fill("#max-tokens", "600");
    await page.check("#ignore-eos");
    await page.selectOption("#mode", "only:small");
    await page.fill("#prompt", QUESTION);
    await page.press("#prompt", "Enter");
    // From within the page: an answer is there sooner than a click by the debugger.
    await page.waitForFunction(() => {
      const begun = document.querySelectorAll(".answer")[2]?.querySelector(".t");
      if (begun) document.querySelector("#stop").click();
      return begun;
    });
    await page.waitForFunction(() => !document.querySelector(".answer.still"));
    found.stopped_at = await page.locator(".answer").nth(2).locator(".t").count();
    assert.ok(found.stopped_at < 600);
    assert.match(await page.locator(".answer-note:visible").last().innerText(), /Stopped/);

    await page.context().grantPermissions(["clipboard-read", "clipboard-write"]);
    await page.click("#copy-curl");
    const curl = await page.evaluate(() => navigator.clipboard.readText());
    await page.click("#copy-python");
    const python = await page.evaluate(() => navigator.clipboard.readText());
    const status = watched.errors.filter((text) => !/status of 400/.test(text));
    assert.deepEqual(status, []);
    const calm = await browser.newContext({ reducedMotion: "reduce" });
    const still = await calm.newPage();
    await still.goto(settings.url);
    const running = await still.evaluate(() => document.getAnimations().length);
    assert.equal(running, 0);
    return { ...found, curl, python };
  },

  /** A long answer while the main thread is watched. */
  async long(page, watched, browser) {
    await ready(page);
    await page.locator("details summary").click();
    await page.fill("#max-tokens", String(settings.tokens));
    await page.check("#ignore-eos");
    await browser.startTracing(page, { categories: ["toplevel", "devtools.timeline", "disabled-by-default-devtools.timeline"] });
    await page.evaluate(() => (window.longTasks.length = 0));
    const began = Date.now();
    await ask(page, "Go on.");
    const seconds = (Date.now() - began) / 1000;
    const tasks = await page.evaluate(() => window.longTasks.slice());
    const cpu = busiest(await browser.stopTracing());
    assert.match(await page.innerText("#legend"), /Emulated/);
    const [run] = (await saved(page)).turns[0].runs;
    const counts = await shown(page, 0);
    assert.deepEqual(counts, Object.values(run.usage.trserve.tokens));
    assert.equal(counts[0] + counts[1], settings.tokens);
    await shot(page, "long", { fullPage: false });
    assert.ok(cpu <= 100, `a task of ${cpu} ms of CPU`);
    assert.deepEqual(watched.errors, []);
    return { tokens: settings.tokens, seconds, tokens_per_s: Math.round(settings.tokens / seconds), tasks_over_50_ms: tasks.length, longest_task_ms: Math.max(0, ...tasks), longest_task_cpu_ms: cpu };
  },

  /** A server with a key. */
  async key(page, watched) {
    await page.waitForSelector("#key-form:visible");
    await page.fill("#key", "wrong");
    await page.press("#key", "Enter");
    await page.waitForSelector("#notice:visible");
    await shot(page, "key");
    assert.deepEqual(await serious(page), []);
    await page.fill("#key", settings.key);
    await page.press("#key", "Enter");
    await ready(page);
    await page.waitForSelector("#key-form", { state: "hidden" });
    await ask(page);
    const stored = await page.evaluate(() => [Object.values(sessionStorage), Object.values(localStorage), document.cookie]);
    assert.deepEqual(stored[0], [settings.key]);
    assert.ok(!stored[1].includes(settings.key) && stored[2] === "");
    assert.ok(watched.errors.every((text) => /status of 401/.test(text)), watched.errors.join());
    return { ok: true };
  },

  /** Tell, a line each, what the page says of the server, until told to stop. */
  async states(page) {
    let last = "";
    console.log(JSON.stringify({ state: "open" }));
    const until = Date.now() + settings.seconds * 1000;
    while (Date.now() < until) {
      const now = await page.innerText("#state");
      if (now !== last) console.log(JSON.stringify({ state: now }));
      if (now !== last) await shot(page, `state-${now.replace(/\W+/g, "-").slice(0, 24)}`, { fullPage: false });
      last = now;
      await new Promise((go) => setTimeout(go, 100));
    }
    return { last };
  },
};

/** The most CPU time of one task of a page's main thread, in ms. */
function busiest(trace) {
  const { traceEvents } = JSON.parse(trace.toString());
  const thread = (event) => `${event.pid}/${event.tid}`;
  const main = new Set(traceEvents.filter((each) => each.name === "thread_name" && each.args.name === "CrRendererMain").map(thread));
  const tasks = traceEvents.filter((each) => /RunTask$/.test(each.name) && each.tdur !== undefined && main.has(thread(each)));
  assert.ok(tasks.length > 100, "the trace has no tasks");
  return Math.max(...tasks.map((each) => Math.round(each.tdur / 100) / 10));
}

async function keyboard(page) {
  await page.focus("#prompt");
  // From the prompt back to the answer with Tab alone.
  for (let n = 0; n < 12; n += 1) {
    await page.keyboard.press("Shift+Tab");
    if (await page.evaluate(() => document.activeElement.classList.contains("answer"))) break;
  }
  assert.ok(await page.evaluate(() => document.activeElement.classList.contains("answer")), "Tab does not reach the answer");
  for (let n = 0; n < 3; n += 1) await page.keyboard.press("ArrowRight");
  const card = await page.innerText("#card");
  assert.match(card, /Token 3 of/);
  assert.ok(/Score/.test(card) && /tau = /.test(card) && /might have written/.test(card), card);
  assert.notEqual(await page.innerText("#token-said"), "");
  await page.keyboard.press("Enter");
  assert.ok(await page.evaluate(() => document.querySelector("#card").contains(document.activeElement)));
  await page.locator("[data-act=nextOther]").press("Enter");
  const other = await page.innerText("#card");
  assert.match(other, /small/);
  await shot(page, "card", { fullPage: false });
  assert.deepEqual(await serious(page), []);
  await page.keyboard.press("Escape");
  assert.ok(await page.isHidden("#card"));
  await page.locator(".answer .m1").first().hover();
  await page.waitForSelector("#card:visible");
  assert.match(await page.innerText("#card"), /small/);
  await page.mouse.move(2, 2);
  await page.waitForSelector("#card", { state: "hidden" });
  assert.ok(await page.evaluate(() => document.activeElement.classList.contains("answer")), "focus is lost");
  return other.split("\n").slice(0, 12);
}

async function slider(page) {
  const shares = [];
  for (const key of ["Home", "End"]) {
    await page.click("#clear");
    await page.locator("#parameters input[type=range]").first().press(key);
    await ask(page);
    const [own, other] = await shown(page, 0);
    shares.push(other / (own + other));
  }
  assert.ok(shares[0] > 0.9 && shares[1] === 0, `shares ${shares}`);
  await page.click("#reset");
  assert.ok(Number(await page.inputValue("#parameter-tau")) < 1 && (await page.isDisabled("#reset")));
  return shares;
}

async function sideBySide(page) {
  await page.click("#clear");
  await page.fill("#parameter-tau", "0.06");
  await page.selectOption("#mode", "side-by-side");
  await ask(page);
  const columns = await page.locator(".columns").last().locator(".column").count();
  assert.equal(columns, 3);
  const [small, routed, large] = [await shown(page, 0), await shown(page, 1), await shown(page, 2)];
  assert.ok(small[1] === 0 && large[0] === 0 && routed[0] > 0);
  const facts = await page.locator(".facts").allInnerTexts();
  assert.ok(facts.every((text) => /share/.test(text) && /cost/.test(text) && /time/.test(text)), facts.join());
  assert.equal(await page.locator("#runs tbody tr").count() >= 3, true);
  return { small, routed, large, facts: facts.map((text) => text.replaceAll("\n", " ")) };
}

const timer = setTimeout(() => {
  console.error(`${scenario}: no end`);
  process.exit(3);
}, (settings.seconds ?? 0) * 1000 + 4 * PATIENCE_MS);
try {
  console.log(JSON.stringify(await withPage(scenarios[scenario], settings.context ?? {})));
} catch (error) {
  console.error(error.stack ?? error);
  process.exitCode = 1;
}
clearTimeout(timer);
