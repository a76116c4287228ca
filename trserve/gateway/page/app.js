// The page put together: what is pressed, what is asked, what is shown. Each part knows less.

import { ApiError, address, getJson, hasKey, useKey } from "./api.js";
import { cardWords, forgetCard, hideCard, peekCard, showCard } from "./card.js";
import { firstLanguage, languageNow, t, useLanguage } from "./catalogue.js";
import * as controls from "./controls.js";
import { byId, make, save } from "./dom.js";
import { drawPlots, follow } from "./plots.js";
import { addRun, drawRuns, runsAsCsv } from "./runs.js";
import { asCurl, asPython } from "./snippets.js";
import * as status from "./status.js";
import { asJson, requestBody, runOne } from "./talk.js";
import { firstTheme, isDark, onTheme, useTheme } from "./theme.js";

const ROUTED = "routed";
const BOTH = "side-by-side";
let about = null;
let messages = [];
let turns = [];
let abort = null;
let atEnd = true;

const end = make("div");
new IntersectionObserver(([entry]) => (atEnd = entry.isIntersecting), { rootMargin: "0px 0px 120px" }).observe(end);

const tools = {
  choose: showCard,
  peek: peekCard,
  grown: () => atEnd && end.scrollIntoView({ block: "nearest" }),
  say: (text) => (byId("said").textContent = text),
};

// ---- what the server offers ----

async function learn() {
  try {
    about = await getJson("v1/trserve/about");
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) askKey(error);
    else if (error instanceof ApiError) notice(t("failed", { status: error.status, why: error.message }));
    return; // who does not answer at all is told of in the state
  }
  byId("key-form").hidden = true;
  notice("");
  controls.useRouter(about.router);
  offer();
  follow((event) => {
    status.heard(event);
    if (event.phase === "serving" && !about.router.known) learn();
  });
}

function askKey(error) {
  byId("key-form").hidden = false;
  notice(hasKey() ? t("keyWrong", { why: error.message }) : "");
  byId("key").focus();
}

function offer() {
  const before = byId("mode").value || ROUTED;
  const option = (value, text) => make("option", { value }, text);
  const single = about.models.map((model) => option(`only:${model.name}`, t("onlyModel", { model: model.name })));
  byId("mode").replaceChildren(option(ROUTED, t("routed")), ...single, option(BOTH, t("sideBySide")));
  byId("mode").value = before;
  const entries = about.models.map((model, n) => make("span", { className: `t m${n % 5} swatch` }, model.name));
  const emulated = about.device === "emulated" ? [make("span", { className: "hint" }, t("emulated"))] : [];
  byId("legend").replaceChildren(...entries, ...emulated);
}

function notice(text) {
  byId("notice").hidden = !text;
  byId("notice").textContent = text;
}

// ---- asking ----

function ways() {
  const mode = byId("mode").value;
  const routed = { only: null, who: () => t("routed") };
  const single = about.models.map((model) => ({ only: model.name, who: () => t("onlyModel", { model: model.name }) }));
  if (mode === BOTH) return [single[0], routed, ...single.slice(1)];
  return mode === ROUTED ? [routed] : single.filter((way) => mode === `only:${way.only}`);
}

function bodyOf(way, prompt) {
  const system = controls.systemPrompt();
  const asked = [...(system ? [{ role: "system", content: system }] : []), ...messages, { role: "user", content: prompt }];
  return requestBody({ about, messages: asked, settings: controls.sampling(), router: controls.chosenValues(), only: way.only });
}

async function ask(prompt) {
  abort = new AbortController();
  busy(true);
  const place = make("div", { className: "turn columns" });
  byId("empty").hidden = true;
  byId("turns").append(make("div", { className: "turn turn-user" }, make("span", { className: "sr" }, `${t("you")}: `), prompt), place, end);
  end.scrollIntoView({ block: "nearest" });
  tools.say(t("started"));
  const turn = { prompt, runs: [] };
  turns.push(turn);
  // One after the other: at the same time each would take time from the others.
  for (const way of ways()) {
    const body = bodyOf(way, prompt);
    const threshold = way.only === null ? controls.threshold() : null;
    const run = await runOne({ about, body, who: way.who, threshold, signal: abort.signal, place, tools });
    turn.runs.push(run);
    if (run.tokens.length) addRun(run, about);
    if (run.error instanceof ApiError && run.error.status === 401) askKey(run.error);
    if (abort.signal.aborted) break;
  }
  const kept = turn.runs.find((run) => !run.body.trserve.only && run.text) ?? turn.runs.find((run) => run.text);
  if (kept) messages.push({ role: "user", content: prompt }, { role: "assistant", content: kept.text });
  else byId("prompt").value ||= prompt; // nothing came of it: to be sent again, or changed
  busy(false);
}

function busy(is) {
  byId("stop").disabled = !is;
  byId("send").disabled = is;
  if (!is && document.activeElement === document.body) byId("prompt").focus();
}

function submit() {
  const prompt = byId("prompt").value;
  if (!prompt.trim() || byId("send").disabled) return;
  if (!about) {
    learn();
    return;
  }
  byId("prompt").value = "";
  ask(prompt);
}

function clear() {
  abort?.abort();
  messages = [];
  turns = [];
  forgetCard();
  byId("turns").replaceChildren();
  byId("empty").hidden = false;
  byId("prompt").focus();
}

// ---- taking away ----

/** The request that was sent last, or the one that would be sent now. */
function lastBody() {
  const last = turns.at(-1)?.runs.at(-1)?.body;
  return last ?? (about && bodyOf(ways()[0], byId("prompt").value || "Hello"));
}

async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    notice("");
    tools.say(t("copied"));
    byId("state").textContent = t("copied");
    setTimeout(status.draw, 1500);
  } catch {
    notice(`${t("copyFailed")}\n${text}`); // an origin that is not secure: the text can be marked
  }
}

function saveAll() {
  const told = { saved_at: new Date().toISOString(), server: about, messages, turns: turns.map(({ prompt, runs }) => ({ prompt, runs: runs.map(asJson) })) };
  save("trserve-conversation.json", "application/json", JSON.stringify(told, null, 1));
}

// ---- words and colours ----

function words() {
  useLanguage(languageNow());
  byId("prompt").placeholder = t("promptPlace");
  byId("theme").textContent = t(isDark() ? "light" : "dark");
  if (about) offer();
  controls.draw();
  status.draw();
  drawPlots();
  drawRuns();
  cardWords();
  for (const { runs } of turns) for (const run of runs) run.answer.words();
}

function wire() {
  byId("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    submit();
  });
  byId("prompt").addEventListener("keydown", (event) => {
    // Enter that ends a syllable or a word of an input method does not send.
    if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    submit();
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && !hideCard()) abort?.abort();
  });
  byId("stop").addEventListener("click", () => abort?.abort());
  byId("clear").addEventListener("click", clear);
  byId("plain").addEventListener("change", ({ target }) => document.body.classList.toggle("plain", target.checked));
  byId("copy-curl").addEventListener("click", () => about && copy(asCurl(address("."), lastBody(), hasKey())));
  byId("copy-python").addEventListener("click", () => about && copy(asPython(address("."), lastBody(), hasKey())));
  byId("export").addEventListener("click", saveAll);
  byId("export-csv").addEventListener("click", () => save("trserve-runs.csv", "text/csv", runsAsCsv()));
  byId("key-form").addEventListener("submit", (event) => {
    event.preventDefault();
    useKey(byId("key").value);
    byId("key").value = "";
    learn();
  });
  byId("language").value = languageNow();
  byId("language").addEventListener("change", ({ target }) => {
    useLanguage(target.value, { store: true });
    words();
  });
  byId("theme").addEventListener("click", () => useTheme(isDark() ? "light" : "dark"));
  onTheme(() => {
    words();
    for (const { runs } of turns) for (const run of runs) run.answer.strip.redraw();
  });
}

useLanguage(firstLanguage());
firstTheme();
wire();
words();
learn();
status.watch(learn);
